import pytest
import torch
import torch.nn.functional as F
from elementwise_checks import (
    HALF_DTYPES,
    ROWS,
    OnGpu,
    assert_same_bits,
    check_replays,
    check_two_streams,
    every_value,
    on_gpu,
    poison,
    random_bits,
)

from sglang.kernels.ops.diffusion.bitexact_gate import BitExactFusionGate
from sglang.kernels.ops.diffusion.gelu_mul import (
    can_use_gelu_mul_cuda,
    gelu_mul,
    gelu_mul_cuda,
    gelu_mul_reference,
)
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=15, suite="base-a-test-cpu")
register_cuda_ci(est_time=30, stage="base-b-kernel-unit", runner_config="1-gpu-large")

OP = torch.ops.sglang_diffusion.gelu_mul.default


def inputs(*shape, dtype=torch.bfloat16, device="cuda", seed=0):
    """up and gate, both contiguous."""
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.randn(2, *shape, generator=generator, device=device, dtype=dtype).unbind()


def packed_halves(batch, rows, width, dtype=torch.bfloat16, device="cuda", seed=0):
    """up and gate as the column halves of one projection."""
    projection = inputs(batch, rows, 2 * width, dtype=dtype, device=device, seed=seed)[0]
    gate, up = projection.chunk(2, dim=-1)
    return up, gate


def check_equal(up, gate):
    """The kernel itself (it raises where it cannot run) gives eager's bits, in poisoned memory."""
    expected = gelu_mul_reference(up, gate)
    poison(*expected.shape, dtype=expected.dtype)
    actual = gelu_mul_cuda(up, gate)
    assert actual.is_contiguous()
    assert_same_bits(actual, expected)


def check_rejected(up, gate):
    assert not can_use_gelu_mul_cuda(up, gate)
    with pytest.raises(ValueError, match="gelu_mul_cuda got up "):
        gelu_mul_cuda(up, gate)
    assert torch.equal(gelu_mul(up, gate), gelu_mul_reference(up, gate))


# --- without a GPU ---


@pytest.mark.parametrize("dtype", (*HALF_DTYPES, torch.float32))
def test_cpu_tensors_run_eager(dtype):
    check_rejected(*inputs(2, 5, 64, dtype=dtype, device="cpu"))
    check_rejected(*packed_halves(2, 5, 64, dtype=dtype, device="cpu"))


def test_reference_is_the_erf_gelu():
    up, gate = inputs(2, 5, 64, dtype=torch.float64, device="cpu")
    expected = up * 0.5 * gate * (1 + torch.erf(gate * 0.5**0.5))
    torch.testing.assert_close(gelu_mul_reference(up, gate), expected, rtol=1e-12, atol=1e-15)


def test_reference_rounds_twice():
    # gelu(1) = 0.84134 is 0.83984 in bfloat16; 1.25 times that rounds to 1.046875, not to 1.0546875
    up, gate = (torch.full((1, 1, 1), value, dtype=torch.bfloat16) for value in (1.25, 1.0))
    once = (up.float() * F.gelu(gate.float())).bfloat16()
    assert gelu_mul_reference(up, gate).item() == 1.046875 and once.item() == 1.0546875


def test_predicate_boundary_of_the_width():
    for width in (0, 4, 8, 12, 65, 3070, 3072, 12288):
        x = on_gpu(2, 3, width)
        assert can_use_gelu_mul_cuda(x, x) == (width > 0 and width % 8 == 0), width


def test_predicate_boundary_of_the_size():
    limit = (2**32 - 2**16) * 8 // 64
    for rows, expected in ((limit, True), (limit + 1, False), (0, False)):
        x = on_gpu(1, rows, 64)
        assert can_use_gelu_mul_cuda(x, x) == expected, rows


