"""Products of one vector with a matrix: within rounding of exact, and the same bits every time."""

import pytest
import torch
from elementwise_checks import HALF_DTYPES, assert_same_bits, poison
from torch._subclasses.fake_tensor import FakeTensorMode

from sglang.kernels.ops.diffusion.triton import gemv as module
from sglang.kernels.ops.diffusion.triton.gemv import (
    can_use_gemv,
    can_use_gemv_qkv,
    can_use_gemv_swiglu,
    gemv,
    gemv_qkv,
    gemv_qkv_reference,
    gemv_reference,
    gemv_swiglu,
    gemv_swiglu_reference,
    tile,
)
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")
register_cuda_ci(est_time=60, stage="base-b-kernel-unit", runner_config="1-gpu-large")

BF16 = torch.bfloat16
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # half a last place, relative
# Output rows and columns: those of GLM-Image's prior, then odd ones.
SHAPES = [(4608, 4096), (4096, 4096), (4096, 13696), (16384, 4096), (27392, 4096)]
SHAPES += [(1, 8), (7, 64), (96, 96), (33, 1000), (5, 1032), (10, 4088), (3, 4104), (9, 28672)]


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture
def any_device(monkeypatch):
    monkeypatch.setattr(module, "triton_runs_on", lambda device: True)


def normal(*shape, dtype=BF16, device="cuda", seed=0, scale=1.0):
    generator = torch.Generator(device=device).manual_seed(seed)
    return (torch.randn(shape, generator=generator, device=device) * scale).to(dtype)


def assert_rounded_product(actual, x, weight, bias=None, product_is_rounded=False):
    """Within one rounding of the exact product, and the fp32 error of K additions.

    `product_is_rounded`: before the bias too, as cuBLAS does for some shapes.
    """
    exact = weight.double() @ x.double().flatten()
    terms = weight.double().abs() @ x.double().abs().flatten()
    before = UNIT[x.dtype] * exact.abs() if product_is_rounded else 0.0
    if bias is not None:
        exact, terms = exact + bias.double(), terms + bias.double().abs()
    before = before + weight.shape[1] * 2.0**-24 * terms
    bound = before + UNIT[x.dtype] * (exact.abs() + before)
    error = (actual.double().flatten() - exact).abs()
    assert bool((error <= bound).all()), f"error {float((error - bound).max())} above the bound"


# --- without a GPU -------------------------------------------------------------------------------


def test_predicate(any_device):
    x, weight, bias = (normal(*s, device="cpu") for s in ((1, 1, 64), (6, 64), (6,)))
    assert can_use_gemv(x, weight) and can_use_gemv(x, weight, bias)
    assert can_use_gemv(x[..., :8].clone(), weight[:, :8].clone())
    assert not can_use_gemv(x[..., :4].clone(), weight[:, :4].clone())
    assert not can_use_gemv(x.expand(1, 2, 64).contiguous(), weight)
    assert not can_use_gemv(x, weight.half())
    assert not can_use_gemv(x.float(), weight.float())
    assert not can_use_gemv(x, weight.t().contiguous().t())
    assert not can_use_gemv(x, weight[:0])
    assert not can_use_gemv(x, weight, bias[:5])
    assert not can_use_gemv(x, weight, bias.half())
    shifted = torch.empty(65, dtype=BF16)[1:].view(1, 1, 64)
    assert not can_use_gemv(shifted, weight)
    with torch.enable_grad():
        assert not can_use_gemv(x, torch.nn.Parameter(weight))


def test_predicate_of_three_and_of_two_matrices(any_device):
    x, q, k = (normal(*s, device="cpu") for s in ((1, 1, 64), (8, 64), (4, 64)))
    biases = [normal(n, device="cpu") for n in (8, 4, 4)]
    assert can_use_gemv_qkv(x, q, k, k, biases) and can_use_gemv_qkv(x, q, k, k, [])
    assert not can_use_gemv_qkv(x, q, k, q, [])
    assert not can_use_gemv_qkv(x, q, k, k, biases[:2])
    odd = normal(6, 64, device="cpu")  # a program would read rows of two matrices
    assert 6 % tile(20, 64)["BLOCK_N"] and not can_use_gemv_qkv(x, q, odd, odd, [])
    assert can_use_gemv_swiglu(x, odd) and not can_use_gemv_swiglu(x, normal(7, 64, device="cpu"))


