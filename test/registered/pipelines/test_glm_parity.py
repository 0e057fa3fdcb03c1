"""GLM-Image against diffusers' GlmImagePipeline, float32 on the CPU, stage by stage.

Both sides are watched in the same way: hooks on the text encoder and the transformer, wrappers
around the prior's `generate` and the VAE's `decode`. The reference draws one prior a call, from the
first generator; here each image has a prior of its own seed, so image i of a batch is compared with
the reference's single image of that seed.
"""

from collections import defaultdict

import numpy as np
import pytest
import torch
from diffusers import GlmImagePipeline

from sglang.multimodal_gen import DiffGenerator
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.tiny_glm import write_tiny_glm

register_cpu_ci(est_time=80, suite="base-a-test-cpu")

MAX_RELATIVE = 1e-5
STEPS = 2
SIZES = ((64, 64), (96, 64), (32, 128))
PROMPTS = {
    "empty": "",
    "plain": "a red apple on a table",
    "one glyph": "a shop sign that says 'OPEN'",
    "glyphs": '"Grüße" beside “漢字”, \'it\', 「赤いりんご 🍎」 and "" on <sop> a wall',
    "long": "a sign that reads '" + "very " * 60 + "long' " + "under a tree " * 40,
}
GUIDANCE = {
    "default": {},
    "off": {"guidance_scale": 1.0},
    "negative": {"guidance_scale": 3.0, "negative_prompt": "no 'CLOSED', no 'SALE'"},
    "unquoted": {"true_cfg_scale": 2.0, "negative_prompt": "blurry"},
}


def recording(function, record):
    """`function`, handing each call to `record(args, kwargs, output)`."""

    def call(*args, **kwargs):
        output = function(*args, **kwargs)
        record(args, kwargs, output)
        return output

    return call


class Trace:
    """What passed through the components of one pipeline: name -> tensors in call order."""

    def __init__(self, text_encoder, vae):
        self.seen = defaultdict(list)
        text_encoder.register_forward_hook(self._glyphs, with_kwargs=True)
        vae.decode = recording(vae.decode, self._decode)

    def note(self, **tensors):
        for name, tensor in tensors.items():
            self.seen[name].append(tensor)

    def _glyphs(self, module, args, kwargs, output):
        self.note(glyph_ids=args[0], mask=kwargs["attention_mask"], glyphs=output[0])

    def _decode(self, args, kwargs, output):
        self.note(decoded_from=args[0], decoded=output[0])

    def take(self):
        taken, self.seen = dict(self.seen), defaultdict(list)
        return taken


class OurTrace(Trace):
    def __init__(self, stages):
        prior, glyphs, latents, timesteps, denoising, decoding = stages
        super().__init__(glyphs.text_encoder, decoding.vae)
        prior.decoder.generate = recording(prior.decoder.generate, self._prior)
        transformer = denoising.transformer
        transformer.condition = recording(transformer.condition, self._condition)
        transformer.register_forward_hook(self._transformer)

    def _prior(self, args, kwargs, output):
        self.note(prompt_ids=args[0], prior_tokens=output)

    def _condition(self, args, kwargs, output):
        self.note(text=args[0], prior_ids=args[1])

    def _transformer(self, module, args, output):
        latents, _, _, timestep, size, *_ = args
        self.note(latents=latents, timestep=timestep, size=size, velocity=output)


class TheirTrace(Trace):
    def __init__(self, pipeline):
        super().__init__(pipeline.text_encoder, pipeline.vae)
        ar = pipeline.vision_language_encoder
        ar.generate = recording(ar.generate, self._prior)
        pipeline.transformer.register_forward_hook(self._transformer, with_kwargs=True)

    def _prior(self, args, kwargs, output):
        ids = kwargs["input_ids"]
        self.note(prompt_ids=ids, prior_tokens=output[0, ids.shape[1] : -1])

    def _transformer(self, module, args, kwargs, output):
        self.note(
            latents=kwargs["hidden_states"],
            text=kwargs["encoder_hidden_states"],
            prior_ids=kwargs["prior_token_id"],
            timestep=kwargs["timestep"],
            size=kwargs["target_size"],
            velocity=output[0],
        )


