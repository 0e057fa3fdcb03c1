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
from sglang.kernels.ops.diffusion import gated_linear_gelu_bitexact as op_module
from sglang.kernels.ops.diffusion.bitexact_gate import tensors_equal
from sglang.kernels.ops.diffusion.gated_linear_gelu_bitexact import (
    can_use_gated_linear_gelu_bitexact,
    gated_linear_gelu_bitexact,
    gated_linear_gelu_bitexact_cuda,
    gated_linear_gelu_bitexact_reference,
)
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=15, suite="base-a-test-cpu")
register_cuda_ci(est_time=60, stage="base-b-kernel-unit", runner_config="1-gpu-large")

OP = torch.ops.sglang_diffusion.gated_linear_gelu_bitexact.default
BF16, FP16 = torch.bfloat16, torch.float16
ERNIE = (1, 4216, 4096, 12288)
# (batch, rows, K, F): rows that end inside a tile, and K of 16 to 23 blocks for 8 or 6 pieces
RAGGED = [
    (1, 1024, 1024, 6144), (1, 1100, 17 * 64, 8448), (1, 1100, 17 * 64, 6336),
    (2, 1153, 1024, 6144), (3, 1001, 23 * 64, 6144), (1, 1269, 19 * 64, 1664),
    (1, 1269, 1024, 1248),
]  # fmt: skip


@pytest.fixture
def h200(monkeypatch):
    show_h200(monkeypatch, op_module)


def inputs(batch, rows, depth, width, dtype=BF16, device="cuda", seed=0):
    """x, gate and up."""
    options = {"dtype": dtype, "device": device}
    x = normal(batch, rows, depth, seed=seed, **options)
    return x, *(weights(width, depth, seed=seed + i, **options) for i in (1, 2))


def check(tensors, expected):
    """The kernel itself (it raises where it cannot run) gives these bits, in poisoned memory."""
    poison(*expected.shape, dtype=expected.dtype)
    actual = gated_linear_gelu_bitexact_cuda(*tensors)
    assert actual.is_contiguous()
    assert_same_bits(actual, expected)


def check_equal(*tensors):
    check(tensors, gated_linear_gelu_bitexact_reference(*tensors))


def check_rejected(*tensors):
    assert not can_use_gated_linear_gelu_bitexact(*tensors)
    with pytest.raises(ValueError, match="gated_linear_gelu_bitexact_cuda got x "):
        gated_linear_gelu_bitexact_cuda(*tensors)
    expected = gated_linear_gelu_bitexact_reference(*tensors)
    assert torch.equal(gated_linear_gelu_bitexact(*tensors), expected)


# --- without a GPU ---


@pytest.mark.parametrize("dtype", (*HALF_DTYPES, torch.float32))
def test_cpu_tensors_run_eager(dtype):
    check_rejected(*inputs(2, 5, 64, 96, dtype=dtype, device="cpu"))


def test_reference_gates_with_the_erf_gelu():
    x, gate, up = inputs(2, 5, 64, 96, dtype=torch.float64, device="cpu")
    z = x @ gate.T
    expected = (x @ up.T) * 0.5 * z * (1 + torch.erf(z * 0.5**0.5))
    actual = gated_linear_gelu_bitexact_reference(x, gate, up)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)


def chain(x, gate, up, left_out):
    """The op in float32, rounded to bfloat16 at each place but one."""

    def rounded(values, place):
        return values if place == left_out else values.bfloat16().float()

    gates = rounded(F.gelu(rounded(F.linear(x, gate), "gate")), "gelu")
    return (rounded(F.linear(x, up), "up") * gates).bfloat16()