def test_cpu_tensors_are_rejected_with_advice():
    x, weight = normal(1, 1, 64, device="cpu"), normal(8, 64, device="cpu")
    with pytest.raises(ValueError, match=r"gemv got x bfloat16\[1, 1, 64\].*can_use_gemv first"):
        gemv(x, weight)
    with pytest.raises(ValueError, match="gemv_qkv got"):
        gemv_qkv(x, weight, weight, weight, [])
    with pytest.raises(ValueError, match="gemv_swiglu got"):
        gemv_swiglu(x, weight)


def test_fakes():
    with FakeTensorMode():
        x, weight = torch.empty(1, 1, 64, dtype=BF16), torch.empty(8, 64, dtype=BF16)
        assert gemv(x, weight).shape == (1, 1, 8)
        assert gemv_qkv(x, weight, weight[:4], weight[:4], []).shape == (1, 1, 16)
        assert gemv_swiglu(x, weight).shape == (1, 1, 4)


# --- on the GPU ----------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_products(shape, dtype):
    x, weight = normal(1, 1, shape[1], dtype=dtype), normal(*shape, dtype=dtype, scale=0.02)
    bias = normal(shape[0], dtype=dtype, seed=1)
    assert_rounded_product(gemv_reference(x, weight, bias), x, weight, bias, True)
    poison(1, 1, shape[0], dtype=dtype)
    assert_rounded_product(gemv(x, weight, bias), x, weight, bias)
    assert_rounded_product(gemv(x, weight), x, weight)


@pytest.mark.cuda
@pytest.mark.parametrize("sizes", [(4096, 256, 4096), (64, 32, 64), (8, 4, 1000)])
def test_three_products_are_those_of_one_matrix(sizes):
    nq, nk, columns = sizes
    x = normal(1, 1, columns)
    weights = [normal(n, columns, seed=i, scale=0.02) for i, n in enumerate((nq, nk, nk))]
    biases = [normal(n, seed=i + 5) for i, n in enumerate((nq, nk, nk))]
    joined = gemv_qkv(x, *weights, biases)
    assert_rounded_product(joined, x, torch.cat(weights), torch.cat(biases))
    assert_same_bits(joined, gemv(x, torch.cat(weights), torch.cat(biases)))
    assert_same_bits(gemv_qkv(x, *weights, []), gemv(x, torch.cat(weights)))
    assert gemv_qkv_reference(x, *weights, biases).shape == joined.shape


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("shape", [(27392, 4096), (192, 64), (14, 1000), (6, 4104)])
def test_swiglu_is_eager_on_the_products(shape, dtype):
    x, weight = normal(1, 1, shape[1], dtype=dtype), normal(*shape, dtype=dtype, scale=0.2)
    fused = gemv_swiglu(x, weight)
    gate, up = gemv(x, weight).chunk(2, dim=-1)
    assert_same_bits(fused, up * torch.nn.functional.silu(gate))
    assert gemv_swiglu_reference(x, weight).shape == fused.shape


@pytest.mark.cuda
def test_every_run_gives_the_same_bits():
    x, weights = normal(1, 1, 4096), [normal(4096, 4096, seed=i, scale=0.02) for i in range(6)]
    expected = [gemv(x, weight) for weight in weights]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [gemv(x, weight) for weight in weights]
    for _ in range(3):
        for out in captured:
            out.fill_(float("nan"))
        graph.replay()
        for out, want in zip(captured, expected, strict=True):
            assert_same_bits(out, want)


@pytest.mark.cuda
def test_fullgraph_compile(fresh_inductor):
    x, weight = normal(1, 1, 4096), normal(4096, 4096, scale=0.02)
    compiled = torch.compile(lambda: gemv(x, weight) + 1, fullgraph=True)
    assert_same_bits(compiled(), gemv(x, weight) + 1)
