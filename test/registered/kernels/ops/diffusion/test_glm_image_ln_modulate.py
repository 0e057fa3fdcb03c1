import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from elementwise_checks import HALF_DTYPES, ROWS, WIDTHS, poison, random_bits
from torch._subclasses.fake_tensor import FakeTensorMode

from sglang.kernels.ops.diffusion.triton import layernorm_modulate as module
from sglang.kernels.ops.diffusion.triton.layernorm_modulate import (
    can_use_fused_layernorm_modulate,
    can_use_fused_qk_head_layernorm,
    fused_layernorm_modulate,
    fused_qk_head_layernorm,
    layernorm_modulate_reference,
    qk_head_layernorm_reference,
)
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")
register_cuda_ci(est_time=90, stage="base-b-kernel-unit", runner_config="1-gpu-large")

BF16, FP16 = HALF_DTYPES
EPS = 1e-5  # GLM-Image's; FLUX.1's is 1e-6
DIGEST_SHAPES = ((1, 4096, 4096), (2, 301, 4096), (1, 1, 2560))
FLUX_SHAPES = ((1, 4096, 3072), (1, 512, 3072), (1, 4608, 3072))
HEAD_SHAPES = ((1, 4360, 32, 128), (2, 37, 3, 40), (1, 129, 5, 64))


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def inputs(batch, tokens, hidden, dtype=BF16, device="cuda", seed=0, chunks=6, factor=1.0):
    """x, and scale and shift as chunks of one projection."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device=device)

    x = (normal(batch, tokens, hidden) * factor).to(dtype)
    shift, scale = normal(batch, chunks * hidden).to(dtype).chunk(chunks, dim=1)[:2]
    return x, scale, shift


def heads(batch, tokens, count, head_dim, dtype=BF16, device="cuda", seed=0, chunks=3):
    """q and k as views of one packed projection."""
    generator = torch.Generator(device=device).manual_seed(seed)
    width = count * head_dim
    packed = torch.randn(batch, tokens, chunks * width, generator=generator, device=device)
    q, k = packed.to(dtype).chunk(chunks, dim=-1)[:2]
    return q.unflatten(-1, (count, head_dim)), k.unflatten(-1, (count, head_dim))


def assert_same(got, want):
    """Every bit equal, signs of zeros too; a NaN equals any NaN in the same place."""
    assert got.is_contiguous() and got.shape == want.shape and got.dtype == want.dtype
    nan = want.isnan()
    assert torch.equal(got.isnan(), nan)
    zero = torch.zeros((), dtype=want.dtype, device=want.device)
    got_bits, want_bits = (torch.where(nan, zero, x).view(torch.int16) for x in (got, want))
    wrong = int((got_bits != want_bits).sum())
    assert wrong == 0, f"{wrong} of {want.numel()} values differ"


def check(x, scale, shift, eps=EPS):
    assert can_use_fused_layernorm_modulate(x, scale, shift)
    expected = layernorm_modulate_reference(x, scale, shift, eps)
    poison(*x.shape, dtype=x.dtype)
    assert_same(fused_layernorm_modulate(x, scale, shift, eps), expected)


def check_heads(q, k, eps=EPS):
    assert can_use_fused_qk_head_layernorm(q, k)
    expected = qk_head_layernorm_reference(q, k, eps)
    poison(*q.shape, dtype=q.dtype)
    poison(*q.shape, dtype=q.dtype)
    for got, want in zip(fused_qk_head_layernorm(q, k, eps), expected, strict=True):
        assert_same(got, want)


# --- without a GPU -------------------------------------------------------------------------------


@pytest.fixture
def any_device(monkeypatch):
    """The predicates' other limits, tried on CPU tensors."""
    monkeypatch.setattr(module, "triton_runs_on", lambda device: True)