@pytest.mark.parametrize(
    "place, gate, up, expected, without",
    [
        # 1 + 2^-8 is 1 in bfloat16: its GELU is 0.83984; that of 1 + 2^-8 itself is 0.84375
        ("gate", (1.0, 2.0**-8), (1.0, 0.0), 0.83984375, 0.84375),
        # gelu(1) = 0.84134 is 0.83984; 1.25 times that is 1.046875, not 1.0546875
        ("gelu", (1.0, 0.0), (1.25, 0.0), 1.046875, 1.0546875),
        # 1 + 3 * 2^-10 is 1; 3 times that is 3, not 3.015625
        ("up", (3.0, 0.0), (1.0, 3 * 2.0**-10), 3.0, 3.015625),
    ],
)
def test_reference_rounds_at_each_place(place, gate, up, expected, without):
    x, gate, up = (torch.tensor([values]) for values in ((1.0, 1.0), gate, up))
    halves = (t.bfloat16() for t in (x, gate, up))
    assert gated_linear_gelu_bitexact_reference(*halves).item() == expected
    assert chain(x, gate, up, left_out=None).item() == expected
    assert chain(x, gate, up, left_out=place).item() == without


def shapes(rows=1024, depth=1024, width=6144, lead=(1,), **options):
    """Stand-ins for x, gate and up on a GPU."""
    weight = on_gpu(width, depth, **options)
    return [on_gpu(*lead, rows, depth, **options), weight, weight]


@pytest.mark.parametrize(
    "changed, expected",
    [
        ({}, True), ({"dtype": FP16}, True), ({"dtype": torch.float32}, False),
        ({"depth": 960}, False), ({"depth": 1056}, False), ({"depth": 1088}, True),
        ({"rows": 1023}, False), ({"rows": 1025}, False), ({"rows": 1152}, True),
        ({"width": 1920}, True), ({"width": 1792}, False),  # of the H200's time 91 % and 85 - 0.2 %
        ({"width": 1440}, True), ({"width": 6160}, False), ({"width": 0}, False),
        ({"lead": ()}, True), ({"lead": (2, 2), "rows": 256}, True),
        ({"lead": (2,), "rows": 512}, True), ({"lead": (2,), "rows": 0}, False),
    ],
    ids=str,
)  # fmt: skip
def test_predicate_boundaries(h200, changed, expected):
    assert can_use_gated_linear_gelu_bitexact(*shapes(**changed)) is expected


@pytest.mark.parametrize("shape", (ERNIE, (1, 3001, 4096, 12288), *RAGGED))
def test_predicate_takes_the_shapes_tested_below(h200, shape):
    batch, rows, depth, width = shape
    assert can_use_gated_linear_gelu_bitexact(*shapes(rows, depth, width, (batch,)))


@pytest.mark.parametrize("position", range(3))
@pytest.mark.parametrize("fault", [dict(address=8), dict(device=1), dict(dtype=FP16)], ids=str)
def test_predicate_rejects_one_odd_tensor(h200, position, fault):
    tensors = shapes()
    assert can_use_gated_linear_gelu_bitexact(*tensors)
    tensors[position] = on_gpu(*tensors[position].shape, **fault)
    assert not can_use_gated_linear_gelu_bitexact(*tensors)


@pytest.mark.parametrize(
    "position, shape",
    [(0, (1, 1024, 1088)), (0, (1024,)), (1, (6144, 1088)), (1, (6144,)), (1, (1, 6144, 1024)),
     (1, (6145, 1024)), (2, (6144, 1088)), (2, (3072, 1024)), (2, (1, 6144, 1024)), (2, ())],
)  # fmt: skip
def test_predicate_rejects_shapes_that_do_not_fit(h200, position, shape):
    tensors = shapes()
    tensors[position] = on_gpu(*shape)
    assert not can_use_gated_linear_gelu_bitexact(*tensors)


@pytest.mark.parametrize("position", range(3))
def test_predicate_wants_contiguous_operands(h200, position):
    tensors = shapes()
    shape = tensors[position].shape
    doubled = torch.empty(*shape[:-1], 2 * shape[-1], dtype=BF16, device="meta")
    tensors[position] = OnGpu(doubled[..., ::2])
    assert not can_use_gated_linear_gelu_bitexact(*tensors)


def test_predicate_takes_the_halves_of_one_matrix(h200):
    x, *_ = shapes()
    gate, up = torch.empty(2 * 6144, 1024, dtype=BF16, device="meta").chunk(2)
    assert can_use_gated_linear_gelu_bitexact(x, OnGpu(gate), OnGpu(up))


