import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from elementwise_checks import HALF_DTYPES, poison, random_bits
from torch._subclasses.fake_tensor import FakeTensorMode

from sglang.kernels.ops.diffusion.bitexact_gate import tensors_equal
from sglang.kernels.ops.diffusion.residual_gate_add import residual_gate_add_reference
from sglang.kernels.ops.diffusion.triton import gated_layernorm_modulate as module
from sglang.kernels.ops.diffusion.triton import layernorm_modulate
from sglang.kernels.ops.diffusion.triton.gated_layernorm_modulate import (
    can_use_fused_gated_layernorm_modulate,
    fused_gated_layernorm_modulate,
    gated_layernorm_modulate_reference,
)
from sglang.kernels.ops.diffusion.triton.row_launch import RowLaunch
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")
register_cuda_ci(est_time=80, stage="base-b-kernel-unit", runner_config="1-gpu-large")

BF16, FP16 = HALF_DTYPES
EPS = 1e-6  # FLUX.1's; GLM-Image's is 1e-5
FLUX_SHAPES = ((1, 4096, 3072), (1, 4608, 3072), (1, 512, 3072))
GLM_SHAPES = ((1, 4096, 4096), (1, 264, 4096), (2, 301, 4096), (1, 1, 2560))


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def inputs(batch, tokens, hidden, dtype=BF16, device="cuda", seed=0, chunks=6, factor=1.0):
    """residual, update, and gate, scale and shift as chunks of one projection."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device=device)

    full = ((normal(batch, tokens, hidden) * factor).to(dtype) for _ in range(2))
    return *full, *normal(batch, chunks * hidden).to(dtype).chunk(chunks, dim=1)[-3:]


def check(*tensors, eps=EPS):
    """Every bit of both outputs equal, signs of zeros too; a NaN equals any NaN in its place."""
    assert can_use_fused_gated_layernorm_modulate(*tensors)
    expected = gated_layernorm_modulate_reference(*tensors, eps)
    before = [tensor.clone() for tensor in tensors]
    poison(2, *tensors[0].shape, dtype=tensors[0].dtype)
    actual = fused_gated_layernorm_modulate(*tensors, eps)
    assert actual[0].is_contiguous() and actual[1].is_contiguous()
    assert_same(actual, expected)
    assert tensors_equal(tensors, before), "an input was changed"


def assert_same(actual, expected):
    for name, got, want in zip(("out", "residual"), actual, expected, strict=True):
        assert tensors_equal(got, want), f"{name}: {int((got != want).sum())} of {want.numel()}"


# --- without a GPU -------------------------------------------------------------------------------


@pytest.fixture
def any_device(monkeypatch):
    """The predicate's other limits, tried on CPU tensors."""
    monkeypatch.setattr(layernorm_modulate, "triton_runs_on", lambda device: True)


def test_import_needs_no_triton():
    code = f"import sys; sys.modules['triton'] = None; import {module.__name__}"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_reference_is_the_chain_of_two_ops(dtype):
    residual, update, gate, scale, shift = inputs(2, 5, 64, dtype=dtype, device="cpu")
    out, added = gated_layernorm_modulate_reference(residual, update, gate, scale, shift, EPS)
    assert torch.equal(added, residual_gate_add_reference(residual, update, gate[:, None]))
    normed = F.layer_norm(added, (64,), eps=EPS)
    assert torch.equal(out, normed * (1 + scale[:, None]) + shift[:, None])


