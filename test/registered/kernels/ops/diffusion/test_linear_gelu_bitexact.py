import pytest
import torch
import torch.nn.functional as F
from elementwise_checks import (
    HALF_DTYPES,
    OnGpu,
    assert_same_bits,
    check_replays,
    check_two_streams,
    on_gpu,
    poison,
    random_bits,
)
from gemm_checks import (
    every_value_as_weight,
    exact_linear,
    integers,
    normal,
    one_hot_rows,
    show_h200,
    weights,
)

from sglang.kernels.jit import CudaKernel, JitUnavailable
from sglang.kernels.ops.diffusion import linear_gelu_bitexact as op_module
from sglang.kernels.ops.diffusion.bitexact_gate import tensors_equal
from sglang.kernels.ops.diffusion.linear_gelu_bitexact import (
    can_use_linear_gelu_bitexact,
    linear_gelu_bitexact,
    linear_gelu_bitexact_cuda,
    linear_gelu_bitexact_reference,
)
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=15, suite="base-a-test-cpu")
register_cuda_ci(est_time=60, stage="base-b-kernel-unit", runner_config="1-gpu-large")

OP = torch.ops.sglang_diffusion.linear_gelu_bitexact.default
BF16, FP16 = torch.bfloat16, torch.float16
FLUX_JOINT, FLUX_IMAGE, GLM = (1, 4608, 3072, 12288), (1, 4096, 3072, 12288), (1, 4096, 4096, 16384)
# (batch, rows, K, N): rows that end inside a tile, and K of 16 to 23 blocks for 16 or 12 pieces
RAGGED = [
    (1, 1024, 1024, 12288), (1, 1100, 17 * 64, 16896), (1, 1100, 17 * 64, 12672),
    (2, 1153, 1024, 12288), (3, 1001, 23 * 64, 12288), (1, 1269, 18 * 64, 3328),
    (1, 1269, 1024, 2496),
]  # fmt: skip


@pytest.fixture
def h200(monkeypatch):
    show_h200(monkeypatch, op_module)


def inputs(batch, rows, depth, width, attn_width=0, dtype=BF16, device="cuda", seed=0):
    """x, weight and bias; attn behind them where it has a width."""
    options = {"dtype": dtype, "device": device}
    x, bias = normal(batch, rows, depth, seed=seed, **options), normal(width, seed=-1, **options)
    tensors = (x, weights(width, depth, seed=seed + 1, **options), bias)
    if not attn_width:
        return tensors
    return *tensors, normal(batch, rows, attn_width, seed=seed + 2, **options)


def check(tensors, expected):
    """The kernel itself (it raises where it cannot run) gives these bits, in poisoned memory."""
    poison(*expected.shape, dtype=expected.dtype)
    actual = linear_gelu_bitexact_cuda(*tensors)
    assert actual.is_contiguous()
    assert_same_bits(actual, expected)


def check_equal(*tensors):
    check(tensors, linear_gelu_bitexact_reference(*tensors))


def check_rejected(*tensors):
    assert not can_use_linear_gelu_bitexact(*tensors)
    with pytest.raises(ValueError, match="linear_gelu_bitexact_cuda got x "):
        linear_gelu_bitexact_cuda(*tensors)
    expected = linear_gelu_bitexact_reference(*tensors)
    assert torch.equal(linear_gelu_bitexact(*tensors), expected)


# --- without a GPU ---


@pytest.mark.parametrize("dtype", (*HALF_DTYPES, torch.float32))
@pytest.mark.parametrize("attn_width", (0, 24))
def test_cpu_tensors_run_eager(dtype, attn_width):
    check_rejected(*inputs(2, 5, 64, 96, attn_width, dtype=dtype, device="cpu"))


