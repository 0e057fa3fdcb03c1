import logging

import pytest
import torch
from elementwise_checks import (
    HALF_DTYPES,
    ROWS,
    WIDTHS,
    OnGpu,
    assert_same_bits,
    on_gpu,
    poison,
    random_bits,
)

from sglang.kernels.jit import JitUnavailable
from sglang.kernels.ops.diffusion import residual_gate_add as module
from sglang.kernels.ops.diffusion.residual_gate_add import (
    can_use_residual_gate_add_cuda,
    residual_gate_add,
    residual_gate_add_cuda,
    residual_gate_add_reference,
)
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=15, suite="base-a-test-cpu")
register_cuda_ci(est_time=30, stage="base-b-kernel-unit", runner_config="1-gpu-large")

OP = torch.ops.sglang_diffusion.residual_gate_add.default
DTYPES = (*HALF_DTYPES, torch.float32)


def inputs(*shape, gate_shape=None, dtype=torch.bfloat16, device="cuda", seed=0):
    generator = torch.Generator(device=device).manual_seed(seed)
    gate_shape = gate_shape or (1,) * (len(shape) - 1) + shape[-1:]
    return tuple(
        torch.randn(size, generator=generator, device=device, dtype=dtype)
        for size in (shape, shape, gate_shape)
    )


def check_equal(residual, update, gate):
    """The kernel itself (it raises where it cannot run) gives eager's bits, in poisoned memory."""
    expected = residual_gate_add_reference(residual, update, gate)
    poison(*residual.shape, dtype=residual.dtype)
    actual = residual_gate_add_cuda(residual, update, gate)
    assert actual.is_contiguous()
    assert_same_bits(actual, expected)


def check_rejected(residual, update, gate):
    assert not can_use_residual_gate_add_cuda(residual, update, gate)
    with pytest.raises(ValueError, match="residual_gate_add_cuda got residual "):
        residual_gate_add_cuda(residual, update, gate)
    expected = residual_gate_add_reference(residual, update, gate)
    assert torch.equal(residual_gate_add(residual, update, gate), expected)


# --- without a GPU ---


@pytest.mark.parametrize("dtype", DTYPES)
def test_cpu_tensors_run_eager(dtype):
    check_rejected(*inputs(2, 5, 64, dtype=dtype, device="cpu"))


def test_predicate_takes_rows_and_full_gates():
    x = on_gpu(2, 5, 64)
    for gate in (on_gpu(64), on_gpu(1, 64), on_gpu(1, 1, 64), on_gpu(2, 5, 64)):
        assert can_use_residual_gate_add_cuda(x, x, gate), gate.shape
    for gate in (on_gpu(2, 1, 64), on_gpu(1, 5, 64), on_gpu(1, 1, 1, 64), on_gpu(1), on_gpu(1, 1)):
        assert not can_use_residual_gate_add_cuda(x, x, gate), gate.shape


@pytest.mark.parametrize("dtype, multiple", [(torch.bfloat16, 8), (torch.float32, 4)])
def test_predicate_boundary_of_the_width(dtype, multiple):
    for width in (multiple, 3 * multiple, multiple + 2, multiple - 1, 2 * multiple + 1):
        x, gate = on_gpu(3, width, dtype=dtype), on_gpu(1, width, dtype=dtype)
        assert can_use_residual_gate_add_cuda(x, x, gate) == (width % multiple == 0), width