def test_import_needs_no_triton():
    code = f"import sys; sys.modules['triton'] = None; import {module.__name__}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_reference_is_the_diffusers_chain():
    x, scale, shift = inputs(2, 5, 64, device="cpu")
    norm = torch.nn.LayerNorm(64, eps=EPS, elementwise_affine=False)
    expected = norm(x) * (1 + scale[:, None]) + shift[:, None]
    assert torch.equal(layernorm_modulate_reference(x, scale, shift, EPS), expected)
    q, k = heads(1, 5, 3, 16, device="cpu")
    norm = torch.nn.LayerNorm(16, eps=EPS, elementwise_affine=False)
    for got, x in zip(qk_head_layernorm_reference(q, k, EPS), (q, k), strict=True):
        assert torch.equal(got, norm(x))


@pytest.mark.parametrize(
    "hidden,fits",
    [(4, True), (64, True), (65, False), (66, False), (3070, False), (3072, True),
     (8188, True), (8192, True), (8196, False)],
)  # fmt: skip
def test_predicate_hidden(any_device, hidden, fits):
    x = torch.zeros(1, 2, hidden, dtype=BF16)
    row = torch.zeros(1, hidden, dtype=BF16)
    assert can_use_fused_layernorm_modulate(x, row, row) is fits


def test_predicate_rejects_each_limit(any_device):
    x, scale, shift = inputs(2, 3, 64, device="cpu")
    fits = can_use_fused_layernorm_modulate
    assert fits(x, scale, shift)
    assert fits(x.half(), scale.half(), shift.half())
    assert not fits(x.float(), scale.float(), shift.float())
    assert not fits(x, scale.float(), shift.float())
    assert not fits(x[0], scale, shift)
    assert not fits(x[:0], scale[:0], shift[:0])
    assert not fits(x[:, :0], scale, shift)
    assert not fits(x, scale[:1], shift[:1])
    assert not fits(x, scale[:, None], shift[:, None])
    assert not fits(x, scale[:, :60], shift[:, :60])
    assert not fits(x.transpose(1, 2), scale[:, :3], shift[:, :3])
    assert not fits(x, torch.cat([scale, scale], 1)[:, ::2], shift)
    meta = torch.zeros(2, 64, dtype=BF16, device="meta")
    assert not fits(x, meta, shift)
    with torch.enable_grad():
        assert not fits(x.clone().requires_grad_(), scale, shift)


def test_predicate_alignment(any_device):
    buffer = torch.zeros(2 * 3 * 72 + 8, dtype=BF16)
    row = torch.zeros(2, 64, dtype=BF16)
    for offset, fits in ((0, True), (1, False), (4, False), (8, True)):
        x = buffer[offset:].as_strided((2, 3, 64), (216, 72, 1), buffer.storage_offset() + offset)
        assert can_use_fused_layernorm_modulate(x, row, row) is fits
    odd = torch.zeros(2, 66, dtype=BF16)[:, :64]
    assert not can_use_fused_layernorm_modulate(x, odd, row)
    assert can_use_fused_layernorm_modulate(x[:1], odd[:1], row[:1])  # one row: no stride


def test_predicate_rejects_where_the_reference_wraps(any_device):
    row = torch.zeros(1, 4096, dtype=BF16)
    x = row[None].expand(1, 2**20, 4096)
    assert not can_use_fused_layernorm_modulate(x, row, row)
    assert can_use_fused_layernorm_modulate(x[:, 1:], row, row)


def test_predicate_heads(any_device):
    fits = can_use_fused_qk_head_layernorm
    q, k = heads(2, 128, 8, 16, device="cpu")
    assert fits(q, k) and fits(q.half(), k.half()) and fits(q, k.contiguous())
    assert fits(q[:1], k[:1])
    assert not fits(q, k.half()) and not fits(q, k[:, :2]) and not fits(q[0], k[0])
    assert not fits(q.float(), k.float()) and not fits(q[:0], k[:0])
    assert not fits(q[:, :96], k[:, :96])  # batch and token axes no longer merge
    assert not fits(q[..., :15], k[..., :15]) and not fits(q[..., ::2], k[..., ::2])
    for head_dim, accepted in ((4, True), (124, True), (128, True), (132, False)):
        assert fits(*heads(1, 512, 4, head_dim, device="cpu")) is accepted
    with torch.enable_grad():
        assert not fits(q.clone().requires_grad_(), k)