def test_reference_is_the_tanh_gelu_behind_attn():
    x, weight, bias, attn = inputs(2, 5, 64, 96, 24, dtype=torch.float64, device="cpu")
    z = x @ weight.T + bias
    gelu = 0.5 * z * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (z + 0.044715 * z**3)))
    out = linear_gelu_bitexact_reference(x, weight, bias, attn)
    assert torch.equal(out[..., :24], attn)
    torch.testing.assert_close(out[..., 24:], gelu, rtol=1e-12, atol=1e-14)


def test_reference_rounds_twice():
    # z = 1 + 2^-8 is 1 in bfloat16, of which the GELU is 0.83984; that of z itself is 0.84375
    x, weight = torch.tensor([[1.0, 1.0]]).bfloat16(), torch.tensor([[1.0, 2.0**-8]]).bfloat16()
    bias = torch.zeros(1).bfloat16()
    once = F.gelu(F.linear(x.float(), weight.float()), approximate="tanh").bfloat16()
    assert linear_gelu_bitexact_reference(x, weight, bias).item() == 0.83984375
    assert once.item() == 0.84375


def shapes(rows=1024, depth=1024, width=12288, attn_width=None, lead=(1,), **options):
    """Stand-ins for x, weight, bias and attn on a GPU."""
    x, weight = on_gpu(*lead, rows, depth, **options), on_gpu(width, depth, **options)
    attn = None if attn_width is None else on_gpu(*lead, rows, attn_width, **options)
    return [x, weight, on_gpu(width, **options), attn]


@pytest.mark.parametrize(
    "changed, expected",
    [
        ({}, True), ({"dtype": FP16}, True), ({"dtype": torch.float32}, False),
        ({"depth": 960}, False), ({"depth": 1056}, False), ({"depth": 1088}, True),
        ({"rows": 1023}, False), ({"rows": 1025}, False), ({"rows": 1152}, True),
        ({"width": 3840}, True), ({"width": 3584}, False),  # of the H200's time 91 % and 85 - 0.2 %
        ({"width": 2880}, True), ({"width": 12320}, False), ({"width": 0}, False),
        ({"lead": ()}, True), ({"lead": (2, 2), "rows": 256}, True),
        ({"lead": (2,), "rows": 512}, True), ({"lead": (2,), "rows": 0}, False),
        ({"attn_width": 3072}, True), ({"attn_width": 8}, True), ({"attn_width": 12}, False),
        ({"attn_width": 0}, False), ({"lead": (), "attn_width": 64}, False),
        ({"lead": (1, 1), "attn_width": 64}, False),
    ],
    ids=str,
)  # fmt: skip
def test_predicate_boundaries(h200, changed, expected):
    assert can_use_linear_gelu_bitexact(*shapes(**changed)) is expected


@pytest.mark.parametrize("shape", (FLUX_JOINT, FLUX_IMAGE, GLM, (1, 3001, 3072, 12288), *RAGGED))
def test_predicate_takes_the_shapes_tested_below(h200, shape):
    batch, rows, depth, width = shape
    assert can_use_linear_gelu_bitexact(*shapes(rows, depth, width, 64, (batch,)))


@pytest.mark.parametrize("position", range(4))
@pytest.mark.parametrize("fault", [dict(address=8), dict(device=1), dict(dtype=FP16)], ids=str)
def test_predicate_rejects_one_odd_tensor(h200, position, fault):
    tensors = shapes(attn_width=64)
    assert can_use_linear_gelu_bitexact(*tensors)
    tensors[position] = on_gpu(*tensors[position].shape, **fault)
    assert not can_use_linear_gelu_bitexact(*tensors)


@pytest.mark.parametrize(
    "position, shape",
    [(0, (1, 1024, 1088)), (0, (1024,)), (1, (12288, 1088)), (1, (12288,)), (1, (1, 12288, 1024)),
     (2, (12287,)), (2, (1, 12288)), (2, ()), (3, (1, 1025, 64)), (3, (2, 1024, 64)),
     (3, (1024, 64)), (3, (1, 1, 1024, 64))],
)  # fmt: skip
def test_predicate_rejects_shapes_that_do_not_fit(h200, position, shape):
    tensors = shapes(attn_width=64)
    tensors[position] = on_gpu(*shape)
    assert not can_use_linear_gelu_bitexact(*tensors)


