"""The sampler against diffusers' scheduler, bit for bit, and against tables frozen here."""

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.flux.pipeline_flux import calculate_shift, retrieve_timesteps

from sglang.multimodal_gen.runtime.models.schedulers.flow_match_euler import (
    FlowMatchEulerConfig,
    euler_step,
    image_shift,
    make_sigmas,
    make_timesteps,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

DEV = {
    "shift": 3.0,
    "use_dynamic_shifting": True,
    "base_shift": 0.5,
    "max_shift": 1.15,
    "base_image_seq_len": 256,
    "max_image_seq_len": 4096,
}
SCHNELL = {**DEV, "shift": 1.0, "use_dynamic_shifting": False}
SHIFTED = {**SCHNELL, "shift": 3.0}
CONFIGS = {"dev": DEV, "schnell": SCHNELL, "shifted": SHIFTED}
STEPS = (1, 2, 4, 8, 28, 50)
# image tokens of 64x64, 64x96, 512x512, 1024x1024, 1536x1024, 2048x2048
TOKENS = (16, 24, 1024, 4096, 6144, 16384)

# Decimals of the float32 values: a change in numpy, torch or this file shows here even when the
# reference changes with it.
FROZEN = {
    ("dev", 4096, 4): (1.0, 0.9045307636260986, 0.7595109343528748, 0.5128441452980042, 0.0),
    ("dev", 16, 4): (1.0, 0.8260643482208252, 0.6128659248352051, 0.3454189896583557, 0.0),
    ("schnell", 4096, 4): (1.0, 0.75, 0.5, 0.25, 0.0),
    ("shifted", 4096, 4): (1.0, 0.9, 0.75, 0.5, 0.0),
    ("dev", 4096, 1): (1.0, 0.0),
    ("dev", 16, 2): (1.0, 0.6128659248352051, 0.0),
}
FROZEN_ENDS = {  # step index -> sigma of dev at 1024x1024
    28: {1: 0.988408625125885, 14: 0.7595109343528748, 27: 0.10472089797258377, 28: 0.0},
    50: {1: 0.9935795068740845, 25: 0.7595109343528748, 49: 0.060550276190042496, 50: 0.0},
}


def reference_schedule(config, steps, tokens):
    """A diffusers scheduler set up as its FluxPipeline does."""
    scheduler = FlowMatchEulerDiscreteScheduler(**config)
    names = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
    mu = calculate_shift(tokens, *(config[name] for name in names))
    sigmas = np.linspace(1.0, 1 / steps, steps)
    retrieve_timesteps(scheduler, steps, "cpu", sigmas=sigmas, mu=mu)
    return scheduler, mu


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("name", CONFIGS)
def test_tables_equal_the_reference(name, steps, tokens):
    config = FlowMatchEulerConfig.from_dict(CONFIGS[name])
    scheduler, mu = reference_schedule(CONFIGS[name], steps, tokens)
    sigmas = make_sigmas(config, steps, tokens)
    assert image_shift(config, tokens) == mu
    assert sigmas.dtype == torch.float32 and sigmas.shape == (steps + 1,)
    assert torch.equal(sigmas, scheduler.sigmas)
    assert torch.equal(make_timesteps(config, sigmas), scheduler.timesteps)


@pytest.mark.parametrize(("name", "tokens", "steps"), FROZEN)
def test_tables_equal_the_frozen_ones(name, tokens, steps):
    config = FlowMatchEulerConfig.from_dict(CONFIGS[name])
    expected = torch.tensor(FROZEN[name, tokens, steps], dtype=torch.float32)
    assert torch.equal(make_sigmas(config, steps, tokens), expected)


@pytest.mark.parametrize("steps", FROZEN_ENDS)
def test_long_tables_keep_frozen_values(steps):
    sigmas = make_sigmas(FlowMatchEulerConfig.from_dict(DEV), steps, 4096)
    assert {i: sigmas[i].item() for i in FROZEN_ENDS[steps]} == FROZEN_ENDS[steps]
    assert (sigmas.diff() < 0).all() and sigmas[0] == 1


def test_shift_parameter_at_both_ends_of_its_line():
    config = FlowMatchEulerConfig.from_dict(DEV)
    assert image_shift(config, 256) == pytest.approx(0.5, abs=1e-12)
    assert image_shift(config, 4096) == pytest.approx(1.15, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_steps_equal_the_reference(dtype):
    """The whole chain of 8 steps; bf16 shows that dt * velocity is rounded before the sum."""
    scheduler, _ = reference_schedule(DEV, 8, 4096)
    sigmas = make_sigmas(FlowMatchEulerConfig.from_dict(DEV), 8, 4096)
    generator = torch.Generator().manual_seed(0)
    ours = theirs = torch.randn(1, 512, 64, generator=generator).to(dtype)
    for i, timestep in enumerate(scheduler.timesteps):
        velocity = torch.randn(1, 512, 64, generator=generator).to(dtype)
        theirs = scheduler.step(velocity, timestep, theirs, return_dict=False)[0]
        ours = euler_step(ours, velocity, sigmas[i], sigmas[i + 1])
        assert ours.dtype == dtype and torch.equal(ours, theirs)


def test_the_product_is_rounded_before_the_sum():
    """One value where rounding dt * velocity to bf16 first differs from rounding at the end."""
    sample, velocity = torch.tensor([1 / 3]).bfloat16(), torch.tensor([1.0]).bfloat16()
    dt = torch.tensor(-1 / 3)
    rounded_last = (sample.float() + dt * velocity.float()).bfloat16()
    rounded_first = (sample.float() + (dt * velocity.float()).bfloat16().float()).bfloat16()
    assert rounded_first != rounded_last, "the chosen values do not tell the two apart"
    assert euler_step(sample, velocity, torch.tensor(1 / 3), torch.tensor(0.0)) == rounded_first


@pytest.mark.parametrize(
    "option",
    [
        {"use_karras_sigmas": True},
        {"use_beta_sigmas": True},
        {"invert_sigmas": True},
        {"shift_terminal": 0.1},
        {"time_shift_type": "cubic"},
        {"stochastic_sampling": True},
        {"an_option_of_the_future": 3},
    ],
)
def test_an_option_that_would_act_is_refused_by_name(option):
    (name,) = option
    with pytest.raises(ValueError, match=f"{name}=.*expected it absent"):
        FlowMatchEulerConfig.from_dict({**DEV, **option})


def test_the_config_that_diffusers_writes_is_read():
    written = dict(FlowMatchEulerDiscreteScheduler(**DEV).config)
    assert FlowMatchEulerConfig.from_dict(written) == FlowMatchEulerConfig.from_dict(DEV)
