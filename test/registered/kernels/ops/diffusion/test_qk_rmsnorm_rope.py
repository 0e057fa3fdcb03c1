import pytest
import torch
from diffusers.models.embeddings import apply_rotary_emb
from elementwise_checks import poison, random_bits
from head_checks import (
    BF16,
    FP16,
    STRIDED_VIEWS,
    assert_same,
    check_replays,
    check_two_streams,
    far_apart,
    stream,
)
from rms_models import aten_sum_of_squares, flashinfer_sum_of_squares
from torch._subclasses.fake_tensor import FakeTensorMode

from sglang.kernels.ops.diffusion.triton import head_streams
from sglang.kernels.ops.diffusion.triton.qk_rmsnorm_rope import (
    can_use_fused_joint_qk_rmsnorm_rope,
    can_use_fused_qk_rmsnorm_rope,
    fused_joint_qk_rmsnorm_rope,
    fused_qk_rmsnorm_rope,
    joint_qk_rmsnorm_rope_reference,
    qk_rmsnorm_rope_reference,
)
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=20, suite="base-a-test-cpu")
register_cuda_ci(est_time=120, stage="base-b-kernel-unit", runner_config="1-gpu-large")

EPS = 1e-6


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def tables(tokens, head_dim, device="cuda"):
    angles = torch.linspace(0, 700, tokens * head_dim // 2, dtype=torch.float64, device=device)
    angles = angles.view(tokens, -1).repeat_interleave(2, dim=1)
    return angles.cos().float(), angles.sin().float()


def check(q, k, q_weight, k_weight, eps=EPS):
    cos, sin = tables(q.shape[1], q.shape[3])
    assert can_use_fused_qk_rmsnorm_rope(q, k, q_weight, k_weight, cos, sin)
    expected = qk_rmsnorm_rope_reference(q, k, q_weight, k_weight, cos, sin, eps)
    poison(*q.shape, dtype=q.dtype)
    assert_same(fused_qk_rmsnorm_rope(q, k, q_weight, k_weight, cos, sin, eps), expected)


def joint_inputs(batch, txt, img, heads, head_dim, device="cuda", dtype=BF16):
    txt_q, txt_k, *txt_weights = stream(batch, txt, heads, head_dim, dtype, device, 1, 3)
    img_q, img_k, *img_weights = stream(batch, img, heads, head_dim, dtype, device, 2)
    cos, sin = tables(txt + img, head_dim, device)
    return txt_q, txt_k, img_q, img_k, *txt_weights, *img_weights, cos, sin


# --- without a GPU -------------------------------------------------------------------------------


@pytest.fixture
def any_device(monkeypatch):
    """The predicates' other limits, tried on CPU tensors."""
    monkeypatch.setattr(head_streams, "triton_runs_on", lambda device: True)


def test_reference_is_the_diffusers_chain():
    q, k, q_weight, k_weight = stream(2, 5, 3, 16, device="cpu")
    cos, sin = tables(5, 16, "cpu")
    norm = torch.nn.RMSNorm(16, eps=EPS, dtype=BF16)
    actual = qk_rmsnorm_rope_reference(q, k, q_weight, k_weight, cos, sin, EPS)
    for x, weight, got in ((q, q_weight, actual[0]), (k, k_weight, actual[1])):
        norm.weight.copy_(weight)
        assert torch.equal(got, apply_rotary_emb(norm(x), (cos, sin), sequence_dim=1))


def test_joint_reference_is_each_stream_alone():
    *streams, cos, sin = inputs = joint_inputs(2, 3, 5, 2, 16, device="cpu")
    q, k = joint_qk_rmsnorm_rope_reference(*inputs, EPS)
    txt = qk_rmsnorm_rope_reference(*streams[:2], *streams[4:6], cos[:3], sin[:3], EPS)
    img = qk_rmsnorm_rope_reference(*streams[2:4], *streams[6:8], cos[3:], sin[3:], EPS)
    assert torch.equal(q, torch.cat([txt[0], img[0]], 1))
    assert torch.equal(k, torch.cat([txt[1], img[1]], 1))


def row_of(values):
    row = torch.zeros(1, 128)
    for place, value in values.items():
        row[0, place] = value
    return row


def test_summation_order_by_hand():
    # In fp32 2^24 + 1 = 2^24: a lone 1 is lost beside 4096^2, two ones added first are not.
    row = row_of({0: 4096, 4: 1, 68: 1})  # lanes 0, 1, 17 of aten's vectors of 4
    assert aten_sum_of_squares(row) == 2**24 + 2  # 1 + 17 first, then 0 + 1
    assert flashinfer_sum_of_squares(row, 16) == 2**24  # vectors of 8: one 1 shares 4096's thread
    assert aten_sum_of_squares(row_of({0: 4096, 1: 1, 2: 1})) == 2**24  # one thread, serially
    assert aten_sum_of_squares(row_of({0: 1, 1: 1, 2: 4096})) == 2**24 + 2


@pytest.mark.parametrize("head_dim,fits", [(4, False), (8, True), (120, True), (124, False),
                                           (128, True), (136, False)])  # fmt: skip
def test_predicate_head_dim(any_device, head_dim, fits):
    inputs = (*stream(1, 2, 3, head_dim, device="cpu"), *tables(2, head_dim, "cpu"))
    assert can_use_fused_qk_rmsnorm_rope(*inputs) is fits


def test_predicate_rejects_each_limit(any_device):
    q, k, w, _ = stream(2, 3, 4, 16, device="cpu")
    cos, sin = tables(3, 16, "cpu")
    fits = can_use_fused_qk_rmsnorm_rope
    shifted = torch.empty(q.numel() + 1, dtype=BF16)[1:].view(q.shape)
    assert fits(q, k, w, w, cos, sin)
    assert not fits(q.float(), k.float(), w.float(), w.float(), cos, sin)
    assert not fits(q, k.half(), w, w, cos, sin)
    assert not fits(q, k, w.float(), w, cos, sin)
    assert not fits(q[0], k[0], w, w, cos, sin)
    assert not fits(q[:0], k[:0], w, w, cos, sin)
    assert not fits(shifted, shifted, w, w, cos, sin)
    assert not fits(q, k.transpose(0, 1).contiguous().transpose(0, 1), w, w, cos, sin)
    assert not fits(q[..., ::2], k[..., ::2], w[:8], w[:8], cos[:, :8], sin[:, :8])
    assert not fits(q, k, w[:8], w, cos, sin)
    assert not fits(q, k, w, w, cos[:2], sin[:2])
    assert not fits(q, k, w, w, cos.double(), sin.double())
    assert not fits(q, k, w, w, cos.t().contiguous().t(), sin)
    with torch.enable_grad():
        assert not fits(q.requires_grad_(), k, w, w, cos, sin)


def test_predicate_of_two_streams(any_device):
    *streams, cos, sin = joint_inputs(2, 3, 5, 2, 16, device="cpu")
    assert can_use_fused_joint_qk_rmsnorm_rope(*streams, cos, sin)
    assert not can_use_fused_joint_qk_rmsnorm_rope(*streams, cos[:7], sin[:7])
    fewer = [x[:1] if x.dim() == 4 else x for x in streams[:2]]
    assert not can_use_fused_joint_qk_rmsnorm_rope(*fewer, *streams[2:], cos, sin)
    halves = [x.half() for x in streams]
    mixed = (*halves[:2], *streams[2:4], *halves[4:6], *streams[6:])
    assert not can_use_fused_joint_qk_rmsnorm_rope(*mixed, cos, sin)


def test_a_cpu_tensor_is_rejected_with_advice():
    inputs = (*stream(1, 2, 3, 16, device="cpu"), *tables(2, 16, "cpu"))
    with pytest.raises(
        ValueError, match=r"got q bfloat16 \(1, 2, 3, 16\).*expected CUDA.*can_use_"
    ):
        fused_qk_rmsnorm_rope(*inputs, EPS)
    with pytest.raises(ValueError, match="fused_joint_qk_rmsnorm_rope got txt_q"):
        fused_joint_qk_rmsnorm_rope(*joint_inputs(1, 2, 3, 4, 16, device="cpu"), EPS)


def test_fakes_give_contiguous_outputs_of_the_right_shape():
    with FakeTensorMode(allow_non_fake_inputs=False):
        q, k, w, cos = (torch.empty(s, dtype=BF16) for s in ((2, 3, 4, 16),) * 2 + ((16,), (3, 16)))
        for out in fused_qk_rmsnorm_rope(q.transpose(1, 2), k.transpose(1, 2), w, w, cos, cos, EPS):
            assert out.shape == (2, 4, 3, 16) and out.is_contiguous() and out.dtype == BF16
        args = (q, k, q, k, w, w, w, w, cos, cos, EPS)
        for out in fused_joint_qk_rmsnorm_rope(*args):
            assert out.shape == (2, 6, 4, 16) and out.is_contiguous()


# --- on the GPU ----------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("tokens", (4096, 512, 4608, 4216))
@pytest.mark.parametrize("chunks", (1, 3))
def test_flux_shapes(tokens, chunks):
    check(*stream(1, tokens, 24, 128, chunks=chunks))


@pytest.mark.cuda
# every number of tokens, batch, heads and head size, not every product of them: each compiles
@pytest.mark.parametrize("dtype", (BF16, FP16))
@pytest.mark.parametrize("batch,tokens,heads,head_dim", [
    (1, 300, 24, 64), (2, 1, 3, 40), (3, 7, 38, 128), (1, 17, 1, 8), (2, 300, 5, 96),
    (1, 1, 32, 16)])  # fmt: skip
def test_shapes(dtype, batch, tokens, heads, head_dim):
    check(*stream(batch, tokens, heads, head_dim, dtype))


@pytest.mark.cuda
@pytest.mark.parametrize("chunks", (3, 6, 12))
def test_views_of_packed_projections(chunks):
    check(*stream(3, 17, 4, 64, chunks=chunks))


@pytest.mark.cuda
def test_other_strides():
    q, k, *weights = stream(2, 300, 4, 128)
    for view in STRIDED_VIEWS:
        views = view(q), view(k)
        check(*views, *(w[: views[0].shape[-1]] for w in weights))


@pytest.mark.cuda
def test_an_offset_of_one_element_is_rejected():
    q, k, *weights = stream(1, 8, 3, 64)
    cos, sin = tables(8, 64)
    shifted = torch.zeros(q.numel() + 1, device="cuda", dtype=BF16)[1:].view(q.shape)
    assert not can_use_fused_qk_rmsnorm_rope(shifted, shifted, *weights, cos, sin)
    with pytest.raises(ValueError, match="16-byte aligned"):
        fused_qk_rmsnorm_rope(shifted, shifted, *weights, cos, sin, EPS)


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
    q, k, *weights = stream(1, 300, 24, 128, dtype)
    check(*(random_bits(*q.shape, dtype=dtype, seed=seed) for seed in (1, 2)), *weights)


@pytest.mark.cuda
def test_rows_with_inf_nan_and_zero():
    q, k, *weights = stream(1, 300, 24, 128)
    for token, value in enumerate((float("inf"), -float("inf"), float("nan"), 3e38)):
        q[0, token, :, 7] = k[0, token, :, 120] = value
    q[0, 10], k[0, 10] = 0.0, -0.0
    check(q, k, *weights)


@pytest.mark.cuda
def test_summation_order_on_the_gpu():
    q, k, *weights = stream(1, 3, 1, 128)
    q.zero_(), k.zero_()
    for token, places in enumerate(((0, 4, 68), (0, 1, 2), (2, 0, 1))):
        for place, value in zip(places, (4096, 1, 1), strict=True):
            q[0, token, 0, place] = value
        rstd = torch.ops.aten._fused_rms_norm(q[0, token], [128], weights[0], 0.0)[1]
        assert torch.equal(rstd.flatten(), torch.rsqrt(aten_sum_of_squares(q[0, token]) / 128))
    check(q, k, *weights, eps=0.0)


@pytest.mark.cuda
@pytest.mark.parametrize(
    "shape",
    [
        (1, 512, 4096, 24, 128),
        (2, 17, 300, 24, 128),
        (1, 1, 7, 6, 64),
        (3, 7, 1, 3, 40),
        (2, 5, 9, 3, 8),
    ],
)
@pytest.mark.parametrize("dtype", (BF16, FP16))
def test_joint(shape, dtype):
    batch, txt, img, heads, head_dim = shape
    inputs = joint_inputs(*shape, dtype=dtype)
    assert can_use_fused_joint_qk_rmsnorm_rope(*inputs)
    expected = joint_qk_rmsnorm_rope_reference(*inputs, EPS)
    poison(batch, txt + img, heads, head_dim, dtype=dtype)
    assert_same(fused_joint_qk_rmsnorm_rope(*inputs, EPS), expected)


@pytest.mark.cuda
def test_offsets_past_2_31_elements():
    q, k = far_apart(1, 2, 3, 128)
    new_q, new_k, *weights = stream(1, 2, 3, 128)
    q.copy_(new_q), k.copy_(new_k)
    check(q, k, *weights)


@pytest.mark.cuda
def test_fullgraph_compile(fresh_inductor):
    inputs = (*stream(1, 300, 24, 128, chunks=3), *tables(300, 128), EPS)
    expected = qk_rmsnorm_rope_reference(*inputs)
    assert_same(torch.compile(fused_qk_rmsnorm_rope, fullgraph=True)(*inputs), expected)
    joint = (*joint_inputs(1, 17, 300, 24, 128), EPS)
    expected = joint_qk_rmsnorm_rope_reference(*joint)
    assert_same(torch.compile(fused_joint_qk_rmsnorm_rope, fullgraph=True)(*joint), expected)


@pytest.mark.cuda
def test_cuda_graph_replays_on_new_values():
    q, k, *rest = (*stream(1, 300, 24, 128), *tables(300, 128), EPS)
    fresh = [stream(1, 300, 24, 128, seed=seed)[:2] for seed in (5, 6)]
    check_replays(fused_qk_rmsnorm_rope, qk_rmsnorm_rope_reference, (q, k), rest, fresh)


@pytest.mark.cuda
def test_two_streams_at_once():
    inputs = [(*stream(1, 4096, 24, 128, seed=s), *tables(4096, 128), EPS) for s in (1, 2)]
    check_two_streams(fused_qk_rmsnorm_rope, qk_rmsnorm_rope_reference, inputs)