@pytest.mark.parametrize("tokens, accepted", [(1, False), (63, False), (64, True), (65, True)])
def test_predicate_rejects_few_heads(any_device, tokens, accepted):
    assert can_use_fused_qk_head_layernorm(*heads(1, tokens, 8, 16, device="cpu")) is accepted
    assert can_use_fused_qk_head_layernorm(*heads(tokens, 1, 8, 16, device="cpu")) is accepted


def test_a_cpu_tensor_is_rejected_with_advice():
    with pytest.raises(ValueError, match=r"got x \(1, 2, 64\).*takes CUDA.*can_use_fused"):
        fused_layernorm_modulate(*inputs(1, 2, 64, device="cpu"), EPS)
    with pytest.raises(ValueError, match=r"got q \(1, 2, 3, 16\).*takes CUDA.*can_use_fused"):
        fused_qk_head_layernorm(*heads(1, 2, 3, 16, device="cpu"), EPS)


def test_fakes_give_contiguous_outputs():
    with FakeTensorMode(allow_non_fake_inputs=False):
        x, row = torch.empty(2, 64, 3, dtype=BF16).mT, torch.empty(2, 64, dtype=BF16)
        out = fused_layernorm_modulate(x, row, row, EPS)
        assert out.shape == x.shape and out.is_contiguous() and out.dtype == BF16
        q = torch.empty(2, 3, 5, 16, dtype=FP16).transpose(1, 2)
        for out in fused_qk_head_layernorm(q, q, EPS):
            assert out.shape == q.shape and out.is_contiguous() and out.dtype == FP16


# --- LayerNorm and modulation on the GPU ---------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("shape", DIGEST_SHAPES + FLUX_SHAPES, ids=str)
@pytest.mark.parametrize("eps", (1e-5, 1e-6))
def test_digest_shapes(shape, eps):
    check(*inputs(*shape, chunks=12), eps=eps)


@pytest.mark.cuda
@pytest.mark.parametrize("hidden", WIDTHS)
@pytest.mark.parametrize("tokens", ROWS)
def test_shapes(tokens, hidden):
    for batch in (1, 2, 3) if tokens < 4216 else (1,):
        check(*inputs(batch, tokens, hidden))


@pytest.mark.cuda
@pytest.mark.parametrize("shape", [(1, 4096, 3072), (2, 17, 2240), (3, 7, 64), (1, 1, 2560)])
def test_fp16(shape):
    check(*inputs(*shape, dtype=FP16))


@pytest.mark.cuda
@pytest.mark.parametrize("hidden", (4, 60, 508, 516, 1028, 3068))
def test_hidden_sizes_with_idle_threads(hidden):
    check(inputs(2, 17, hidden)[0], *rows_of(2, hidden))


def rows_of(batch, hidden):
    generator = torch.Generator(device="cuda").manual_seed(1)
    return torch.randn(2, batch, hidden, generator=generator, device="cuda").to(BF16).unbind()


@pytest.mark.cuda
@pytest.mark.parametrize("chunks", (3, 6, 12))
def test_chunk_views(chunks):
    check(*inputs(3, 17, 4096, chunks=chunks))


@pytest.mark.cuda
def test_strides():
    x, scale, shift = inputs(4, 300, 3072)
    check(x[:, 44:, :], scale, shift)
    check(x[:, ::7], scale, shift)
    check(x[::2], scale[::2], shift[::2])
    check(x.transpose(0, 1), *rows_of(300, 3072))
    check(x[:1].expand(3, -1, -1), scale[:3], shift[:3])
    check(x[:, :1].expand(-1, 9, -1), scale[:1].expand(4, -1), shift)
    check(x[..., 1024:], scale[:, 1024:], shift[:, 1024:])


@pytest.mark.cuda
def test_an_offset_of_one_element_is_rejected():
    x, scale, shift = inputs(1, 8, 3072)
    shifted = torch.zeros(x.numel() + 1, device="cuda", dtype=BF16)[1:].view(x.shape)
    assert not can_use_fused_layernorm_modulate(shifted, scale, shift)
    with pytest.raises(ValueError, match="16-byte aligned"):
        fused_layernorm_modulate(shifted, scale, shift, EPS)


