"""FLUX.1 against diffusers' FluxPipeline, float32 on the CPU, stage by stage on one checkpoint.

Both sides are watched in the same way: hooks on the text encoders and the transformer, and a
wrapper around the VAE's `decode`. The engine makes the images of a batch one by one and diffusers
makes them in one batch, whose GEMMs round otherwise; so pixels are equal to those of diffusers'
single-image call, and those of its batched call may differ only where a rounding decides.
"""

import numpy as np
import pytest
import torch
from diffusers import FluxPipeline
from parity import Pair, Trace

from sglang.multimodal_gen import DiffGenerator
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.tiny_checkpoints import write_tiny_flux

register_cpu_ci(est_time=80, suite="base-a-test-cpu")

MAX_RELATIVE = 1e-5
STEPS = 2
SIZES = ((64, 64), (64, 96), (128, 64))
PROMPTS = {
    "empty": "",
    "unicode": "ein grüner Apfel 🍎 und 漢字, naïve\u0301 \u202e ΑΒΓ 'tis <|endoftext|> 3½",
    "600 words": " ".join(f"word{i} of a tree" for i in range(150)),
}
CFG = {"plain": {}, "cfg": {"negative_prompt": "blurry, häßlich", "true_cfg_scale": 3.0}}
RENAMED = {"hidden_states": "img", "encoder_hidden_states": "txt", "pooled_projections": "pooled"}
OURS = ("img", "txt", "pooled", "timestep", "img_ids", "txt_ids", "guidance")


class FluxTrace(Trace):
    def watch(self, clip, t5, transformer, vae):
        """Record the calls of these modules from now on."""
        clip.register_forward_hook(self._clip, with_kwargs=True)
        t5.register_forward_hook(self._t5, with_kwargs=True)
        transformer.register_forward_hook(self._transformer, with_kwargs=True)
        self.watch_decode(vae)
        return self

    def _clip(self, module, args, kwargs, output):
        self.seen["clip ids"].append(args[0])
        self.seen["clip pooled"].append(output.pooler_output)

    def _t5(self, module, args, kwargs, output):
        self.seen["t5 ids"].append(args[0])
        self.seen["t5 tokens"].append(output[0])

    def _transformer(self, module, args, kwargs, output):
        named = dict(zip(OURS, args, strict=True)) if args else kwargs
        for name, value in named.items():
            if isinstance(value, torch.Tensor):
                self.seen[RENAMED.get(name, name)].append(value)
        self.seen["velocity"].append(output if isinstance(output, torch.Tensor) else output[0])


class FluxPair(Pair):
    def __init__(self, folder):
        self.engine = DiffGenerator.from_pretrained(folder, log_level="error", device="cpu")
        stages = self.engine._worker.pipeline.stages
        text, *_, denoising, decoding = stages
        self.ours = FluxTrace().watch(
            text.text_encoder, text.text_encoder_2, denoising.transformer, decoding.vae
        )
        self.reference = FluxPipeline.from_pretrained(folder, local_files_only=True)
        self.reference.set_progress_bar_config(disable=True)
        ref = self.reference
        self.theirs = FluxTrace().watch(
            ref.text_encoder, ref.text_encoder_2, ref.transformer, ref.vae
        )


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return {
        name: FluxPair(write_tiny_flux(folder / name, guidance_embeds=name == "dev"))
        for name in ("dev", "schnell")
    }


def relative_difference(got, expected):
    assert got.shape == expected.shape and got.dtype == expected.dtype
    return ((got - expected).abs().max() / expected.abs().max()).item()


def by_image(trace, name, n, calls):
    """Tensors of the `calls` transformer calls of an image as [image][call], batched or not."""
    tensors = trace.get(name, [])
    per_call = len(tensors) and tensors[0].shape[0]
    if n > 1 and per_call == n:  # diffusers: one call for all images
        return [[tensor[i : i + 1] for tensor in tensors] for i in range(n)]
    return [tensors[i * calls : (i + 1) * calls] for i in range(n)]


