"""Norm, residual and norm in one kernel: the bits of GLM-Image's eager chain."""

import pytest
import torch
from elementwise_checks import HALF_DTYPES, assert_same_bits, poison
from rms_models import aten_sum_of_squares
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.models.glm_image.modeling_glm_image import GlmImageRMSNorm

from sglang.kernels.ops.diffusion.triton import residual_rmsnorm as module
from sglang.kernels.ops.diffusion.triton.residual_rmsnorm import (
    MAX_WIDTH,
    can_use_residual_rmsnorm,
    can_use_rmsnorm,
    fused_residual_rmsnorm,
    fused_rmsnorm,
    residual_rmsnorm_reference,
    rmsnorm_reference,
)
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")
register_cuda_ci(est_time=40, stage="base-b-kernel-unit", runner_config="1-gpu-large")

BF16 = torch.bfloat16
EPS = 1e-5


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture
def any_device(monkeypatch):
    monkeypatch.setattr(module, "triton_runs_on", lambda device: True)


def inputs(rows, width, dtype=BF16, device="cuda", scale=1.0):
    """x, update, update_weight, weight."""
    generator = torch.Generator(device=device).manual_seed(rows + width)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device=device)

    streams = [(scale * normal(rows, width)).to(dtype) for _ in range(2)]
    return *streams, *((1 + 0.3 * normal(width)).to(dtype) for _ in range(2))


def check(x, update, update_weight, weight, eps=EPS):
    assert can_use_residual_rmsnorm(x, update, update_weight, weight)
    expected = residual_rmsnorm_reference(x, update, update_weight, weight, eps)
    poison(*x.shape, dtype=x.dtype)
    for got, want in zip(
        fused_residual_rmsnorm(x, update, update_weight, weight, eps), expected, strict=True
    ):
        assert_same_bits(got, want)
    assert_same_bits(fused_rmsnorm(x, weight, eps), rmsnorm_reference(x, weight, eps))


# --- without a GPU -------------------------------------------------------------------------------


def test_reference_is_the_norm_of_transformers():
    x, _, weight, _ = inputs(3, 64, torch.float32, "cpu")
    theirs = GlmImageRMSNorm(64, EPS)
    theirs.weight.copy_(weight)
    torch.testing.assert_close(rmsnorm_reference(x, weight, EPS), theirs(x), rtol=1e-6, atol=1e-6)


def test_predicate(any_device):
    x, update, w, _ = inputs(2, 64, device="cpu")
    assert can_use_residual_rmsnorm(x, update, w, w) and can_use_rmsnorm(x, w)
    assert not can_use_residual_rmsnorm(x, update[:1], w, w)
    assert not can_use_residual_rmsnorm(x, update.half(), w, w)
    assert not can_use_residual_rmsnorm(x, update, w[:32], w)
    assert not can_use_rmsnorm(x.float(), w.float())
    assert not can_use_rmsnorm(x, w.half())
    assert not can_use_rmsnorm(x[:0], w)
    assert not can_use_rmsnorm(x.t().contiguous().t(), w)
    for width, fits in ((4, True), (6, False), (MAX_WIDTH, True), (MAX_WIDTH + 4, False)):
        wide = torch.zeros(1, width, dtype=BF16)
        assert can_use_rmsnorm(wide, torch.zeros(width, dtype=BF16)) is fits, width
    with torch.enable_grad():
        assert not can_use_rmsnorm(x, torch.nn.Parameter(w))


def test_cpu_tensors_are_rejected_with_advice():
    x, update, w, _ = inputs(2, 64, device="cpu")
    with pytest.raises(ValueError, match=r"fused_residual_rmsnorm got x bfloat16.*expected CUDA"):
        fused_residual_rmsnorm(x, update, w, w, EPS)
    with pytest.raises(ValueError, match="fused_rmsnorm got x"):
        fused_rmsnorm(x, w, EPS)


def test_fakes():
    with FakeTensorMode():
        x, w = torch.empty(1, 1, 64, dtype=BF16), torch.empty(64, dtype=BF16)
        assert [t.shape for t in fused_residual_rmsnorm(x, x, w, w, EPS)] == [x.shape] * 2
        assert fused_rmsnorm(x, w, EPS).shape == x.shape


# --- on the GPU ----------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("width", (4, 64, 516, 1024, 2240, 4096, 8192))
@pytest.mark.parametrize("rows", (1, 7, 300))
def test_shapes(rows, width, dtype):
    check(*inputs(rows, width, dtype))


@pytest.mark.cuda
@pytest.mark.parametrize(
    "scale,eps", [(1e-30, EPS), (1e-8, EPS), (1e-8, 0.0), (300.0, EPS), (300.0, 0.0), (1e15, EPS)]
)
def test_magnitudes(scale, eps):
    check(*inputs(5, 4096, scale=scale), eps=eps)


@pytest.mark.cuda
def test_the_norm_without_weight_adds_as_the_model_says():
    x = inputs(9, 4096)[0]
    rstd = torch.ops.aten._fused_rms_norm(x, [4096], None, EPS)[1]
    assert torch.equal(rstd.flatten(), torch.rsqrt(aten_sum_of_squares(x) / 4096 + EPS))


@pytest.mark.cuda
def test_inf_nan_and_zero():
    x, update, *weights = inputs(4, 4096)
    x[0, 5], update[1, 7], update[2], x[3] = float("inf"), float("nan"), 0.0, 0.0
    expected = residual_rmsnorm_reference(x, update, *weights, EPS)
    for got, want in zip(fused_residual_rmsnorm(x, update, *weights, EPS), expected, strict=True):
        assert torch.equal(got.isnan(), want.isnan())
        assert_same_bits(got.nan_to_num(0), want.nan_to_num(0))


@pytest.mark.cuda
def test_graph_replays():
    x, update, *weights = inputs(1, 4096)
    fused_residual_rmsnorm(x, update, *weights, EPS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fused_residual_rmsnorm(x, update, *weights, EPS)
    for seed in (1, 2):
        torch.manual_seed(seed)
        x.normal_(), update.normal_()
        graph.replay()
        for got, want in zip(
            out, residual_rmsnorm_reference(x, update, *weights, EPS), strict=True
        ):
            assert_same_bits(got, want)
