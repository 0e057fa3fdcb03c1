"""Image to image: the picture's latents are noised part of the way, and denoised from there.

As `diffusers.FluxImg2ImgPipeline` 0.42.1: of one generator an image, the draws are first the
posterior sample of the VAE, then the noise.
"""

from dataclasses import dataclass
from typing import Any

import torch

from sglang.multimodal_gen.configs.sampling_params import SamplingParams
from sglang.multimodal_gen.runtime.pipelines.stages.checks import require_finite
from sglang.multimodal_gen.runtime.pipelines.stages.condition_pixels import vae_pixels
from sglang.multimodal_gen.runtime.pipelines.stages.latent_preparation import (
    LatentPreparationStage,
    draw_noise,
    pack_latents,
)
from sglang.multimodal_gen.runtime.pipelines.stages.state import BatchState, ImageState
from sglang.multimodal_gen.runtime.pipelines.stages.timestep_preparation import (
    TimestepPreparationStage,
)


@dataclass(kw_only=True)
class ImageLatentPreparationStage(LatentPreparationStage):
    """Noise as without a picture; with one, its latents too, drawn by each image's generator."""

    vae: torch.nn.Module  # AutoencoderKL

    def __call__(self, batch: BatchState) -> None:
        super().__call__(batch)
        if batch.params.image is None:
            return
        posterior = self.encode(batch.params)
        for image in batch.images:
            self.start_from(image, posterior, batch.params.generator_device)

    def encode(self, params: SamplingParams) -> Any:
        """The VAE's posterior of the picture at the request's size, its mean [1, c, h, w]."""
        (picture,) = params.image
        pixels = vae_pixels(picture, params.height, params.width)
        posterior = self.vae.encode(pixels.to(self.device, self.vae.dtype)).latent_dist
        require_finite(self.name, "encoded image", posterior.mean)
        return posterior

    def start_from(self, image: ImageState, posterior: Any, generator_device: str) -> None:
        """Draw the image's sample of the posterior, then its noise, from one generator."""
        generator = torch.Generator(generator_device).manual_seed(image.request.seed)
        shape = tuple(posterior.mean.shape)
        draw, noise = (
            draw_noise(generator, shape).to(self.device, dtype)
            for dtype in (self.vae.dtype, self.dtype)
        )
        sample = posterior.mean + posterior.std * draw
        sample = (sample - self.vae.config.shift_factor) * self.vae.config.scaling_factor
        image.start_latents = pack_latents(sample.to(self.dtype))
        image.latents = pack_latents(noise)


class StrengthTimestepPreparationStage(TimestepPreparationStage):
    """The schedule; with a picture it begins at `strength`, and so do the latents: the picture's,
    noised to the first level that is left."""

    def __call__(self, batch: BatchState) -> None:
        super().__call__(batch)
        first = batch.params.first_step
        for image in batch.images:
            if image.start_latents is None:
                continue
            image.sigmas, image.timesteps = image.sigmas[first:], image.timesteps[first:]
            level = image.sigmas[0].to(image.latents.dtype)
            image.latents = level * image.latents + (1.0 - level) * image.start_latents
            image.start_latents = None
