"""ERNIE-Image against diffusers' ErnieImagePipeline, float32 on the CPU, stage by stage.

Both sides are watched in the same way: hooks on the text encoder and the transformer, and a wrapper
around the VAE's `decode`. The engine runs each image and each of the two prompts of CFG alone and
unpadded; diffusers runs them as one padded batch, whose GEMMs round otherwise. So tensors are close
and pixels equal, but where a rounding decides.
"""

import numpy as np
import pytest
import torch
from diffusers import ErnieImagePipeline, FlowMatchEulerDiscreteScheduler
from parity import Pair, Trace

from sglang.multimodal_gen import DiffGenerator
from sglang.multimodal_gen.runtime.models.schedulers.flow_match_euler import FlowMatchEulerConfig
from sglang.multimodal_gen.runtime.pipelines.stages.static_timesteps import static_sigmas
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.tiny_ernie import write_tiny_ernie

register_cpu_ci(est_time=60, suite="base-a-test-cpu")

MAX_RELATIVE = 1e-5
STEPS = 2
SIZES = ((64, 64), (64, 96), (128, 48))
PROMPTS = {
    "empty": "",
    "unicode": "ein grüner Apfel 🍎 und 漢字, naïve\u0301 \u202e ΑΒΓ 'tis </s> 3½",
    "too long": " ".join(f"word{i} of a tree" for i in range(60)),
}
# name -> (our keywords, diffusers')
CFG = {
    "default": ({}, {}),
    "off": ({"true_cfg_scale": 1.0}, {"guidance_scale": 1.0}),
    "negative": ({"negative_prompt": "häßlich, blurry"}, {"negative_prompt": "häßlich, blurry"}),
    "scale": ({"guidance_scale": 2.5, "negative_prompt": "x"},) * 2,
}


class ErnieTrace(Trace):
    def watch(self, text_encoder, transformer, vae):
        """Record the calls of these modules from now on."""
        text_encoder.register_forward_hook(self._text, with_kwargs=True)
        transformer.register_forward_hook(self._transformer, with_kwargs=True)
        self.watch_decode(vae)
        return self

    def _text(self, module, args, kwargs, output):
        self.seen["ids"].append(kwargs["input_ids"])
        self.seen["hidden"].append(output.hidden_states[-2])

    def _transformer(self, module, args, kwargs, output):
        if args:
            call = dict(zip(("img", "txt", "timestep"), args, strict=True), velocity=output)
            self.seen["calls"].append(call)
            return
        lengths = kwargs["text_lens"].tolist()
        rows = [
            {
                "img": kwargs["hidden_states"][i : i + 1],
                "txt": kwargs["text_bth"][i : i + 1, :length],
                "timestep": kwargs["timestep"][i : i + 1],
                "velocity": output[0][i : i + 1],
            }
            for i, length in enumerate(lengths)
        ]
        self.seen["calls"].append(rows)


class ErniePair(Pair):
    def __init__(self, folder):
        self.engine = DiffGenerator.from_pretrained(folder, log_level="error", device="cpu")
        text, *_, denoising, decoding = self.engine._worker.pipeline.stages
        self.ours = ErnieTrace().watch(text.text_encoder, denoising.transformer, decoding.vae)
        self.reference = ErnieImagePipeline.from_pretrained(folder, local_files_only=True)
        self.reference.set_progress_bar_config(disable=True)
        ref = self.reference
        self.theirs = ErnieTrace().watch(ref.text_encoder, ref.transformer, ref.vae)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return ErniePair(write_tiny_ernie(tmp_path_factory.mktemp("tiny") / "ernie", with_pe=False))


def assert_close(got, expected, where):
    assert got.shape == expected.shape and got.dtype == expected.dtype, where
    assert (got - expected).abs().max() <= MAX_RELATIVE * expected.abs().max(), where


def in_our_order(calls, n, steps, has_cfg):
    """diffusers' rows, all negative prompts first, in the order of our calls: image by image, step
    by step, the prompt and then the negative prompt."""
    assert len(calls) == steps and all(len(rows) == n * (1 + has_cfg) for rows in calls)
    for i in range(n):
        for rows in calls:
            yield from ([rows[n + i], rows[i]] if has_cfg else [rows[i]])


def check(pair, prompt, n=1, seed=7, cfg="default", **request):
    """Run both sides and compare everything that both have."""
    our_cfg, their_cfg = CFG[cfg]
    ours, our_trace = pair.run_ours(prompt, n, seed, **request, **our_cfg)
    theirs, their_trace = pair.run_reference(prompt, n, seed, **request, **their_cfg)
    has_cfg = cfg != "off"

    # token ids and embeddings; diffusers encodes the prompt, then the negative prompt
    for name in ("ids", "hidden"):
        distinct = 1 + (has_cfg and our_cfg.get("negative_prompt", "") != prompt)
        assert len(our_trace[name]) == distinct and len(their_trace[name]) == 1 + has_cfg
        for got, expected in zip(our_trace[name], their_trace[name], strict=False):
            assert torch.equal(got, expected), name

    # noise, each step's latents, prompts, timesteps and velocities
    expected_calls = list(
        in_our_order(their_trace["calls"], n, request["num_inference_steps"], has_cfg)
    )
    assert len(our_trace["calls"]) == len(expected_calls)
    assert torch.equal(our_trace["calls"][0]["img"], expected_calls[0]["img"]), "noise"
    for number, (got, expected) in enumerate(zip(our_trace["calls"], expected_calls, strict=True)):
        assert torch.equal(got["timestep"], expected["timestep"]), number
        assert torch.equal(got["txt"], expected["txt"]), number
        for name in ("img", "velocity"):
            assert_close(got[name], expected[name], f"{name} of call {number}")

    # the VAE's input and output, and pixels
    for name in ("decoded from", "decoded"):
        for got, expected in zip(our_trace[name], their_trace[name], strict=True):
            assert_close(got, expected, name)
    for got, expected in zip(ours, theirs, strict=True):
        assert got.dtype == np.uint8 and got.std() > 20, "the picture is (nearly) constant"
        bounds = (np.clip(expected + s, 0, 1) * 255 for s in (-MAX_RELATIVE, MAX_RELATIVE))
        low, high = (bound.round() for bound in bounds)
        assert ((low <= got) & (got <= high)).all()


def request_of(size, steps=STEPS):
    return {"width": size[0], "height": size[1], "num_inference_steps": steps}


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("cfg", CFG)
@pytest.mark.parametrize("size", SIZES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_a_request_equals_the_reference(pair, size, cfg, n, prompt):
    check(pair, PROMPTS[prompt], n, cfg=cfg, **request_of(size))


@pytest.mark.parametrize("steps", [1, 4, 8])
def test_other_step_counts(pair, steps):
    check(pair, "a red apple", **request_of((64, 64), steps))


@pytest.mark.parametrize("shift", [1.0, 3.0, 4.0])
@pytest.mark.parametrize("steps", [1, 2, 7, 28, 50, 1000])
def test_the_schedule_equals_the_references(steps, shift):
    reference = FlowMatchEulerDiscreteScheduler(shift=shift)
    reference.set_timesteps(sigmas=torch.linspace(1.0, 0.0, steps + 1)[:-1])
    assert torch.equal(static_sigmas(FlowMatchEulerConfig(shift=shift), steps), reference.sigmas)