@pytest.mark.parametrize("position", range(3))
def test_predicate_wants_contiguous_operands(h200, position):
    tensors = shapes()
    shape = tensors[position].shape
    doubled = torch.empty(*shape[:-1], 2 * shape[-1], dtype=BF16, device="meta")
    tensors[position] = OnGpu(doubled[..., ::2])
    assert not can_use_linear_gelu_bitexact(*tensors)


def test_predicate_on_the_strides_of_attn(h200):
    x, weight, bias, _ = shapes(rows=512, lead=(2,))
    meta = torch.empty(2, 512, 136, dtype=BF16, device="meta")
    for view, expected in (
        (meta[..., 8:72], True),
        (meta[..., 4:68], False),  # 8 bytes off
        (meta[..., 0:128:2], False),
        (meta[:1, :, :64].expand(2, 512, 64), False),
        (torch.empty(512, 2, 64, dtype=BF16, device="meta").transpose(0, 1), False),
        (torch.empty(2, 512, 68, dtype=BF16, device="meta")[..., :64], False),
        (torch.empty(2, 600, 64, dtype=BF16, device="meta")[:, :512], False),
    ):
        taken = can_use_linear_gelu_bitexact(x, weight, bias, OnGpu(view))
        assert taken is expected, view.stride()


def test_predicate_on_another_gpu(h200, monkeypatch):
    assert not can_use_linear_gelu_bitexact(*shapes(device=1))
    monkeypatch.setattr(op_module, "is_hopper", lambda device: False)
    assert not can_use_linear_gelu_bitexact(*shapes())


@pytest.mark.parametrize("function", [linear_gelu_bitexact, linear_gelu_bitexact_cuda])
@pytest.mark.parametrize(
    "given",
    [((2, 5, 63), (8, 64), (8,)), ((2, 5, 64), (8, 64), (7,)), ((2, 5, 64), (64,), (8,)),
     ((2, 5, 64), (8, 64), (1, 8)), ((), (8, 64), (8,)), ((5, 64), (8, 64), (8,), (5, 8)),
     ((2, 5, 64), (8, 64), (8,), (2, 4, 8)), ((2, 5, 64), (8, 64), (8,), (5, 8))],
    ids=str,
)  # fmt: skip
def test_malformed_shapes_are_an_error(function, given):
    with pytest.raises(ValueError, match=r"got x float32.*expected"):
        function(*(torch.zeros(shape) for shape in given))


@pytest.mark.parametrize("attn_width", (0, 24))
def test_gradients_are_eager(attn_width):
    tensors = inputs(2, 5, 64, 96, attn_width, dtype=torch.float32, device="cpu")
    ours, eager = ([t.clone().requires_grad_() for t in tensors] for _ in range(2))
    linear_gelu_bitexact(*ours).square().sum().backward()
    linear_gelu_bitexact_reference(*eager).square().sum().backward()
    for a, b in zip(ours, eager, strict=True):
        assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("attn_width", (0, 24))
def test_opcheck_on_cpu(attn_width):
    torch.library.opcheck(OP, inputs(2, 5, 64, 96, attn_width, device="cpu"))


@pytest.mark.parametrize("function", [linear_gelu_bitexact, linear_gelu_bitexact_cuda])
def test_fullgraph_compile_without_a_gpu(function, fresh_inductor):
    compiled = torch.compile(lambda *t: function(*t) * 2, fullgraph=True, backend="aot_eager")
    tensors = inputs(2, 5, 64, 96, 24, device="cpu")
    assert torch.equal(compiled(*tensors), linear_gelu_bitexact_reference(*tensors) * 2)