def test_predicate_on_another_gpu(h200, monkeypatch):
    assert not can_use_gated_linear_gelu_bitexact(*shapes(device=1))
    monkeypatch.setattr(op_module, "is_hopper", lambda device: False)
    assert not can_use_gated_linear_gelu_bitexact(*shapes())


@pytest.mark.parametrize("function", [gated_linear_gelu_bitexact, gated_linear_gelu_bitexact_cuda])
@pytest.mark.parametrize(
    "given",
    [((2, 5, 63), (8, 64), (8, 64)), ((2, 5, 64), (8, 64), (7, 64)), ((2, 5, 64), (64,), (64,)),
     ((2, 5, 64), (8, 64), (1, 8, 64)), ((), (8, 64), (8, 64))],
    ids=str,
)  # fmt: skip
def test_malformed_shapes_are_an_error(function, given):
    with pytest.raises(ValueError, match=r"got x float32.*expected"):
        function(*(torch.zeros(shape) for shape in given))


def test_gradients_are_eager():
    tensors = inputs(2, 5, 64, 96, dtype=torch.float32, device="cpu")
    ours, eager = ([t.clone().requires_grad_() for t in tensors] for _ in range(2))
    gated_linear_gelu_bitexact(*ours).square().sum().backward()
    gated_linear_gelu_bitexact_reference(*eager).square().sum().backward()
    for a, b in zip(ours, eager, strict=True):
        assert torch.equal(a.grad, b.grad)


def test_opcheck_on_cpu():
    torch.library.opcheck(OP, inputs(2, 5, 64, 96, device="cpu"))


@pytest.mark.parametrize("function", [gated_linear_gelu_bitexact, gated_linear_gelu_bitexact_cuda])
def test_fullgraph_compile_without_a_gpu(function, fresh_inductor):
    compiled = torch.compile(lambda *t: function(*t) * 2, fullgraph=True, backend="aot_eager")
    tensors = inputs(2, 5, 64, 96, device="cpu")
    assert torch.equal(compiled(*tensors), gated_linear_gelu_bitexact_reference(*tensors) * 2)


# --- on a GPU ---


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_equals_eager_at_ernie_images_shape(dtype):
    x, gate, up = inputs(*ERNIE, dtype=dtype)
    check_equal(x, gate, up)
    check_equal(x, gate, gate)
    check_equal(x, *torch.cat([up, gate]).chunk(2))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_a_rows_bits_do_not_depend_on_the_other_rows(dtype):
    x, gate, up = inputs(*ERNIE, dtype=dtype)
    expected = gated_linear_gelu_bitexact_reference(x, gate, up)[0]
    for batch, rows in ((1, 1024), (1, 1152), (2, 1153), (3, 1000), (1, 3001), (4, 1024)):
        taken, lead = slice(1, 1 + batch * rows), (batch, rows, -1)  # from the second row on
        check((x[0, taken].view(lead), gate, up), expected[taken].view(lead))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("depth", (1024, 17 * 64, 23 * 64))
def test_zeros_behind_the_last_product_change_no_bit(depth, dtype):
    tensors = inputs(1, 4216, depth, 12288, dtype=dtype)
    longer = [F.pad(t, (0, 4096 - depth)) for t in tensors]
    check(tensors, gated_linear_gelu_bitexact_reference(*longer))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("shape", RAGGED)