def test_reference_rounds_the_product_and_the_sum():
    # (1 + 2^-7) (1 + 2^-7) = 1 + 2^-6 + 2^-14, in bf16 1 + 2^-6. With -(1 + 2^-6) nothing is left,
    # where one rounding would leave 2^-14. And 256 + 1 is a tie that rounds to 256.
    residual = torch.tensor([[[-1 - 2.0**-6, 256.0, 0.0, 0.0]]], dtype=BF16)
    update = torch.tensor([[[1 + 2.0**-7, 1.0, 0.0, 0.0]]], dtype=BF16)
    gate = torch.tensor([[1 + 2.0**-7, 1.0, 0.0, 0.0]], dtype=BF16)
    row = torch.zeros_like(gate)
    _, added = gated_layernorm_modulate_reference(residual, update, gate, row, row, EPS)
    assert added.flatten().tolist() == [0.0, 256.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "hidden,fits",
    [(4, True), (64, True), (65, False), (66, False), (3070, False), (3072, True),
     (8188, True), (8192, True), (8196, False)],
)  # fmt: skip
def test_predicate_hidden(any_device, hidden, fits):
    x, row = torch.zeros(1, 2, hidden, dtype=BF16), torch.zeros(1, hidden, dtype=BF16)
    assert can_use_fused_gated_layernorm_modulate(x, x, row, row, row) is fits


def test_predicate_rejects_each_limit(any_device):
    tensors = residual, update, gate, scale, shift = inputs(2, 3, 64, device="cpu")
    fits = can_use_fused_gated_layernorm_modulate
    assert fits(*tensors)
    assert fits(*(t.half() for t in tensors))
    assert not fits(*(t.float() for t in tensors))
    assert not fits(*(t[:0] for t in tensors))
    assert not fits(residual[:, :0], update[:, :0], gate, scale, shift)
    assert not fits(residual[0], update[0], gate, scale, shift)
    for number, tensor in enumerate(tensors):
        odd = [tensor.half(), tensor[:1], tensor[..., :60], tensor.to("meta"), tensor[None]]
        odd += [torch.cat([tensor, tensor], -1)[..., ::2], torch.cat([tensor, tensor], 0)[1:3, 1:]]
        for other in odd:
            assert not fits(*tensors[:number], other, *tensors[number + 1 :]), (number, other.shape)
        with torch.enable_grad():
            wanting = tensor.clone().requires_grad_()
            assert not fits(*tensors[:number], wanting, *tensors[number + 1 :]), number
    assert not fits(residual, update[:, :2], gate, scale, shift)
    assert not fits(residual, update, gate[:, None], scale, shift)


def test_predicate_takes_strided_streams(any_device):
    residual, update, *rows = inputs(2, 6, 64, device="cpu")
    fits = can_use_fused_gated_layernorm_modulate
    assert fits(residual[:, 2:], update[:, :4], *rows)
    assert fits(residual[:, ::2], update[:, 3:], *rows)
    assert fits(residual[1:], update[:1], *(row[1:] for row in rows))
    assert not fits(residual.mT.contiguous().mT, update, *rows)


@pytest.mark.parametrize("place", range(5))
def test_predicate_alignment(any_device, place):
    tensors = list(inputs(1, 3, 64, device="cpu"))
    for offset, fits in ((0, True), (1, False), (4, False), (8, True)):
        buffer = torch.zeros(tensors[place].numel() + offset, dtype=BF16)
        tensors[place] = buffer[offset:].view(tensors[place].shape)
        assert can_use_fused_gated_layernorm_modulate(*tensors) is fits, offset


def test_a_cpu_tensor_is_rejected_with_advice():
    with pytest.raises(ValueError, match=r"got residual bfloat16\[1, 2, 64\].*takes CUDA.*can_use"):
        fused_gated_layernorm_modulate(*inputs(1, 2, 64, device="cpu"), EPS)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_fake_gives_two_contiguous_outputs(dtype):
    with FakeTensorMode(allow_non_fake_inputs=False):
        x, row = torch.empty(2, 64, 3, dtype=dtype).mT, torch.empty(2, 64, dtype=dtype)
        out, residual = fused_gated_layernorm_modulate(x, x, row, row, row, EPS)
        assert out is not residual
        for got in (out, residual):
            assert got.shape == x.shape and got.is_contiguous() and got.dtype == dtype


# --- on the GPU ----------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("shape", FLUX_SHAPES + GLM_SHAPES, ids=str)
@pytest.mark.parametrize("chunks", (6, 12))
def test_models_shapes(shape, chunks):
    for eps in (1e-5, 1e-6):
        check(*inputs(*shape, chunks=chunks), eps=eps)


