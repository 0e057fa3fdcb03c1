import pytest
import torch
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers.transformer_glm_image import GlmImageRotaryPosEmbed
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
from sglang.kernels.ops.diffusion.triton.qk_layernorm_rope import (
    can_use_fused_qk_layernorm_rope,
    fused_qk_layernorm_rope,
    qk_layernorm_rope_reference,
)
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=15, suite="base-a-test-cpu")
register_cuda_ci(est_time=80, stage="base-b-kernel-unit", runner_config="1-gpu-large")

EPS = 1e-5


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def tables(tokens, head_dim, device="cuda"):
    """GLM-Image's: both halves of a head turn by the same angles."""
    angles = torch.linspace(0, 700, tokens * head_dim // 2, device=device).view(tokens, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


def heads(batch, tokens, count, head_dim, dtype=BF16, device="cuda", seed=0, chunks=3):
    return stream(batch, tokens, count, head_dim, dtype, device, seed, chunks)[:2]


def check(q, k, text=0, rope=None, eps=EPS):
    args = (q, k, *(rope or tables(q.shape[1] - text, q.shape[3])), text)
    assert can_use_fused_qk_layernorm_rope(*args)
    expected = qk_layernorm_rope_reference(*args, eps)
    poison(*q.shape, dtype=q.dtype)
    assert_same(fused_qk_layernorm_rope(*args, eps), expected)


# --- without a GPU -------------------------------------------------------------------------------


@pytest.fixture
def any_device(monkeypatch):
    """The predicate's other limits, tried on CPU tensors."""
    monkeypatch.setattr(head_streams, "triton_runs_on", lambda device: True)


@pytest.mark.parametrize("text", (0, 9))
def test_reference_is_the_diffusers_chain(text):
    q, k = heads(2, text + 20, 3, 16, device="cpu")
    cos, sin = GlmImageRotaryPosEmbed(16, patch_size=2)(torch.empty(1, 1, 8, 10))
    signed = torch.cat([-sin[:, :8], sin[:, 8:]], dim=-1)
    norm = torch.nn.LayerNorm(16, eps=EPS, elementwise_affine=False)
    got = qk_layernorm_rope_reference(q, k, cos, signed, text, EPS)
    for x, out in zip((q, k), got, strict=True):
        y = norm(x)
        turned = apply_rotary_emb(y[:, text:], (cos, sin), sequence_dim=1, use_real_unbind_dim=-2)
        assert torch.equal(out, torch.cat([y[:, :text], turned], dim=1))


@pytest.mark.parametrize("head_dim,fits", HALF_SPLIT_DIMS)
def test_predicate_head_dim(any_device, head_dim, fits):
    args = (*heads(1, 3, 2, head_dim, device="cpu"), *tables(2, head_dim, "cpu"), 1)
    assert can_use_fused_qk_layernorm_rope(*args) is fits


def test_predicate_rejects_each_limit(any_device):
    q, k = heads(2, 5, 4, 16, device="cpu", chunks=1)
    cos, sin = tables(3, 16, "cpu")
    fits = can_use_fused_qk_layernorm_rope
    assert fits(q, k, cos, sin, 2) and fits(q.half(), k.half(), cos, sin, 2)
    for why, pair in rejected_heads(q, k).items():
        assert not fits(*pair, cos, sin, 2), why
    assert not fits(q, k, cos, sin, 1) and not fits(q, k, cos[:2], sin[:2], 2)
    assert not fits(q, k, cos[:0], sin[:0], 5) and not fits(q, k, *tables(6, 16, "cpu"), -1)
    assert not fits(q, k, cos.to(BF16), sin.to(BF16), 2) and not fits(q, k, cos.double(), sin, 2)
    assert not fits(q, k, cos[:, None], sin[:, None], 2)
    assert not fits(q, k, cos.mT.contiguous().mT, sin, 2)
    with torch.enable_grad():
        assert not fits(q.clone().requires_grad_(), k, cos, sin, 2)
        assert not fits(q, k, cos, sin.clone().requires_grad_(), 2)


def test_a_cpu_tensor_is_rejected_with_advice():
    args = (*heads(1, 3, 2, 16, device="cpu"), *tables(2, 16, "cpu"), 1, EPS)
    with pytest.raises(ValueError, match=r"got q bfloat16\[1, 3, 2, 16\].*expected CUDA.*can_use_"):
        fused_qk_layernorm_rope(*args)


def test_fake_gives_contiguous_outputs():
    with FakeTensorMode(allow_non_fake_inputs=False):
        q, cos = torch.empty(2, 3, 5, 16, dtype=FP16).transpose(1, 2), torch.empty(4, 16)
        for out in fused_qk_layernorm_rope(q, q, cos, cos, 1, EPS):
            assert out.shape == q.shape and out.is_contiguous() and out.dtype == FP16


# --- on the GPU ----------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("batch,tokens,text", [(1, 4360, 264), (2, 4360, 264), (1, 1288, 264),
                                               (1, 4096, 0), (2, 301, 300)])  # fmt: skip
@pytest.mark.parametrize("chunks", (1, 3))
def test_glm_shapes(batch, tokens, text, chunks):
    check(*heads(batch, tokens, 32, 128, chunks=chunks), text)