def test_sums_that_are_exact(shape, dtype):
    batch, rows, depth, width = shape
    x = integers(batch, rows, depth, dtype=dtype, unit=2**-6, seed=0)
    gate, up = (integers(width, depth, dtype=dtype, unit=1, seed=seed) for seed in (1, 2))
    check((x, gate, up), exact_linear(x, up) * F.gelu(exact_linear(x, gate)))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_every_value_of_the_gate_and_of_the_projection(dtype):
    x, values = one_hot_rows(dtype), every_value_as_weight(6144, dtype)
    normals = weights(6144, 1024, dtype=dtype, seed=3)
    for gate, up in ((values, normals), (normals, values), (values, values)):
        expected = gated_linear_gelu_bitexact_reference(x, gate, up)
        assert tensors_equal(gated_linear_gelu_bitexact_cuda(x, gate, up), expected)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_sums_and_products_beyond_float16(dtype):
    x, gate, up = inputs(*ERNIE, dtype=dtype)
    for x_scale, scale in ((4000, 10), (400, 1)):  # sums overflow; or their products alone
        tensors = x * x_scale, gate * scale, up * scale
        expected = gated_linear_gelu_bitexact_reference(*tensors)
        assert bool(expected.isinf().any()) is (dtype is FP16)
        assert tensors_equal(gated_linear_gelu_bitexact_cuda(*tensors), expected)


@pytest.mark.cuda
def test_a_nan_stays_in_its_row_and_its_column():
    x, gate, up = inputs(1, 1024, 1024, 1920)
    whole = gated_linear_gelu_bitexact_cuda(x, gate, up)
    x[0, 700, 3] = float("nan")
    up[900, 1000] = gate[10, 5] = float("nan")
    out = gated_linear_gelu_bitexact_cuda(x, gate, up)[0]
    assert out[700].isnan().all() and out[:, [10, 900]].isnan().all()
    rows, columns = torch.ones(1024, dtype=torch.bool), torch.ones(1920, dtype=torch.bool)
    rows[700] = columns[10] = columns[900] = False
    assert_same_bits(out[rows][:, columns], whole[0][rows][:, columns])


@pytest.mark.cuda
def test_repeats_give_the_same_bits():
    tensors = inputs(*ERNIE)
    first = gated_linear_gelu_bitexact_cuda(*tensors)
    for _ in range(20):
        check(tensors, first)


@pytest.mark.cuda
def test_rejected_inputs_run_eager():
    x, gate, up = inputs(2, 512, 1024, 1920)
    assert can_use_gated_linear_gelu_bitexact(x, gate, up)
    check_rejected(x.float(), gate.float(), up.float())
    check_rejected(x[:, :511], gate, up)
    check_rejected(x.transpose(0, 1).contiguous().transpose(0, 1), gate, up)
    check_rejected(x, gate[:1919], up[:1919])
    check_rejected(x[:0], gate, up)
    check_rejected(x, gate[:0], up[:0])


@pytest.mark.cuda
def test_without_its_kernel_it_runs_eager(monkeypatch):
    tensors = inputs(1, 1024, 1024, 1920)
    monkeypatch.setattr(CudaKernel, "ready", lambda kernel, device: False)
    expected = gated_linear_gelu_bitexact_reference(*tensors)
    assert_same_bits(gated_linear_gelu_bitexact(*tensors), expected)
    with pytest.raises(JitUnavailable):
        gated_linear_gelu_bitexact_cuda(*tensors)


@pytest.mark.cuda
def test_opcheck_on_cuda():
    torch.library.opcheck(OP, inputs(1, 1024, 1024, 1920))


@pytest.mark.cuda
@pytest.mark.parametrize("function", [gated_linear_gelu_bitexact, gated_linear_gelu_bitexact_cuda])
def test_fullgraph_compile(function, fresh_inductor):
    tensors = inputs(*ERNIE)
    compiled = torch.compile(lambda *t: function(*t) * 2, fullgraph=True)
    assert_same_bits(compiled(*tensors), gated_linear_gelu_bitexact_reference(*tensors) * 2)


@pytest.mark.cuda
def test_graph_capture_and_replay():
    cases = [inputs(*ERNIE, seed=seed) for seed in range(3)]
    check_replays(gated_linear_gelu_bitexact_cuda, gated_linear_gelu_bitexact_reference, cases)


@pytest.mark.cuda
def test_two_streams():
    cases = [inputs(*ERNIE, seed=seed) for seed in range(2)]
    check_two_streams(gated_linear_gelu_bitexact_cuda, gated_linear_gelu_bitexact_reference, cases)