@pytest.mark.cuda
@pytest.mark.parametrize("tokens", (1, 7, 300))
@pytest.mark.parametrize("batch,hidden", ((1, 8192), (2, 4096), (3, 3072), (2, 2240), (5, 64)))
def test_row_counts(batch, tokens, hidden):
    check(*inputs(batch, tokens, hidden))


@pytest.mark.cuda
@pytest.mark.parametrize("hidden", (4, 60, 508, 516, 1028, 3068, 4100, 8188))
def test_hidden_sizes_with_idle_threads(hidden):
    residual, update, *_ = inputs(2, 17, hidden)
    # chunks of a projection of such widths are not aligned
    gate, scale = (t[:, 0].contiguous() for t in inputs(2, 1, hidden, seed=3)[:2])
    check(residual, update, gate, scale, gate.roll(1, 0))


@pytest.mark.cuda
@pytest.mark.parametrize("hidden", (65, 3070, 8196))
def test_rejected_hidden_sizes(hidden):
    tensors = [t.contiguous() for t in inputs(1, 3, hidden)]
    assert not can_use_fused_gated_layernorm_modulate(*tensors)
    with pytest.raises(ValueError, match="D % 4 == 0 and D <= 8192"):
        fused_gated_layernorm_modulate(*tensors, EPS)


@pytest.mark.cuda
@pytest.mark.parametrize("shape", [(1, 4096, 3072), (2, 17, 2240), (3, 7, 64), (1, 1, 2560)])
def test_fp16(shape):
    for factor in (1.0, 3e-5, 5e3):  # subnormal products; a few that overflow
        check(*inputs(*shape, dtype=FP16, factor=factor))


@pytest.mark.cuda
def test_strides():
    residual, update, gate, scale, shift = inputs(4, 300, 3072)
    rows = gate, scale, shift
    check(residual[:, 44:], update[:, :256], *rows)
    check(residual[:, ::7], update[:, :43], *rows)
    check(residual[::2], update[1::2], *(row[::2] for row in rows))
    check(residual[..., 1024:], update[..., :2048], *(row[:, 1024:] for row in rows))
    check(residual[:1].expand(4, -1, -1), update, *(row[:1].expand(4, -1) for row in rows))


@pytest.mark.cuda
def test_an_offset_of_one_element_is_rejected():
    residual, update, *rows = inputs(1, 8, 3072)
    shifted = torch.zeros(update.numel() + 1, device="cuda", dtype=BF16)[1:].view(update.shape)
    assert not can_use_fused_gated_layernorm_modulate(residual, shifted, *rows)
    with pytest.raises(ValueError, match="16-byte aligned"):
        fused_gated_layernorm_modulate(residual, shifted, *rows, EPS)


@pytest.mark.cuda
@pytest.mark.parametrize("factor", (1e-40, 1e-38, 3e-21, 1e-8, 300.0, 1e18, 1e30, 3e37))
@pytest.mark.parametrize("hidden", (3072, 2240))
def test_magnitudes(factor, hidden):
    for eps in (EPS, 0.0):
        check(*inputs(1, 300, hidden, factor=factor), eps=eps)


@pytest.mark.cuda
def test_subnormal_products():
    """Gate times update around and below bf16's least number, beside a residual of that size."""
    residual, update, gate, scale, shift = inputs(1, 300, 3072, factor=1e-20)
    gate = (gate.float() * 1e-20).to(BF16)
    check((residual.float() * 1e-20).to(BF16), update, gate, scale, shift)
    check(torch.zeros_like(residual), update, gate, scale, shift)
    check(-torch.zeros_like(residual), update * 0, gate, scale, shift, eps=0.0)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_every_bit_pattern(dtype):
    tensors = inputs(1, 300, 3072, dtype=dtype)
    wild = [random_bits(*t.shape, dtype=dtype, seed=seed) for seed, t in enumerate(tensors)]
    check(*wild)
    check(*tensors[:2], *wild[2:])
    check(*tensors[:3], *wild[3:])
    check(wild[0], *tensors[1:])
    check(tensors[0], wild[1], *tensors[2:])
    check(*(t.nan_to_num(0, 1, -1) for t in wild))