def test_predicate_boundary_of_the_size():
    limit = (2**32 - 2**16) * 8
    for rows, expected in ((limit // 64, True), (limit // 64 + 1, False), (0, False)):
        x = on_gpu(rows, 64)
        assert can_use_residual_gate_add_cuda(x, x, on_gpu(1, 64)) == expected, rows


@pytest.mark.parametrize("position", range(3))
@pytest.mark.parametrize(
    "fault", [dict(address=8), dict(device=1), dict(dtype=torch.float16)], ids=lambda f: str(f)
)
def test_predicate_rejects_one_odd_tensor(position, fault):
    tensors = [on_gpu(4, 64), on_gpu(4, 64), on_gpu(1, 64)]
    assert can_use_residual_gate_add_cuda(*tensors)
    tensors[position] = on_gpu(*tensors[position].shape, **fault)
    assert not can_use_residual_gate_add_cuda(*tensors)


def test_predicate_rejects_other_dtypes_and_scalars():
    for dtype in (torch.float64, torch.int32, torch.complex64):
        x = on_gpu(4, 64, dtype=dtype)
        assert not can_use_residual_gate_add_cuda(x, x, x)
    assert not can_use_residual_gate_add_cuda(on_gpu(), on_gpu(), on_gpu())


def test_predicate_on_strides():
    meta = torch.empty(4, 128, dtype=torch.bfloat16, device="meta")
    x, wide = on_gpu(4, 64), OnGpu(meta[:, :64])
    assert not can_use_residual_gate_add_cuda(wide, x, on_gpu(64))
    assert not can_use_residual_gate_add_cuda(x, wide, on_gpu(64))
    assert not can_use_residual_gate_add_cuda(x, x, wide)
    assert can_use_residual_gate_add_cuda(x, x, OnGpu(meta[:1, 64:]))
    assert not can_use_residual_gate_add_cuda(x, x, OnGpu(meta[:1, ::2]))
    assert not can_use_residual_gate_add_cuda(x, x, OnGpu(meta[:1, 4:68]))  # 8 bytes off
    assert not can_use_residual_gate_add_cuda(x, x, OnGpu(meta[:1, :64].expand(4, 64)))


MALFORMED = {
    "update of one row": ((2, 5, 64), (2, 1, 64), (64,)),
    "update of fewer axes": ((2, 5, 64), (5, 64), (64,)),
    "gate of more axes": ((5, 64), (5, 64), (1, 5, 64)),
    "gate that widens": ((1, 5, 64), (1, 5, 64), (2, 1, 64)),
    "gate of another width": ((2, 5, 64), (2, 5, 64), (32,)),
    "gate [B, D]": ((2, 5, 64), (2, 5, 64), (2, 64)),
    "scalars": ((), (), ()),
}


@pytest.mark.parametrize("function", [residual_gate_add, residual_gate_add_cuda])
@pytest.mark.parametrize("shapes", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_shapes_are_an_error(function, shapes):
    with pytest.raises(ValueError, match=r"got residual float32.*expected"):
        function(*(torch.zeros(shape) for shape in shapes))


@pytest.mark.parametrize("gate", [(1,), (5, 1), (2, 1, 64), (2, 5, 1), (1, 1, 1)], ids=str)
def test_gates_that_broadcast_are_eager(gate):
    residual, update, gate = torch.randn(2, 5, 64), torch.randn(2, 5, 64), torch.randn(gate)
    expected = residual_gate_add_reference(residual, update, gate)
    assert torch.equal(residual_gate_add(residual, update, gate), expected)


def test_gradients_are_eager():
    tensors = inputs(2, 5, 64, dtype=torch.float32, device="cpu")
    ours, eager = ([t.clone().requires_grad_() for t in tensors] for _ in range(2))
    residual_gate_add(*ours).square().sum().backward()
    residual_gate_add_reference(*eager).square().sum().backward()
    for a, b in zip(ours, eager, strict=True):
        assert torch.equal(a.grad, b.grad)


def test_opcheck_on_cpu():
    torch.library.opcheck(OP, inputs(2, 5, 64, device="cpu"))
    torch.library.opcheck(OP, inputs(2, 5, 65, gate_shape=(2, 1, 65), device="cpu"))


@pytest.mark.parametrize("function", [residual_gate_add, residual_gate_add_cuda])
def test_fullgraph_compile_without_a_gpu(function, fresh_inductor):
    compiled = torch.compile(lambda *t: function(*t) * 2, fullgraph=True, backend="aot_eager")
    tensors = inputs(2, 5, 64, device="cpu")
    assert torch.equal(compiled(*tensors), residual_gate_add_reference(*tensors) * 2)


# --- on a GPU ---


@pytest.mark.cuda
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_equals_eager(dtype, width):
    for batch in (1, 2, 3):
        for rows in ROWS:
            for gate_shape in ((width,), (1, 1, width), (batch, rows, width)):
                check_equal(*inputs(batch, rows, width, gate_shape=gate_shape, dtype=dtype))


@pytest.mark.cuda
@pytest.mark.parametrize("rows", (512, 4096, 4608))
def test_equals_eager_at_flux_sizes(rows):
    check_equal(*inputs(1, rows, 3072))
    check_equal(*inputs(rows, 3072))  # without a batch dimension


@pytest.mark.cuda
@pytest.mark.parametrize("chunks", (3, 6, 12))
@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_equals_eager_with_chunk_views_of_a_row(dtype, chunks):
    residual, update, projection = inputs(2, 300, 2560, gate_shape=(1, chunks * 2560), dtype=dtype)
    for gate in projection.chunk(chunks, dim=1):
        check_equal(residual, update, gate)
        check_equal(residual, update, gate[:, None])


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("full", (False, True), ids=("row", "full"))
def test_equals_eager_on_every_kind_of_value(dtype, full):
    shape = (1, 1024, 4096)
    residual, update = (random_bits(*shape, dtype=dtype, seed=seed) for seed in (1, 2))
    check_equal(residual, update, random_bits(*(shape if full else (1, 1, 4096)), dtype=dtype))
    small = torch.linspace(-1e-7, 1e-7, 4096, device="cuda").to(dtype)  # subnormal products
    check_equal(residual, small.expand(shape).contiguous(), small)


@pytest.mark.cuda
@pytest.mark.parametrize("width", (4, 64, 3072))
def test_float32_is_close(width):
    residual, update, gate = inputs(2, 300, width, dtype=torch.float32)
    actual = residual_gate_add_cuda(residual, update, gate)
    expected = residual_gate_add_reference(residual, update, gate)
    # two ways to round the product and the sum differ by at most one unit in the last place of each
    bound = 2.0**-23 * ((gate * update).abs() + expected.abs())
    assert bool(((actual - expected).abs() <= bound).all())


@pytest.mark.cuda
def test_rejected_inputs_run_eager():
    residual, update, gate = inputs(3, 17, 64)
    check_rejected(residual, update, inputs(3, 1, 64)[0])
    check_rejected(residual, update, gate.expand(3, 17, 64))
    check_rejected(residual, update, gate.float())
    check_rejected(residual.double(), update.double(), gate.double())
    check_rejected(residual.transpose(0, 1), update.transpose(0, 1), gate)
    check_rejected(residual[:1].expand(3, 17, 64), update, gate)
    check_rejected(residual[..., :32], update[..., :32], gate[..., :32])
    for width in (65, 3070):
        check_rejected(*inputs(1, 17, width))
    check_rejected(*inputs(0, 17, 64))


@pytest.mark.cuda
@pytest.mark.parametrize("position", range(3))
def test_an_offset_of_one_element_is_rejected(position):
    tensors = list(inputs(4, 64))
    shape = tensors[position].shape
    tensors[position] = torch.randn(shape.numel() + 1, device="cuda").bfloat16()[1:].view(shape)
    check_rejected(*tensors)


@pytest.mark.cuda
def test_offsets_past_two_to_the_31_elements():
    rows = 2**31 // 8192 + 5
    residual = torch.randn(rows, 8192, device="cuda", dtype=torch.bfloat16)
    gate = torch.randn(1, 8192, device="cuda", dtype=torch.bfloat16)
    check_equal(residual, residual, gate)
    check_equal(residual, residual, residual)


@pytest.mark.cuda
def test_opcheck_on_cuda():
    torch.library.opcheck(OP, inputs(2, 17, 64))


@pytest.mark.cuda
@pytest.mark.parametrize("function", [residual_gate_add, residual_gate_add_cuda])
def test_fullgraph_compile(function, fresh_inductor):
    tensors = inputs(1, 512, 3072)
    compiled = torch.compile(lambda r, u, g: function(r, u, g).relu(), fullgraph=True)
    assert_same_bits(compiled(*tensors), residual_gate_add_reference(*tensors).relu())


@pytest.mark.cuda
def test_graph_capture_and_replay():
    static = inputs(1, 512, 3072)
    residual_gate_add_cuda(*static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = residual_gate_add_cuda(*static)
    for seed in (1, 2):
        fresh = inputs(1, 512, 3072, seed=seed)
        for tensor, value in zip(static, fresh, strict=True):
            tensor.copy_(value)
        out.fill_(float("nan"))
        graph.replay()
        assert_same_bits(out, residual_gate_add_reference(*fresh))


@pytest.mark.cuda
def test_two_streams():
    streams = [torch.cuda.Stream() for _ in range(2)]
    cases = [inputs(1, 4096, 3072, seed=seed) for seed in range(2)]
    torch.cuda.synchronize()
    outs = []
    for _ in range(8):
        for stream, case in zip(streams, cases, strict=True):
            with torch.cuda.stream(stream):
                outs.append(residual_gate_add_cuda(*case))
    torch.cuda.synchronize()
    for i, out in enumerate(outs):
        assert_same_bits(out, residual_gate_add_reference(*cases[i % 2]))


@pytest.mark.cuda
def test_without_a_kernel_it_is_eager_and_says_so_once(monkeypatch, tmp_path, caplog):
    kernels = module.ResidualGateAddKernels(module.VectorTile())
    for kernel in kernels.all():
        kernel.source = tmp_path / "missing.cuh"
    monkeypatch.setattr(module, "_KERNELS", kernels)
    tensors = inputs(1, 17, 64)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert_same_bits(residual_gate_add(*tensors), residual_gate_add_reference(*tensors))
    assert [record.message.count("correctness is preserved") for record in caplog.records] == [1]
    with pytest.raises(JitUnavailable, match="missing.cuh"):
        residual_gate_add_cuda(*tensors)