@pytest.mark.cuda
@pytest.mark.parametrize("factor", (1e-40, 1e-38, 3e-21, 1e-8, 300.0, 1e18, 1e30, 3e37))
@pytest.mark.parametrize("hidden", (3072, 2240))
def test_magnitudes(factor, hidden):
    for eps in (EPS, 0.0):
        check(*inputs(1, 300, hidden, factor=factor), eps=eps)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_every_bit_pattern(dtype):
    x, scale, shift = inputs(1, 300, 3072, dtype=dtype)
    wild = [
        random_bits(*t.shape, dtype=dtype, seed=seed) for seed, t in enumerate((x, scale, shift))
    ]
    check(x, *wild[1:])
    check(wild[0], scale, shift)
    check(wild[0].nan_to_num(0, 1, -1), *wild[1:])


@pytest.mark.cuda
def test_subnormal_outputs_round_as_eager_does():
    """Tiny x, and scales around -1: products and sums that are subnormal in bf16."""
    x, scale, shift = inputs(1, 300, 3072, factor=1e-38)
    scale.copy_(-1 + scale / 128)
    shift.copy_((shift.float() * 1e-38).to(BF16))
    for eps in (1.0, EPS, 1e-12):
        check(x, scale, shift, eps)


@pytest.mark.cuda
def test_constant_inf_and_nan_rows():
    x, scale, shift = inputs(1, 300, 3072)
    for row, value in enumerate((0.0, -0.0, 3.0, -7e30, 1e-39, float("inf"), float("nan"))):
        x[0, row] = value
    for row, value in enumerate((float("inf"), -float("inf"), float("nan"), 3e38), start=10):
        x[0, row, 7 * row] = value
    scale[0, :4] = torch.tensor([-1.0, float("inf"), float("nan"), 0.0])
    check(x, scale, shift)
    check(x, scale, shift, 0.0)


@pytest.mark.cuda
def test_mean_much_larger_than_deviation():
    x, scale, shift = inputs(1, 300, 3072)
    check((x.float() + 1000).to(BF16), scale, shift)


@pytest.mark.cuda
def test_offsets_past_2_31_elements():
    tokens = 2**31 // 3072 + 3
    x = torch.randn(1, tokens, 3072, dtype=BF16, device="cuda")
    scale, shift = rows_of(1, 3072)
    out = fused_layernorm_modulate(x, scale, shift, EPS)
    for part in (slice(0, 64), slice(tokens - 64, tokens)):
        assert_same(out[:, part], layernorm_modulate_reference(x[:, part], scale, shift, EPS))
    far = x.view(-1).as_strided((2, 300, 3072), (2**31 - 300 * 3072, 3072, 1))
    check(far, *rows_of(2, 3072))


@pytest.mark.cuda
def test_layer_norm_moments_follow_the_same_kernel():
    """The fused output comes from the mean and rstd that aten itself reports."""
    x, scale, shift = inputs(1, 300, 4096)
    _, mean, rstd = torch.native_layer_norm(x, (4096,), None, None, EPS)
    y = ((x.float() - mean) * rstd).to(BF16)
    expected = y * (1 + scale[:, None]) + shift[:, None]
    assert_same(fused_layernorm_modulate(x, scale, shift, EPS), expected)


@pytest.mark.cuda
def test_fullgraph_compile(fresh_inductor):
    arguments = (*inputs(2, 300, 3072), EPS)
    expected = layernorm_modulate_reference(*arguments)
    assert_same(torch.compile(fused_layernorm_modulate, fullgraph=True)(*arguments), expected)
    arguments = (*heads(2, 37, 3, 40), EPS)
    compiled = torch.compile(fused_qk_head_layernorm, fullgraph=True)(*arguments)
    for got, want in zip(compiled, qk_head_layernorm_reference(*arguments), strict=True):
        assert_same(got, want)


