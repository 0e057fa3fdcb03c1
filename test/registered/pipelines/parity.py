"""What the parity tests share: watching a pipeline's components, running both implementations."""

from collections import defaultdict
from dataclasses import dataclass, field

import torch


@dataclass
class Trace:
    """What passed through the components of one pipeline: name -> tensors in call order."""

    seen: dict[str, list] = field(default_factory=lambda: defaultdict(list))

    def watch_decode(self, vae):
        """Record what the VAE decodes, and from what."""
        decode = vae.decode

        def recording_decode(latents, **options):
            decoded = decode(latents, **options)
            self.seen["decoded from"] += list(latents)
            self.seen["decoded"] += list(decoded[0])
            return decoded

        vae.decode = recording_decode

    def take(self):
        """The recorded tensors; the next request starts empty."""
        taken = dict(self.seen)
        self.seen.clear()
        return taken


class Pair:
    """One checkpoint loaded by both implementations; subclasses set engine, reference, ours and
    theirs (a `Trace` of each)."""

    def run_ours(self, prompt, n, seed, **request):
        """(pixels uint8 of each image, trace)"""
        made = self.engine.generate(
            prompt, num_outputs_per_prompt=n, seed=seed, return_frames=True, **request
        )
        return [r.frames for r in (made if n > 1 else [made])], self.ours.take()

    def run_reference(self, prompt, n, seed, **request):
        """(pixels in 0..1 of each image, trace)"""
        generators = [torch.Generator("cpu").manual_seed(seed + i) for i in range(n)]
        images = self.reference(
            prompt, num_images_per_prompt=n, generator=generators, output_type="np", **request
        ).images
        return list(images), self.theirs.take()