def test_predicate_rejects_other_dtypes_and_shapes():
    for dtype in (torch.float32, torch.float64, torch.int16):
        x = on_gpu(1, 4, 64, dtype=dtype)
        assert not can_use_gelu_mul_cuda(x, x)
    x = on_gpu(2, 4, 64)
    for bad in (on_gpu(4, 64), on_gpu(2, 5, 64), on_gpu(1, 4, 64), on_gpu(1, 2, 4, 64)):
        assert not can_use_gelu_mul_cuda(x, bad)
        assert not can_use_gelu_mul_cuda(bad, x)
    assert not can_use_gelu_mul_cuda(on_gpu(4, 64), on_gpu(4, 64))


@pytest.mark.parametrize("position", range(2))
@pytest.mark.parametrize(
    "fault", [dict(address=8), dict(device=1), dict(dtype=torch.float16)], ids=lambda f: str(f)
)
def test_predicate_rejects_one_odd_tensor(position, fault):
    tensors = [on_gpu(1, 4, 64), on_gpu(1, 4, 64)]
    assert can_use_gelu_mul_cuda(*tensors)
    tensors[position] = on_gpu(1, 4, 64, **fault)
    assert not can_use_gelu_mul_cuda(*tensors)


def test_predicate_on_strides():
    packed = torch.empty(2, 4, 128, dtype=torch.bfloat16, device="meta")
    x = on_gpu(2, 4, 64)
    for view, expected in (
        (packed[..., :64], True),
        (packed[..., 64:], True),
        (packed[..., 4:68], False),  # 8 bytes off
        (packed[..., ::2], False),
        (packed[:1, :, :64].expand(2, 4, 64), False),
        (packed[..., :64].transpose(0, 1).contiguous().transpose(0, 1), False),
        (torch.empty(2, 4, 68, dtype=torch.bfloat16, device="meta")[..., :64], False),
    ):
        assert can_use_gelu_mul_cuda(OnGpu(view), x) == expected, view.stride()
        assert can_use_gelu_mul_cuda(x, OnGpu(view)) == expected, view.stride()


@pytest.mark.parametrize("shapes", [((5, 64), (5, 64)), ((2, 5, 64), (2, 1, 64)),
                                    ((2, 5, 64), (5, 64)), ((1, 2, 5, 64),) * 2])  # fmt: skip
def test_malformed_shapes_are_an_error(shapes):
    up, gate = (torch.zeros(shape) for shape in shapes)
    for function in (gelu_mul, gelu_mul_cuda):
        with pytest.raises(ValueError, match="got up float32.*expected"):
            function(up, gate)


def test_gradients_are_eager():
    tensors = inputs(2, 5, 64, dtype=torch.float32, device="cpu")
    ours, eager = ([t.clone().requires_grad_() for t in tensors] for _ in range(2))
    gelu_mul(*ours).square().sum().backward()
    gelu_mul_reference(*eager).square().sum().backward()
    for a, b in zip(ours, eager, strict=True):
        assert torch.equal(a.grad, b.grad)


def test_opcheck_on_cpu():
    torch.library.opcheck(OP, inputs(2, 5, 64, device="cpu"))
    torch.library.opcheck(OP, packed_halves(2, 5, 64, device="cpu"))


@pytest.mark.parametrize("function", [gelu_mul, gelu_mul_cuda])
def test_fullgraph_compile_without_a_gpu(function, fresh_inductor):
    compiled = torch.compile(lambda *t: function(*t) * 2, fullgraph=True, backend="aot_eager")
    tensors = inputs(2, 5, 64, device="cpu")
    assert torch.equal(compiled(*tensors), gelu_mul_reference(*tensors) * 2)


# --- on a GPU ---


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_equals_eager_on_every_value_of_the_gate(dtype):
    values = every_value(dtype)
    check_equal(torch.ones_like(values), values)
    check_equal(torch.full_like(values, -3.0), values)
    check_equal(values, values)
    check_equal(random_bits(*values.shape, dtype=dtype), values)
    check_equal(values, values.flip(2).contiguous())


@pytest.mark.cuda
@pytest.mark.parametrize("width", (8, 64, 2240, 3072, 8192, 12288))
@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_equals_eager(dtype, width):
    for batch in (1, 2, 3):
        for rows in ROWS[:4]:
            check_equal(*inputs(batch, rows, width, dtype=dtype))
            check_equal(*packed_halves(batch, rows, width, dtype=dtype))


