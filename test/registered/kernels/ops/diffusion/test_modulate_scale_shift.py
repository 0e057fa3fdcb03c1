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

from sglang.kernels.ops.diffusion.modulate_scale_shift import (
    can_use_modulate_scale_shift_cuda,
    modulate_scale_shift,
    modulate_scale_shift_cuda,
    modulate_scale_shift_reference,
)
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=15, suite="base-a-test-cpu")
register_cuda_ci(est_time=30, stage="base-b-kernel-unit", runner_config="1-gpu-large")

OP = torch.ops.sglang_diffusion.modulate_scale_shift.default


def inputs(batch, rows, width, dtype=torch.bfloat16, device="cuda", seed=0):
    generator = torch.Generator(device=device).manual_seed(seed)
    return tuple(
        torch.randn(size, generator=generator, device=device, dtype=dtype)
        for size in ((batch, rows, width), (batch, width), (batch, width))
    )


def check_equal(x, scale, shift):
    """The kernel itself (it raises where it cannot run) gives eager's bits, in poisoned memory."""
    expected = modulate_scale_shift_reference(x, scale, shift)
    poison(*x.shape, dtype=x.dtype)
    actual = modulate_scale_shift_cuda(x, scale, shift)
    assert actual.is_contiguous()
    assert_same_bits(actual, expected)


def check_rejected(x, scale, shift):
    assert not can_use_modulate_scale_shift_cuda(x, scale, shift)
    with pytest.raises(ValueError, match="modulate_scale_shift_cuda got x "):
        modulate_scale_shift_cuda(x, scale, shift)
    expected = modulate_scale_shift_reference(x, scale, shift)
    assert torch.equal(modulate_scale_shift(x, scale, shift), expected)


# --- without a GPU ---


@pytest.mark.parametrize("dtype", (*HALF_DTYPES, torch.float32))
def test_cpu_tensors_run_eager(dtype):
    check_rejected(*inputs(2, 5, 64, dtype=dtype, device="cpu"))


def test_reference_rounds_three_times():
    # in bfloat16 1 + 2^-8 rounds to 1, and 3 * 1 + 2^-8 back to 3; one rounding would give 3.015625
    scale = shift = torch.full((1, 8), 2.0**-8, dtype=torch.bfloat16)
    x = torch.full((1, 1, 8), 3.0, dtype=torch.bfloat16)
    assert modulate_scale_shift_reference(x, scale, shift).tolist() == [[[3.0] * 8]]


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_predicate_boundary_of_the_width(dtype):
    for width in (7, 8, 12, 16, 3070, 3072):
        x, row = on_gpu(2, 3, width, dtype=dtype), on_gpu(2, width, dtype=dtype)
        assert can_use_modulate_scale_shift_cuda(x, row, row) == (width % 8 == 0), width


def test_predicate_boundary_of_the_size():
    limit = (2**32 - 2**16) * 8 // 64
    cases = [(1, limit, True), (1, limit + 1, False), (65535, 1, True), (65536, 1, False)]
    for batch, rows, expected in [*cases, (0, 4, False), (1, 0, False)]:
        x, row = on_gpu(batch, rows, 64), on_gpu(batch, 64)
        assert can_use_modulate_scale_shift_cuda(x, row, row) == expected, (batch, rows)


def test_predicate_rejects_other_dtypes_and_shapes():
    for dtype in (torch.float32, torch.float64, torch.int16):
        x, row = on_gpu(1, 4, 64, dtype=dtype), on_gpu(1, 64, dtype=dtype)
        assert not can_use_modulate_scale_shift_cuda(x, row, row)
    x, row = on_gpu(2, 4, 64), on_gpu(2, 64)
    for bad in (on_gpu(1, 64), on_gpu(64), on_gpu(2, 1, 64), on_gpu(2, 128)):
        assert not can_use_modulate_scale_shift_cuda(x, bad, row)
        assert not can_use_modulate_scale_shift_cuda(x, row, bad)
    assert not can_use_modulate_scale_shift_cuda(on_gpu(4, 64), row, row)