@pytest.mark.cuda
# every number of tokens, batch, heads and head size, not every product of them: each compiles
@pytest.mark.parametrize("dtype", (BF16, FP16))
@pytest.mark.parametrize("batch,tokens,count,head_dim", [
    (1, 300, 24, 64), (3, 7, 38, 128), (1, 17, 1, 16), (2, 1, 5, 32), (1, 300, 7, 128),
    (1, 1, 64, 64)])  # fmt: skip
def test_shapes(dtype, batch, tokens, count, head_dim):
    check(*heads(batch, tokens, count, head_dim, dtype), text=tokens // 3)


@pytest.mark.cuda
@pytest.mark.parametrize("view", range(len(STRIDED_VIEWS)))
def test_other_strides(view):
    q, k = map(STRIDED_VIEWS[view], heads(2, 300, 4, 128))
    check(q, k, text=q.shape[1] // 2)


@pytest.mark.cuda
def test_an_offset_of_one_element_is_rejected():
    args = (*tables(8, 64), 0)
    shifted = torch.zeros(8 * 3 * 64 + 1, device="cuda", dtype=BF16)[1:].view(1, 8, 3, 64)
    assert not can_use_fused_qk_layernorm_rope(shifted, shifted, *args)
    with pytest.raises(ValueError, match="16-byte aligned"):
        fused_qk_layernorm_rope(shifted, shifted, *args, EPS)


@pytest.mark.cuda
@pytest.mark.parametrize("factor", (1e-40, 3e-21, 300.0, 1e18, 1e20, 1e30))
@pytest.mark.parametrize("head_dim", (128, 64, 16))
def test_magnitudes(factor, head_dim):
    q, k = (x.contiguous() for x in heads(1, 300, 8, head_dim, dtype=torch.float32))
    check((q * factor).to(BF16), (k * factor + factor).to(BF16), 17)
    check((q * factor).to(BF16), (k * 0 + factor).to(BF16), 17, eps=0.0)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", (BF16, FP16))
@pytest.mark.parametrize("head_dim", (128, 64))
def test_every_bit_pattern(dtype, head_dim):
    q, k = (random_bits(1, 300, 32, head_dim, dtype=dtype, seed=seed) for seed in (1, 2))
    check(q, k, 17)
    check(q.nan_to_num(1, 1, 1), k.nan_to_num(1, 1, 1), 17)


@pytest.mark.cuda
@pytest.mark.parametrize("factor", (1e-44, 1e-30, 1e30))
def test_tables_of_any_size(factor):
    cos, sin = (t * factor for t in tables(283, 128))
    check(*heads(1, 300, 32, 128), 17, (cos, sin))


@pytest.mark.cuda
def test_rows_with_inf_nan_and_zero():
    q, k = heads(1, 300, 32, 128, chunks=1)
    for token, value in enumerate((float("inf"), -float("inf"), float("nan"), 3e38)):
        q[0, token, :, 7] = k[0, token, :, 120] = value
    q[0, 10], k[0, 10] = 0.0, -0.0
    q[0, 11:14, ::2] = -0.0
    check(q, k, 2)


@pytest.mark.cuda
def test_offsets_past_2_31_elements():
    views = far_apart(1, 2, 3, 128)
    for view, value in zip(views, heads(1, 2, 3, 128), strict=True):
        view.copy_(value)
    check(*views, 1)


@pytest.mark.cuda
def test_fullgraph_compile(fresh_inductor):
    args = (*heads(1, 300, 32, 128), *tables(283, 128), 17, EPS)
    expected = qk_layernorm_rope_reference(*args)
    assert_same(torch.compile(fused_qk_layernorm_rope, fullgraph=True)(*args), expected)


@pytest.mark.cuda
def test_cuda_graph_replays_on_new_values():
    rest = (*tables(283, 128), 17, EPS)
    fresh = [heads(1, 300, 32, 128, seed=seed) for seed in (5, 6)]
    static = heads(1, 300, 32, 128)
    check_replays(fused_qk_layernorm_rope, qk_layernorm_rope_reference, static, rest, fresh)


@pytest.mark.cuda
def test_two_streams_at_once():
    cases = [(*heads(1, 4360, 32, 128, seed=s), *tables(4096, 128), 264, EPS) for s in (1, 2)]
    check_two_streams(fused_qk_layernorm_rope, qk_layernorm_rope_reference, cases)


@pytest.mark.cuda
def test_tables_of_another_kind_turn_the_gate_off():
    """The kernel reads half of each table; tables whose halves differ are caught by the gate."""
    q, k = heads(1, 300, 32, 128)
    cos, sin = torch.randn(2, 300, 128, device="cuda")
    gate = BitExactFusionGate("test.qk_layernorm_rope")
    expected = qk_layernorm_rope_reference(q, k, cos, sin, 0, EPS)
    got = gate.run(
        lambda: fused_qk_layernorm_rope(q, k, cos, sin, 0, EPS),
        lambda: qk_layernorm_rope_reference(q, k, cos, sin, 0, EPS),
    )
    assert_same(got, expected)
    assert gate.disabled and "differs" in gate.state().reason