@pytest.mark.cuda
@pytest.mark.parametrize("shape", ((1, 4216, 12288), (2, 4216, 12288), (1, 1144, 12288)))
def test_equals_eager_at_ernie_sizes(shape):
    check_equal(*inputs(*shape))
    check_equal(*packed_halves(*shape))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_equals_eager_with_other_rows(dtype):
    packed = random_bits(2, 300, 4 * 512, dtype=dtype)
    up, gate, third, fourth = packed.chunk(4, dim=-1)
    check_equal(up, fourth)
    check_equal(gate.contiguous(), third)
    check_equal(up[:1, 17:], gate[1:, 17:])
    check_equal(up[:, :1], gate[:, :1])
    check_equal(up[:1, ::3], gate[:1, ::3])
    check_equal(up[:1, :1].expand(1, 300, 512), gate[:1])


@pytest.mark.cuda
def test_rejected_inputs_run_eager():
    up, gate = inputs(3, 17, 64)
    check_rejected(up.float(), gate.float())
    check_rejected(up, gate.transpose(0, 1).contiguous().transpose(0, 1))
    check_rejected(up[..., ::2], gate[..., ::2])
    check_rejected(up[:1].expand(3, 17, 64), gate)
    check_rejected(up[..., :60], gate[..., :60])
    check_rejected(*inputs(1, 17, 65))
    check_rejected(*inputs(0, 17, 64))


@pytest.mark.cuda
@pytest.mark.parametrize("position", range(2))
def test_an_offset_of_one_element_is_rejected(position):
    tensors = list(inputs(2, 4, 64))
    tensors[position] = torch.randn(2 * 4 * 64 + 1, device="cuda").bfloat16()[1:].view(2, 4, 64)
    check_rejected(*tensors)


@pytest.mark.cuda
def test_offsets_past_two_to_the_31_elements():
    rows = 2**31 // 8192 + 5
    packed = torch.randn(1, rows, 8192, device="cuda", dtype=torch.bfloat16)
    up, gate = packed[..., :64], packed[..., -64:]
    assert_same_bits(gelu_mul_cuda(up, gate), gelu_mul_reference(up, gate))
    out = gelu_mul_cuda(packed, packed)
    for part in (slice(0, 64), slice(rows - 64, rows)):
        piece = packed[:, part]
        assert_same_bits(out[:, part], gelu_mul_reference(piece, piece))


@pytest.mark.cuda
def test_opcheck_on_cuda():
    torch.library.opcheck(OP, packed_halves(2, 17, 64))


@pytest.mark.cuda
@pytest.mark.parametrize("function", [gelu_mul, gelu_mul_cuda])
def test_fullgraph_compile(function, fresh_inductor):
    tensors = packed_halves(1, 512, 3072)
    compiled = torch.compile(lambda *t: function(*t) * 2, fullgraph=True)
    assert_same_bits(compiled(*tensors), gelu_mul_reference(*tensors) * 2)


@pytest.mark.cuda
def test_graph_capture_and_replay():
    cases = [inputs(1, 512, 3072, seed=seed) for seed in range(3)]
    check_replays(gelu_mul_cuda, gelu_mul_reference, cases)


@pytest.mark.cuda
def test_two_streams():
    cases = [inputs(1, 4096, 12288, seed=seed) for seed in range(2)]
    check_two_streams(gelu_mul_cuda, gelu_mul_reference, cases)


@pytest.mark.cuda
def test_a_mismatch_turns_the_gate_off():
    up, gate = inputs(1, 17, 64)
    site = BitExactFusionGate("test.gelu_mul")
    tanh = up * F.gelu(gate, approximate="tanh")
    assert_same_bits(site.run(lambda: gelu_mul_cuda(up, gate), lambda: tanh), tanh)
    assert site.disabled and "differs" in site.state().reason