@pytest.mark.parametrize("position", range(3))
@pytest.mark.parametrize(
    "fault", [dict(address=8), dict(device=1), dict(dtype=torch.float16)], ids=lambda f: str(f)
)
def test_predicate_rejects_one_odd_tensor(position, fault):
    tensors = [on_gpu(1, 4, 64), on_gpu(1, 64), on_gpu(1, 64)]
    assert can_use_modulate_scale_shift_cuda(*tensors)
    tensors[position] = on_gpu(*tensors[position].shape, **fault)
    assert not can_use_modulate_scale_shift_cuda(*tensors)


def test_predicate_on_chunk_views():
    one, two = (torch.empty(b, 6 * 64, dtype=torch.bfloat16, device="meta") for b in (1, 2))
    for chunk in one.chunk(6, dim=1):
        assert can_use_modulate_scale_shift_cuda(on_gpu(1, 4, 64), OnGpu(chunk), OnGpu(chunk))
    for chunk in two.chunk(6, dim=1):
        assert not can_use_modulate_scale_shift_cuda(on_gpu(2, 4, 64), OnGpu(chunk), on_gpu(2, 64))
    strided = OnGpu(one[:, 0:128:2])
    assert not can_use_modulate_scale_shift_cuda(on_gpu(1, 4, 64), strided, on_gpu(1, 64))
    expanded = OnGpu(one[:, :64].expand(2, 64))
    assert not can_use_modulate_scale_shift_cuda(on_gpu(2, 4, 64), expanded, on_gpu(2, 64))


MALFORMED = {
    "rows [B, 1, D]": ((2, 5, 64), (2, 1, 64)),
    "rows [D]": ((2, 5, 64), (64,)),
    "rows of another batch": ((3, 5, 64), (2, 64)),
    "a row a token": ((2, 5, 64), (5, 64)),
    "rows of width 1": ((2, 5, 64), (2, 1)),
    "x [S, D]": ((5, 64), (1, 64)),
    "x [B, H, S, D]": ((2, 2, 5, 64), (2, 64)),
}