@pytest.mark.cuda
def test_rows_with_inf_nan_and_zero():
    residual, update, gate, scale, shift = inputs(1, 300, 3072)
    for token, value in enumerate((float("inf"), -float("inf"), float("nan"), 3e38)):
        residual[0, token, 7] = update[0, token + 4, 3000] = value
        residual[0, token + 8] = update[0, token + 12] = value
    residual[0, 20] = update[0, 20] = 0.0
    residual[0, 21], update[0, 21] = -0.0, 0.0
    update[0, 22] = -0.0
    gate[0, :4] = torch.tensor([0.0, -0.0, -1.0, 1.0])
    scale[0, :4] = torch.tensor([-1.0, float("inf"), float("nan"), 0.0])
    check(residual, update, gate, scale, shift)
    gate[0, 40], gate[0, 41] = float("inf"), float("nan")
    check(residual, update, gate, scale, shift, eps=0.0)


@pytest.mark.cuda
@pytest.mark.parametrize("how", [
    RowLaunch(hold=True), RowLaunch(rows=2), RowLaunch(rows=2, warps=8), RowLaunch(warps=2),
    RowLaunch(per_sm=1), RowLaunch(per_sm=2, ahead=True),
    RowLaunch(per_sm=1, ahead=True, hold=True), RowLaunch(rows=2, warps=8, per_sm=1, ahead=True),
], ids=str)  # fmt: skip
def test_a_launch_decides_about_no_bit(how):
    tensors = inputs(2, 301, 3072)
    expected = gated_layernorm_modulate_reference(*tensors, EPS)
    poison(2, *tensors[0].shape, dtype=BF16)
    assert_same(module.launch(*tensors, EPS, how), expected)


@pytest.mark.cuda
def test_offsets_past_2_31_elements():
    tokens = 2**31 // 3072 + 3
    residual = torch.randn(1, tokens, 3072, dtype=BF16, device="cuda")
    update = -residual
    rows = inputs(1, 1, 3072)[2:]
    out = fused_gated_layernorm_modulate(residual, update, *rows, EPS)
    for part in (slice(0, 64), slice(tokens - 64, tokens)):
        few = (residual[:, part], update[:, part], *rows)
        assert_same([t[:, part] for t in out], gated_layernorm_modulate_reference(*few, EPS))


@pytest.mark.cuda
def test_fullgraph_compile(fresh_inductor):
    arguments = (*inputs(2, 300, 3072), EPS)
    expected = gated_layernorm_modulate_reference(*arguments)
    compiled = torch.compile(fused_gated_layernorm_modulate, fullgraph=True)
    assert_same(compiled(*arguments), expected)


@pytest.mark.cuda
def test_cuda_graph_replays_on_new_values():
    tensors = inputs(1, 512, 3072)
    fused_gated_layernorm_modulate(*tensors, EPS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = fused_gated_layernorm_modulate(*tensors, EPS)
    for seed in (5, 6):
        for old, new in zip(tensors, inputs(1, 512, 3072, seed=seed), strict=True):
            old.copy_(new)
        for out in outputs:
            out.fill_(float("nan"))
        graph.replay()
        assert_same(outputs, gated_layernorm_modulate_reference(*tensors, EPS))


@pytest.mark.cuda
def test_two_streams_at_once():
    cases = [inputs(1, 4096, 3072, seed=seed) for seed in (1, 2)]
    expected = [gated_layernorm_modulate_reference(*case, EPS) for case in cases]
    torch.cuda.synchronize()
    queues, results = [torch.cuda.Stream() for _ in cases], [None, None]
    for _ in range(5):
        for number, (queue, case) in enumerate(zip(queues, cases, strict=True)):
            with torch.cuda.stream(queue):
                results[number] = fused_gated_layernorm_modulate(*case, EPS)
    torch.cuda.synchronize()
    for actual, wanted in zip(results, expected, strict=True):
        assert_same(actual, wanted)
