import pytest
import torch
from elementwise_checks import poison, random_bits
from head_checks import (
    BF16,
    FP16,
    HALF_SPLIT_DIMS,
    STRIDED_VIEWS,
    assert_same,
    check_replays,
    check_two_streams,
    far_apart,
    rejected_heads,
    stream,
)
from torch._subclasses.fake_tensor import FakeTensorMode

from sglang.kernels.ops.diffusion.bitexact_gate import BitExactFusionGate
from sglang.kernels.ops.diffusion.triton import head_streams
from sglang.kernels.ops.diffusion.triton.qk_rmsnorm_rotate_half import (
    can_use_fused_qk_rmsnorm_rotate_half,
    fused_qk_rmsnorm_rotate_half,
    qk_rmsnorm_rotate_half_reference,
)
from sglang.kernels.ops.diffusion.triton.qk_rotate_half import halves_fit
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=15, suite="base-a-test-cpu")
register_cuda_ci(est_time=80, stage="base-b-kernel-unit", runner_config="1-gpu-large")

EPS = 1e-6


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def tables(tokens, head_dim, dtype=BF16, device="cuda"):
    """ERNIE-Image's: each angle stands twice, side by side."""
    angles = torch.linspace(0, 700, tokens * head_dim // 2, device=device)
    angles = angles.view(tokens, 1, -1).repeat_interleave(2, dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def check(q, k, q_weight, k_weight, cos=None, sin=None, eps=EPS):
    if cos is None:
        cos, sin = tables(q.shape[1], q.shape[3], q.dtype)
    args = (q, k, q_weight, k_weight, cos, sin)
    assert can_use_fused_qk_rmsnorm_rotate_half(*args)
    expected = qk_rmsnorm_rotate_half_reference(*args, eps)
    poison(*q.shape, dtype=q.dtype)
    assert_same(fused_qk_rmsnorm_rotate_half(*args, eps), expected)


# --- without a GPU -------------------------------------------------------------------------------


@pytest.fixture
def any_device(monkeypatch):
    """The predicate's other limits, tried on CPU tensors."""
    monkeypatch.setattr(head_streams, "triton_runs_on", lambda device: True)


def small(head_dim=16, tokens=3):
    return (*stream(2, tokens, 4, head_dim, device="cpu"), *tables(tokens, head_dim, device="cpu"))


def test_reference_rounds_every_step():
    q, k, q_weight, k_weight, cos, sin = small()
    got = qk_rmsnorm_rotate_half_reference(q, k, q_weight, k_weight, cos, sin, EPS)
    for x, weight, out in ((q, q_weight, got[0]), (k, k_weight, got[1])):
        y = torch.nn.functional.rms_norm(x, (16,), weight, EPS)
        for i in range(8):
            first, second, partner = y[..., i], y[..., i + 8], i + 8
            a = first * cos[..., i] - second * sin[..., i]
            b = second * cos[..., partner] + first * sin[..., partner]
            assert torch.equal(out[..., i], a) and torch.equal(out[..., partner], b)


@pytest.mark.parametrize("head_dim,fits", HALF_SPLIT_DIMS)
def test_predicate_head_dim(any_device, head_dim, fits):
    assert can_use_fused_qk_rmsnorm_rotate_half(*small(head_dim)) is fits


def test_predicate_rejects_each_limit(any_device):
    q, k, w, _, cos, sin = small()
    fits = can_use_fused_qk_rmsnorm_rotate_half
    assert fits(q, k, w, w, cos, sin)
    assert fits(*(x.half() for x in (q, k, w, w, cos, sin)))
    for why, heads in rejected_heads(q, k).items():
        assert not fits(*heads, w, w, cos, sin), why
    assert not fits(q, k, w.float(), w, cos, sin)
    assert not fits(q, k, w[:8], w, cos, sin)
    assert not fits(q, k, w, w, cos[:2], sin[:2])
    assert not fits(q, k, w, w, cos[:, 0], sin[:, 0])
    assert not fits(q, k, w, w, cos.float(), sin.float())
    assert not fits(q, k, w, w, cos.transpose(0, 2).contiguous().transpose(0, 2), sin)
    with torch.enable_grad():
        assert not fits(q.clone().requires_grad_(), k, w, w, cos, sin)
        assert not fits(q, k, w, w, cos.clone().requires_grad_(), sin)


def test_predicate_rejects_where_the_reference_wraps(any_device):
    for tokens, fits in ((2**20 - 1, True), (2**20, False)):
        q = torch.zeros(1, 1, 1, 128, dtype=BF16).expand(1, tokens, 32, 128)
        assert head_streams.stream_fits(q, q) and halves_fit(q, q) is fits


def test_a_cpu_tensor_is_rejected_with_advice():
    with pytest.raises(ValueError, match=r"got q bfloat16\[2, 3, 4, 16\].*expected CUDA.*can_use_"):
        fused_qk_rmsnorm_rotate_half(*small(), EPS)


def test_fake_gives_contiguous_outputs():
    with FakeTensorMode(allow_non_fake_inputs=False):
        q, w, cos = (torch.empty(s, dtype=BF16) for s in ((2, 3, 4, 16), (16,), (4, 1, 16)))
        q = q.transpose(1, 2)
        for out in fused_qk_rmsnorm_rotate_half(q, q, w, w, cos, cos, EPS):
            assert out.shape == (2, 4, 3, 16) and out.is_contiguous() and out.dtype == BF16


# --- on the GPU ----------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("batch,tokens", [(1, 4216), (2, 4216), (1, 4096), (2, 1140), (1, 128)])
@pytest.mark.parametrize("chunks", (1, 3))
def test_ernie_shapes(batch, tokens, chunks):
    check(*stream(batch, tokens, 32, 128, chunks=chunks))


@pytest.mark.cuda
# every number of tokens, batch, heads and head size, not every product of them: each compiles
@pytest.mark.parametrize("dtype", (BF16, FP16))
@pytest.mark.parametrize("batch,tokens,heads,head_dim", [
    (1, 300, 24, 64), (3, 7, 38, 128), (1, 17, 1, 16), (2, 1, 5, 32), (1, 300, 7, 128),
    (1, 1, 48, 128)])  # fmt: skip
def test_shapes(dtype, batch, tokens, heads, head_dim):
    check(*stream(batch, tokens, heads, head_dim, dtype))


@pytest.mark.cuda
@pytest.mark.parametrize("chunks", (3, 6, 12))
def test_views_of_packed_projections(chunks):
    check(*stream(3, 17, 4, 64, chunks=chunks))


@pytest.mark.cuda
@pytest.mark.parametrize("view", range(len(STRIDED_VIEWS)))
def test_other_strides(view):
    q, k, *weights = stream(2, 300, 4, 128)
    q, k = STRIDED_VIEWS[view](q), STRIDED_VIEWS[view](k)
    check(q, k, *(w[: q.shape[-1]] for w in weights))


@pytest.mark.cuda
def test_an_offset_of_one_element_is_rejected():
    q, _, *rest = (*stream(1, 8, 3, 64), *tables(8, 64))
    shifted = torch.zeros(q.numel() + 1, device="cuda", dtype=BF16)[1:].view(q.shape)
    assert not can_use_fused_qk_rmsnorm_rotate_half(shifted, shifted, *rest)
    with pytest.raises(ValueError, match="16-byte aligned"):
        fused_qk_rmsnorm_rotate_half(shifted, shifted, *rest, EPS)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", (BF16, FP16))
@pytest.mark.parametrize("scale", (1e-40, 3e-21, 1e-8, 300.0, 1e18, 1e30))
@pytest.mark.parametrize("eps", (EPS, 0.0))
def test_magnitudes(dtype, scale, eps):
    q, k, *weights = stream(1, 300, 24, 128, torch.float32)
    check((q * scale).to(dtype), (k * scale).to(dtype), *(w.to(dtype) for w in weights), eps=eps)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", (BF16, FP16))
def test_every_bit_pattern(dtype):
    shapes = [(1, 300, 32, 128), (128,), (300, 1, 128)]
    q, k, weight, _, cos, sin = (
        random_bits(*shape, dtype=dtype, seed=2 * seed + i)
        for seed, shape in enumerate(shapes)
        for i in (0, 1)
    )
    ones = torch.ones_like(weight)
    check(q, k, ones, ones)
    check(q.nan_to_num(1, 1, 1), k.nan_to_num(1, 1, 1), weight, ones)
    normal = stream(1, 300, 32, 128, dtype)
    check(*normal, cos, sin)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", (BF16, FP16))
def test_subnormal_products_and_sums_round_as_eager_does(dtype):
    """Small weights and tables: products on both sides of half the least number."""
    q, k, *weights = stream(1, 300, 32, 128, dtype)
    smallest = torch.finfo(dtype).smallest_normal
    for exponent in (0, -4, -8):
        tiny = [(w.float() * smallest * 2.0**exponent).to(dtype) for w in weights]
        check(q, k, *tiny)
        cos, sin = (t * smallest for t in tables(300, 128, torch.float32))
        check(q, k, *weights, cos.to(dtype), sin.to(dtype))


@pytest.mark.cuda
def test_rows_with_inf_nan_and_zero():
    q, k, *weights = stream(1, 300, 32, 128)
    for token, value in enumerate((float("inf"), -float("inf"), float("nan"), 3e38)):
        q[0, token, :, 7] = k[0, token, :, 120] = value
    q[0, 10], k[0, 10] = 0.0, -0.0
    check(q, k, *weights)


@pytest.mark.cuda
def test_offsets_past_2_31_elements():
    views = far_apart(1, 2, 3, 128)
    *values, q_weight, k_weight = stream(1, 2, 3, 128)
    for view, value in zip(views, values, strict=True):
        view.copy_(value)
    check(*views, q_weight, k_weight)


@pytest.mark.cuda
def test_fullgraph_compile(fresh_inductor):
    args = (*stream(1, 300, 32, 128, chunks=3), *tables(300, 128), EPS)
    expected = qk_rmsnorm_rotate_half_reference(*args)
    assert_same(torch.compile(fused_qk_rmsnorm_rotate_half, fullgraph=True)(*args), expected)


@pytest.mark.cuda
def test_cuda_graph_replays_on_new_values():
    q, k, *rest = (*stream(1, 300, 32, 128), *tables(300, 128), EPS)
    fresh = [stream(1, 300, 32, 128, seed=seed)[:2] for seed in (5, 6)]
    reference = qk_rmsnorm_rotate_half_reference
    check_replays(fused_qk_rmsnorm_rotate_half, reference, (q, k), rest, fresh)


@pytest.mark.cuda
def test_two_streams_at_once():
    cases = [(*stream(1, 4216, 32, 128, seed=s), *tables(4216, 128), EPS) for s in (1, 2)]
    check_two_streams(fused_qk_rmsnorm_rotate_half, qk_rmsnorm_rotate_half_reference, cases)


@pytest.mark.cuda
def test_a_mismatch_turns_the_gate_off():
    """The kernel's answer for one eps is not the chain's for another."""
    args = (*stream(1, 300, 32, 128), *tables(300, 128))
    gate = BitExactFusionGate("test.qk_rmsnorm_rotate_half")
    expected = qk_rmsnorm_rotate_half_reference(*args, 1.0)
    got = gate.run(
        lambda: fused_qk_rmsnorm_rotate_half(*args, EPS),
        lambda: qk_rmsnorm_rotate_half_reference(*args, 1.0),
    )
    assert_same(got, expected)
    assert gate.disabled and "differs" in gate.state().reason