@pytest.mark.parametrize("function", [modulate_scale_shift, modulate_scale_shift_cuda])
@pytest.mark.parametrize("x_shape, row_shape", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_shapes_are_an_error(function, x_shape, row_shape):
    good = torch.zeros(x_shape[0], x_shape[-1])
    for rows in ((torch.zeros(row_shape), good), (good, torch.zeros(row_shape))):
        with pytest.raises(ValueError, match=r"got x float32.*expected"):
            function(torch.zeros(x_shape), *rows)


def test_one_row_for_several_samples_is_eager():
    x, scale, shift = inputs(2, 5, 64, dtype=torch.float32, device="cpu")
    expected = modulate_scale_shift_reference(x, scale[:1], shift[:1])
    assert torch.equal(modulate_scale_shift(x, scale[:1], shift[:1]), expected)


def test_gradients_are_eager():
    tensors = inputs(2, 5, 64, dtype=torch.float32, device="cpu")
    ours, eager = ([t.clone().requires_grad_() for t in tensors] for _ in range(2))
    modulate_scale_shift(*ours).square().sum().backward()
    modulate_scale_shift_reference(*eager).square().sum().backward()
    for a, b in zip(ours, eager, strict=True):
        assert torch.equal(a.grad, b.grad)


def test_opcheck_on_cpu():
    torch.library.opcheck(OP, inputs(2, 5, 64, device="cpu"))


@pytest.mark.parametrize("function", [modulate_scale_shift, modulate_scale_shift_cuda])
def test_fullgraph_compile_without_a_gpu(function, fresh_inductor):
    compiled = torch.compile(lambda *t: function(*t) * 2, fullgraph=True, backend="aot_eager")
    tensors = inputs(2, 5, 64, device="cpu")
    assert torch.equal(compiled(*tensors), modulate_scale_shift_reference(*tensors) * 2)


# --- on a GPU ---


@pytest.mark.cuda
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_equals_eager(dtype, width):
    for batch in (1, 2, 3):
        for rows in ROWS:
            check_equal(*inputs(batch, rows, width, dtype=dtype))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("rows", (512, 4096, 4608))
def test_equals_eager_at_flux_sizes(rows, dtype):
    check_equal(*inputs(1, rows, 3072, dtype=dtype))


@pytest.mark.cuda
@pytest.mark.parametrize("chunks", (3, 6, 12))
@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_equals_eager_with_chunk_views_of_a_row(dtype, chunks):
    x, projection, _ = inputs(1, 300, 2560, dtype=dtype)[0], *inputs(1, 1, chunks * 2560)[1:]
    rows = projection.to(dtype).chunk(chunks, dim=1)
    for scale, shift in zip(rows, rows[1:] + rows[:1], strict=True):
        check_equal(x, scale, shift)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_equals_eager_on_every_kind_of_value(dtype):
    x = random_bits(2, 1024, 4096, dtype=dtype, seed=1)
    check_equal(x, *(random_bits(2, 4096, dtype=dtype, seed=seed) for seed in (2, 3)))
    small = torch.linspace(-1e-7, 1e-7, 4096, device="cuda").to(dtype).expand(2, 4096).contiguous()
    check_equal(small[:, None].expand(2, 8, 4096).contiguous(), small - 1, small)


@pytest.mark.cuda
def test_rejected_inputs_run_eager():
    x, scale, shift = inputs(3, 17, 64)
    check_rejected(x, scale.float(), shift)
    check_rejected(x.float(), scale.float(), shift.float())
    check_rejected(x.transpose(1, 2), *inputs(3, 1, 17)[1:])
    check_rejected(x[:1].expand(3, 17, 64), scale, shift)
    check_rejected(x[..., :32], scale[:, :32], shift[:, :32])
    check_rejected(x, scale[:1].expand(3, 64), shift)
    chunks = inputs(3, 1, 6 * 64)[1].chunk(6, dim=1)
    check_rejected(x, chunks[0], chunks[1])
    for width in (65, 3070):
        check_rejected(*inputs(1, 17, width))
    check_rejected(*inputs(0, 17, 64))


@pytest.mark.cuda
@pytest.mark.parametrize("position", range(3))
def test_an_offset_of_one_element_is_rejected(position):
    tensors = list(inputs(2, 4, 64))
    shape = tensors[position].shape
    tensors[position] = torch.randn(shape.numel() + 1, device="cuda").bfloat16()[1:].view(shape)
    check_rejected(*tensors)


@pytest.mark.cuda
@pytest.mark.parametrize("batch", (1, 2))
def test_offsets_past_two_to_the_31_elements(batch):
    rows = 2**31 // 8192 // batch + 5
    x = torch.randn(batch, rows, 8192, device="cuda", dtype=torch.bfloat16)
    check_equal(x, *inputs(batch, 1, 8192)[1:])


@pytest.mark.cuda
def test_opcheck_on_cuda():
    torch.library.opcheck(OP, inputs(2, 17, 64))


@pytest.mark.cuda
@pytest.mark.parametrize("function", [modulate_scale_shift, modulate_scale_shift_cuda])
def test_fullgraph_compile(function, fresh_inductor):
    tensors = inputs(1, 512, 3072)
    compiled = torch.compile(lambda *t: function(*t).relu(), fullgraph=True)
    assert_same_bits(compiled(*tensors), modulate_scale_shift_reference(*tensors).relu())


@pytest.mark.cuda
def test_graph_capture_and_replay():
    static = inputs(1, 512, 3072)
    modulate_scale_shift_cuda(*static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = modulate_scale_shift_cuda(*static)
    for seed in (1, 2):
        fresh = inputs(1, 512, 3072, seed=seed)
        for tensor, value in zip(static, fresh, strict=True):
            tensor.copy_(value)
        out.fill_(float("nan"))
        graph.replay()
        assert_same_bits(out, modulate_scale_shift_reference(*fresh))


@pytest.mark.cuda
def test_two_streams():
    streams = [torch.cuda.Stream() for _ in range(2)]
    cases = [inputs(1, 4096, 3072, seed=seed) for seed in range(2)]
    torch.cuda.synchronize()
    outs = []
    for _ in range(8):
        for stream, case in zip(streams, cases, strict=True):
            with torch.cuda.stream(stream):
                outs.append(modulate_scale_shift_cuda(*case))
    torch.cuda.synchronize()
    for i, out in enumerate(outs):
        assert_same_bits(out, modulate_scale_shift_reference(*cases[i % 2]))
