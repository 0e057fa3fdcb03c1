"""FLUX.1's modulation rows computed ahead: the rows, and the whole forward, keep their bits."""

import pytest
import torch

from sglang.kernels.ops.diffusion.bitexact_gate import all_gates, fast_paths
from sglang.multimodal_gen.runtime.layers.attention import AttentionBackend
from sglang.multimodal_gen.runtime.models.dits.flux import FluxParams, FluxTransformer2DModel
from sglang.multimodal_gen.runtime.pipelines.stages.modulation_rows import (
    FLUX_MODULATION_ROWS,
    STEPS_A_GEMM,
    modulation_rows,
)
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.tiny_checkpoints import fill_at_unit_scale, transformer_config

register_cpu_ci(est_time=5, suite="base-a-test-cpu")
register_cuda_ci(est_time=20, stage="base-b-kernel-unit", runner_config="1-gpu-large")

FULL_WIDTH = {"num_layers": 1, "num_single_layers": 1, "guidance_embeds": True}


def build(config, dtype, device):
    with torch.device(device):
        model = FluxTransformer2DModel(FluxParams(**config), AttentionBackend("flash"))
    fill_at_unit_scale(model, seed=0)
    return model.to(dtype).eval().requires_grad_(False)


def conditioning(model, steps, dtype, device):
    torch.manual_seed(0)
    timesteps = torch.linspace(1, 0.02, steps).to(device, dtype)
    guidance = torch.full([1], 3.5, device=device) if model.params.guidance_embeds else None
    pooled = torch.randn(1, model.params.pooled_projection_dim).to(device, dtype)
    return timesteps, guidance, pooled


@pytest.mark.parametrize("guidance", [True, False])
@pytest.mark.parametrize("steps", [1, 4, STEPS_A_GEMM, STEPS_A_GEMM + 3])
@torch.inference_mode()
def test_one_row_for_each_step_as_that_step_alone_gives_it(guidance, steps):
    model = build(transformer_config(guidance), torch.float32, "cpu")
    timesteps, scale, pooled = conditioning(model, steps, torch.float32, "cpu")
    with fast_paths(False):
        rows = list(modulation_rows(model, timesteps, scale, pooled))
    assert len(rows) == steps
    for row, timestep in zip(rows, timesteps.split(1), strict=True):
        assert torch.equal(row, model.modulation_rows(timestep, scale, pooled))


@torch.inference_mode()
def test_a_forward_with_rows_at_hand_equals_one_without():
    model = build(transformer_config(True), torch.float32, "cpu")
    timesteps, guidance, pooled = conditioning(model, 1, torch.float32, "cpu")
    img = torch.randn(1, 16, model.params.in_channels)
    txt = torch.randn(1, 5, model.params.joint_attention_dim)
    ids = torch.zeros(16, 3), torch.zeros(5, 3)
    rows = model.modulation_rows(timesteps, guidance, pooled)
    plain = model(img, txt, pooled, timesteps, *ids, guidance)
    assert torch.equal(model(img, txt, pooled, timesteps, *ids, guidance, rows), plain)
    assert not torch.equal(model(img, txt, pooled, timesteps, *ids, guidance, rows * 2), plain)


@pytest.mark.cuda
@torch.inference_mode()
def test_eight_steps_at_once_are_verified_at_full_width():
    for gate in all_gates():
        gate.reset()
    model = build(FULL_WIDTH, torch.bfloat16, "cuda")
    timesteps, guidance, pooled = conditioning(model, 20, torch.bfloat16, "cuda")
    rows = list(modulation_rows(model, timesteps, guidance, pooled))
    for row, timestep in zip(rows, timesteps.split(1), strict=True):
        assert torch.equal(row, model.modulation_rows(timestep, guidance, pooled))
    state = FLUX_MODULATION_ROWS.state()
    assert (state.status, state.fused_calls, state.eager_calls) == ("verified", 3, 0), state