# --- on a GPU ---


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("shape", (FLUX_JOINT, FLUX_IMAGE, GLM))
def test_equals_eager_at_the_models_shapes(shape, dtype):
    check_equal(*inputs(*shape, dtype=dtype))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_equals_eager_behind_attn(dtype):
    *tensors, attn = inputs(*FLUX_JOINT, 3072, dtype=dtype)
    check_equal(*tensors, attn)
    packed = random_bits(1, 4608, 3 * 3072, dtype=dtype)  # NaN payloads are copied as they are
    check_equal(*tensors, packed[..., 3072:6144])
    check_equal(*tensors, packed[:, :1, :3072].expand(1, 4608, 3072))
    check_equal(*tensors, packed[..., 8:16])


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_a_rows_bits_do_not_depend_on_the_other_rows(dtype):
    x, weight, bias, attn = inputs(*FLUX_JOINT, 3072, dtype=dtype)
    expected = linear_gelu_bitexact_reference(x, weight, bias, attn)[0]
    for batch, rows in ((1, 1024), (1, 1152), (2, 1153), (3, 1000), (1, 3001), (4, 1024)):
        taken = slice(1, 1 + batch * rows)  # from the second row on
        lead = (batch, rows, -1)
        check(
            (x[0, taken].view(lead), weight, bias, attn[0, taken].view(lead)),
            expected[taken].view(lead),
        )


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("depth", (1024, 17 * 64, 23 * 64))
def test_zeros_behind_the_last_product_change_no_bit(depth, dtype):
    x, weight, bias = inputs(1, 4096, depth, 12288, dtype=dtype)
    longer = [F.pad(t, (0, 3072 - depth)) for t in (x, weight)]
    check((x, weight, bias), linear_gelu_bitexact_reference(*longer, bias))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("shape", RAGGED)
def test_sums_that_are_exact(shape, dtype):
    batch, rows, depth, width = shape
    x = integers(batch, rows, depth, dtype=dtype, unit=2**-6, seed=0)
    weight = integers(width, depth, dtype=dtype, unit=1, seed=1)
    bias = integers(width, dtype=dtype, unit=2**-12, seed=2)
    gelu = F.gelu(exact_linear(x, weight, bias), approximate="tanh")
    check((x, weight, bias), gelu)
    attn = random_bits(batch, rows, 200, dtype=dtype)[..., 56:192]
    check((x, weight, bias, attn), torch.cat([attn, gelu], dim=2))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_every_value_of_the_gelu(dtype):
    x, weight = one_hot_rows(dtype), every_value_as_weight(12288, dtype)
    bias = torch.zeros_like(weight[:, 0])
    expected = linear_gelu_bitexact_reference(x, weight, bias)
    assert tensors_equal(linear_gelu_bitexact_cuda(x, weight, bias), expected)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_every_value_of_the_bias(dtype):
    x, weight = (torch.zeros(rows, 1024, dtype=dtype, device="cuda") for rows in (1024, 12288))
    for first in range(-(2**15), 2**15, 12288):
        bits = torch.arange(first, first + 12288, device="cuda", dtype=torch.int32)
        bias = bits.to(torch.int16).view(dtype)
        expected = linear_gelu_bitexact_reference(x, weight, bias)
        assert tensors_equal(linear_gelu_bitexact_cuda(x, weight, bias), expected), first


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_sums_beyond_float16(dtype):
    x, weight, bias = inputs(*FLUX_IMAGE, dtype=dtype)
    x, weight = x * 4000, weight * 10
    expected = linear_gelu_bitexact_reference(x, weight, bias)
    assert bool(expected.isinf().any()) is (dtype is FP16)
    assert tensors_equal(linear_gelu_bitexact_cuda(x, weight, bias), expected)


@pytest.mark.cuda
def test_a_nan_stays_in_its_row_and_its_column():
    x, weight, bias = inputs(1, 1024, 1024, 3840)
    whole = linear_gelu_bitexact_cuda(x, weight, bias)
    x[0, 700, 3] = float("nan")
    weight[1900, 1000] = float("inf")
    out = linear_gelu_bitexact_cuda(x, weight, bias)
    assert out[0, 700].isnan().all() and not out[0, :, 1900].isfinite().any()
    rows, columns = torch.arange(1024) != 700, torch.arange(3840) != 1900
    assert_same_bits(out[0][rows][:, columns], whole[0][rows][:, columns])