class Pair:
    """One checkpoint loaded by both implementations."""

    def __init__(self, folder):
        self.engine = DiffGenerator.from_pretrained(folder, log_level="error", device="cpu")
        self.ours = OurTrace(self.engine._worker.pipeline.stages)
        self.reference = GlmImagePipeline.from_pretrained(folder, local_files_only=True)
        self.reference.set_progress_bar_config(disable=True)
        self.theirs = TheirTrace(self.reference)

    def run_ours(self, prompt, n, seed, **request):
        """(results, trace)"""
        made = self.engine.generate(
            prompt, num_outputs_per_prompt=n, seed=seed, return_frames=True, **request
        )
        return made if n > 1 else [made], self.ours.take()

    def run_reference(self, prompt, seed, negative_prompt=None, true_cfg_scale=None, **request):
        """(pixels in 0..1, trace)"""
        scale = request.pop("guidance_scale", true_cfg_scale or 1.5)
        if negative_prompt is not None:
            with torch.no_grad():  # attention rounds otherwise where a gradient is wanted
                embeds = self.reference._get_glyph_embeds([negative_prompt])
            negative = self.theirs.take()
            request["negative_prompt_embeds"] = embeds
        image = self.reference(
            prompt,
            guidance_scale=scale,
            generator=torch.Generator("cpu").manual_seed(seed),
            output_type="np",
            **request,
        ).images[0]
        trace = self.theirs.take()
        if negative_prompt is not None:
            for name, tensors in negative.items():
                trace[name] = trace[name] + tensors
        return image, trace


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return Pair(write_tiny_glm(tmp_path_factory.mktemp("tiny") / "glm"))


def relative_difference(got, expected):
    assert got.shape == expected.shape
    return ((got - expected).abs().max() / expected.abs().max()).item()


def assert_same(name, got, expected, *, exact):
    assert len(got) == len(expected) > 0, name
    for call, (a, b) in enumerate(zip(got, expected, strict=True)):
        if exact:
            assert torch.equal(a, b), f"{name}, call {call}"
        else:
            assert relative_difference(a, b) <= MAX_RELATIVE, f"{name}, call {call}"


EXACT = ("prompt_ids", "prior_tokens", "prior_ids", "glyph_ids", "mask", "timestep", "size")
CLOSE = ("glyphs", "text", "latents", "velocity", "decoded_from", "decoded")


def image_of(trace, index, n):
    """The calls of image `index`: everything but the shared glyphs is made once an image."""
    shared = ("glyph_ids", "mask", "glyphs")
    per_image = {name: len(calls) // n for name, calls in trace.items()}
    return {
        name: calls if name in shared else calls[index * per_image[name] :][: per_image[name]]
        for name, calls in trace.items()
    }


def assert_same_traces(ours, theirs, calls_a_step):
    # Their conditions come anew at each step, ours once an image.
    theirs = theirs | {k: theirs[k][:calls_a_step] for k in ("text", "prior_ids")}
    for name in (*EXACT, *CLOSE):
        assert_same(name, ours[name], theirs[name], exact=name in EXACT)


def assert_same_pixels(got, expected):
    assert got.dtype == np.uint8 and got.std() > 20, "the picture is (nearly) constant"
    assert np.array_equal(got, (expected * 255).round())


def check(pair, prompt, n=1, seed=7, **request):
    """Run both sides and compare everything that both have."""
    results, trace = pair.run_ours(prompt, n, seed, **request)
    for index, result in enumerate(results):
        image, their_trace = pair.run_reference(prompt, seed + index, **request)
        scale = request.get("guidance_scale", request.get("true_cfg_scale", 1.5))
        assert_same_traces(image_of(trace, index, n), their_trace, 2 if scale > 1 else 1)
        assert_same_pixels(result.frames, image)


def request_of(size, guidance="default", steps=STEPS):
    size = {"width": size[0], "height": size[1], "num_inference_steps": steps}
    return {**size, **GUIDANCE[guidance]}


@pytest.mark.parametrize("guidance", GUIDANCE)
@pytest.mark.parametrize("size", SIZES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_sizes_and_guidance(pair, size, guidance):
    check(pair, PROMPTS["one glyph"], **request_of(size, guidance))


@pytest.mark.parametrize("prompt", PROMPTS)
def test_prompts(pair, prompt):
    # An empty prompt is its own negative, which is then encoded once.
    guidance = "default" if PROMPTS[prompt] else "negative"
    check(pair, PROMPTS[prompt], **request_of((64, 32), guidance))


@pytest.mark.parametrize("steps", [1, 3, 8])
def test_other_step_counts(pair, steps):
    check(pair, PROMPTS["plain"], **request_of((32, 32), steps=steps))


@pytest.mark.parametrize("guidance", ["default", "negative"])
def test_several_images_each_with_its_seed(pair, guidance):
    check(pair, PROMPTS["glyphs"], n=3, **request_of((64, 96), guidance))


@pytest.mark.parametrize("length", [1, 5])
def test_other_text_lengths(pair, length):
    check(pair, PROMPTS["glyphs"], max_sequence_length=length, **request_of((32, 32)))


def test_thirty_steps_by_default(pair):
    result = pair.engine.generate("a cat", width=32, height=32, seed=3, return_frames=True)
    image, _ = pair.run_reference("a cat", 3, width=32, height=32, num_inference_steps=30)
    assert len(result.report["step_seconds"]) == 30
    assert_same_pixels(result.frames, image)