def assert_same_conditioning(ours, theirs):
    for name in ("clip ids", "t5 ids"):
        for got, expected in zip(ours[name], theirs[name], strict=True):
            assert torch.equal(got, expected), name
    for name in ("clip pooled", "t5 tokens"):
        for got, expected in zip(ours[name], theirs[name], strict=True):
            assert relative_difference(got, expected) <= MAX_RELATIVE, name
    for name in ("img_ids", "txt_ids"):
        assert torch.equal(ours[name][0].float(), theirs[name][0].float()), name


def assert_same_denoising(ours, theirs, n, calls):
    """Noise, each step's latents, timesteps, guidance, velocities, the VAE's input and output."""
    for name in ("img", "txt", "pooled", "velocity", "timestep", "guidance"):
        pair = (by_image(trace, name, n, calls) for trace in (ours, theirs))
        for image, (got, expected) in enumerate(zip(*pair, strict=True)):
            assert len(got) == len(expected) == calls * (name in theirs), name
            for call, (a, b) in enumerate(zip(got, expected, strict=True)):
                where = f"{name} of image {image}, call {call}"
                assert relative_difference(a, b) <= MAX_RELATIVE, where
    for name in ("decoded from", "decoded"):
        assert len(ours[name]) == len(theirs[name]) == n
        for got, expected in zip(ours[name], theirs[name], strict=True):
            assert relative_difference(got, expected) <= MAX_RELATIVE, name


def assert_same_pixels(ours, theirs, n):
    for got, expected in zip(ours, theirs, strict=True):
        assert got.dtype == np.uint8 and got.std() > 20, "the picture is (nearly) constant"
        slack = 0 if n == 1 else MAX_RELATIVE
        low, high = ((np.clip(expected + s, 0, 1) * 255).round() for s in (-slack, slack))
        assert ((low <= got) & (got <= high)).all()


def check(pair, prompt, n=1, seed=7, **request):
    """Run both sides and compare everything that both have."""
    ours, our_trace = pair.run_ours(prompt, n, seed, **request)
    theirs, their_trace = pair.run_reference(prompt, n, seed, **request)
    calls = request["num_inference_steps"] * (2 if "true_cfg_scale" in request else 1)
    assert_same_conditioning(our_trace, their_trace)
    assert_same_denoising(our_trace, their_trace, n, calls)
    assert_same_pixels(ours, theirs, n)


def request_of(size, prompt, cfg, guidance=3.5):
    # Only a long prompt needs all the text tokens; fewer keep the matrix quick.
    length = {"max_sequence_length": 512 if prompt == "600 words" else 96}
    size = {"width": size[0], "height": size[1], "num_inference_steps": STEPS}
    return {**size, **length, **CFG[cfg], "guidance_scale": guidance}


@pytest.mark.parametrize("steps", [1, 4, 8])
@pytest.mark.parametrize("model", ["dev", "schnell"])
def test_other_step_counts(pairs, model, steps):
    request = request_of((64, 64), "short", "plain") | {"num_inference_steps": steps}
    check(pairs[model], "a red apple", **request)


@pytest.mark.parametrize("length", [1, 7, 512])
def test_other_text_lengths(pairs, length):
    request = request_of((64, 64), "short", "cfg") | {"max_sequence_length": length}
    check(pairs["dev"], "a red apple on a table", **request)


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("cfg", CFG)
@pytest.mark.parametrize("guidance", [1.0, 3.5, 7.0])
@pytest.mark.parametrize("size", SIZES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_dev(pairs, size, guidance, cfg, n, prompt):
    check(pairs["dev"], PROMPTS[prompt], n, **request_of(size, prompt, cfg, guidance))


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("cfg", CFG)
@pytest.mark.parametrize("size", SIZES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_schnell(pairs, size, cfg, n, prompt):
    check(pairs["schnell"], PROMPTS[prompt], n, **request_of(size, prompt, cfg))


@pytest.mark.parametrize("guidance", [1.0, 7.0])
def test_schnell_at_other_guidance(pairs, guidance):
    check(pairs["schnell"], "a red apple", **request_of((64, 64), "short", "plain", guidance))