@pytest.mark.cuda
def test_repeats_give_the_same_bits():
    tensors = inputs(*FLUX_JOINT, 3072)
    first = linear_gelu_bitexact_cuda(*tensors)
    for _ in range(20):
        check(tensors, first)


@pytest.mark.cuda
def test_another_matrix_at_the_same_address():
    memory = torch.empty(4096 * 3072, device="cuda", dtype=torch.int16)
    _, weight, bias = inputs(*FLUX_IMAGE)
    for dtype, seed in ((BF16, 0), (FP16, 1), (BF16, 2)):
        x = memory.view(dtype).view(1, 4096, 3072)
        x.copy_(normal(1, 4096, 3072, dtype=dtype, seed=seed))
        check_equal(x, weight.to(dtype), bias.to(dtype))
    x = integers(6144, 2048, dtype=BF16, unit=2**-6, seed=3)
    memory.view(BF16).copy_(x.flatten())
    weight, bias = integers(12288, 2048, dtype=BF16, unit=1, seed=4), torch.zeros_like(bias)
    expected = F.gelu(exact_linear(x, weight), approximate="tanh")
    check((memory.view(BF16).view(6144, 2048), weight, bias), expected)


@pytest.mark.cuda
def test_rejected_inputs_run_eager():
    x, weight, bias, attn = inputs(2, 512, 1024, 3840, 64)
    assert can_use_linear_gelu_bitexact(x, weight, bias, attn)
    check_rejected(x.float(), weight.float(), bias.float(), attn.float())
    check_rejected(x[:, :511], weight, bias, attn[:, :511])
    check_rejected(x.transpose(0, 1).contiguous().transpose(0, 1), weight, bias)
    check_rejected(x, weight, bias, attn[..., :60])
    check_rejected(x, weight[:3839], bias[:3839])
    check_rejected(x[:0], weight, bias)
    check_rejected(x, weight[:0], bias[:0])


@pytest.mark.cuda
def test_without_its_kernel_it_runs_eager(monkeypatch):
    tensors = inputs(1, 1024, 1024, 3840, 64)
    monkeypatch.setattr(CudaKernel, "ready", lambda kernel, device: False)
    expected = linear_gelu_bitexact_reference(*tensors)
    assert_same_bits(linear_gelu_bitexact(*tensors), expected)
    with pytest.raises(JitUnavailable):
        linear_gelu_bitexact_cuda(*tensors)


@pytest.mark.cuda
@pytest.mark.parametrize("attn_width", (0, 64))
def test_opcheck_on_cuda(attn_width):
    torch.library.opcheck(OP, inputs(1, 1024, 1024, 3840, attn_width))


@pytest.mark.cuda
@pytest.mark.parametrize("function", [linear_gelu_bitexact, linear_gelu_bitexact_cuda])
def test_fullgraph_compile(function, fresh_inductor):
    tensors = inputs(*FLUX_JOINT, 3072)
    compiled = torch.compile(lambda *t: function(*t) * 2, fullgraph=True)
    assert_same_bits(compiled(*tensors), linear_gelu_bitexact_reference(*tensors) * 2)


@pytest.mark.cuda
@pytest.mark.parametrize("attn_width", (0, 3072))
def test_graph_capture_and_replay(attn_width):
    cases = [inputs(*FLUX_JOINT, attn_width, seed=seed) for seed in range(3)]
    check_replays(linear_gelu_bitexact_cuda, linear_gelu_bitexact_reference, cases)


@pytest.mark.cuda
def test_two_streams():
    cases = [inputs(*FLUX_JOINT, 3072), inputs(*FLUX_IMAGE, seed=1)]
    check_two_streams(linear_gelu_bitexact_cuda, linear_gelu_bitexact_reference, cases)