@pytest.mark.cuda
def test_cuda_graph_replays_on_new_values():
    x, scale, shift = inputs(1, 512, 3072)
    q, k = heads(1, 129, 5, 64)
    fused_layernorm_modulate(x, scale, shift, EPS), fused_qk_head_layernorm(q, k, EPS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fused_layernorm_modulate(x, scale, shift, EPS)
        outs = fused_qk_head_layernorm(q, k, EPS)
    for seed in (5, 6):
        x.copy_(inputs(1, 512, 3072, seed=seed)[0])
        q.copy_(heads(1, 129, 5, 64, seed=seed)[0])
        for output in (out, *outs):
            output.fill_(float("nan"))
        graph.replay()
        assert_same(out, layernorm_modulate_reference(x, scale, shift, EPS))
        for got, want in zip(outs, qk_head_layernorm_reference(q, k, EPS), strict=True):
            assert_same(got, want)


@pytest.mark.cuda
def test_two_streams_at_once():
    arguments = [(*inputs(1, 4096, 3072, seed=seed), EPS) for seed in (1, 2)]
    expected = [layernorm_modulate_reference(*a) for a in arguments]
    torch.cuda.synchronize()
    queues, results = [torch.cuda.Stream() for _ in arguments], [None, None]
    for _ in range(5):
        for number, queue in enumerate(queues):
            with torch.cuda.stream(queue):
                results[number] = fused_layernorm_modulate(*arguments[number])
    torch.cuda.synchronize()
    for got, want in zip(results, expected, strict=True):
        assert_same(got, want)


# --- q and k heads on the GPU --------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("shape", HEAD_SHAPES + ((1, 4608, 24, 128), (3, 7, 38, 64)), ids=str)
@pytest.mark.parametrize("chunks", (2, 3))
def test_heads(shape, chunks):
    check_heads(*heads(*shape, chunks=chunks))


@pytest.mark.cuda
@pytest.mark.parametrize("shape", [(2, 37, 3, 40), (1, 300, 32, 128)])
def test_heads_fp16(shape):
    check_heads(*heads(*shape, dtype=FP16))


@pytest.mark.cuda
@pytest.mark.parametrize("head_dim", (4, 8, 60, 124))
@pytest.mark.parametrize("tokens", (683, 700, 2048))
def test_head_sizes(head_dim, tokens):
    # clone, not contiguous(): one token's view of a packed row is contiguous already, and unaligned
    check_heads(*(x.clone() for x in heads(1, tokens, 3, head_dim)))


@pytest.mark.cuda
def test_head_strides():
    q, k = heads(2, 300, 8, 128)
    check_heads(q.contiguous(), k)
    check_heads(q[:, :, ::2], k[:, :, 1::2])
    check_heads(q[..., :64], k[..., 64:])
    check_heads(q[:1, ::3], k[1:, 1::3])
    check_heads(q[:1, :, :1].expand(-1, -1, 8, -1), k[:1])


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_heads_of_every_bit_pattern(dtype):
    check_heads(*(random_bits(1, 300, 32, 128, dtype=dtype, seed=seed) for seed in (1, 2)))


@pytest.mark.cuda
@pytest.mark.parametrize("factor", (1e-40, 3e-21, 300.0, 1e18, 1e20, 1e30))
@pytest.mark.parametrize("head_dim", (128, 40))
def test_heads_magnitudes(factor, head_dim):
    q, k = (x.contiguous() for x in heads(1, 300, 8, head_dim, dtype=torch.float32))
    check_heads((q * factor).to(BF16), (k * factor + factor).to(BF16))
    check_heads((q * factor).to(BF16), (k * 0 + factor).to(BF16), 0.0)


@pytest.mark.cuda
def test_heads_past_2_31_elements():
    buffer = torch.empty(2**31 + 2**20, dtype=BF16, device="cuda")
    q = buffer.as_strided((1, 2, 32, 128), (0, 2**31, 128, 1))
    k = buffer.as_strided((1, 2, 32, 128), (0, 2**31, 128, 1), 2**19)
    for view, values in zip((q, k), heads(1, 2, 32, 128), strict=True):
        view.copy_(values)
    check_heads(q, k)


@pytest.mark.cuda
def test_the_plain_layer_norm_is_what_heads_equal():
    q, k = heads(1, 129, 5, 64)
    out, _ = fused_qk_head_layernorm(q, k, EPS)
    assert_same(out, F.layer_norm(q, (64,), eps=EPS))
