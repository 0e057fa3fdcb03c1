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

from sglang.kernels.ops.diffusion.gelu_tanh_concat import (
    can_use_gelu_tanh_concat_cuda,
    gelu_tanh_concat,
    gelu_tanh_concat_cuda,
    gelu_tanh_concat_reference,
)
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=15, suite="base-a-test-cpu")
register_cuda_ci(est_time=30, stage="base-b-kernel-unit", runner_config="1-gpu-large")

OP = torch.ops.sglang_diffusion.gelu_tanh_concat.default


def inputs(batch, rows, width, mlp_width, dtype=torch.bfloat16, device="cuda", seed=0):
    generator = torch.Generator(device=device).manual_seed(seed)
    return tuple(
        torch.randn(batch, rows, size, generator=generator, device=device, dtype=dtype)
        for size in (width, mlp_width)
    )


def check_equal(attn, mlp):
    """The kernel itself (it raises where it cannot run) gives eager's bits, in poisoned memory."""
    expected = gelu_tanh_concat_reference(attn, mlp)
    poison(*expected.shape, dtype=expected.dtype)
    actual = gelu_tanh_concat_cuda(attn, mlp)
    assert actual.is_contiguous()
    assert_same_bits(actual, expected)


def check_rejected(attn, mlp):
    assert not can_use_gelu_tanh_concat_cuda(attn, mlp)
    with pytest.raises(ValueError, match="gelu_tanh_concat_cuda got attn "):
        gelu_tanh_concat_cuda(attn, mlp)
    assert torch.equal(gelu_tanh_concat(attn, mlp), gelu_tanh_concat_reference(attn, mlp))


# --- without a GPU ---


@pytest.mark.parametrize("dtype", (*HALF_DTYPES, torch.float32))
def test_cpu_tensors_run_eager(dtype):
    check_rejected(*inputs(2, 5, 64, 128, dtype=dtype, device="cpu"))


def test_reference_is_the_tanh_gelu_behind_a_copy():
    attn, mlp = inputs(2, 5, 64, 128, dtype=torch.float32, device="cpu")
    x = mlp.double()
    gelu = 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))
    out = gelu_tanh_concat_reference(attn, mlp)
    assert torch.equal(out[..., :64], attn)
    torch.testing.assert_close(out[..., 64:].double(), gelu, rtol=1e-5, atol=1e-6)  # float32


def test_predicate_boundary_of_the_widths():
    for width, mlp_width in ((8, 8), (64, 128), (12, 64), (64, 12), (0, 64), (64, 0), (4, 4)):
        expected = width > 0 and mlp_width > 0 and width % 8 == 0 and mlp_width % 8 == 0
        attn, mlp = on_gpu(2, 3, width), on_gpu(2, 3, mlp_width)
        assert can_use_gelu_tanh_concat_cuda(attn, mlp) == expected, (width, mlp_width)


def test_predicate_boundary_of_the_size():
    limit = (2**32 - 2**16) * 8 // 128
    for rows, expected in ((limit, True), (limit + 1, False), (0, False)):
        x = on_gpu(1, rows, 64)
        assert can_use_gelu_tanh_concat_cuda(x, x) == expected, rows


def test_predicate_rejects_other_dtypes_and_shapes():
    for dtype in (torch.float32, torch.float64, torch.int16):
        x = on_gpu(1, 4, 64, dtype=dtype)
        assert not can_use_gelu_tanh_concat_cuda(x, x)
    x = on_gpu(2, 4, 64)
    for bad in (on_gpu(4, 64), on_gpu(2, 5, 64), on_gpu(1, 4, 64), on_gpu(1, 2, 4, 64)):
        assert not can_use_gelu_tanh_concat_cuda(x, bad)
        assert not can_use_gelu_tanh_concat_cuda(bad, x)


@pytest.mark.parametrize("position", range(2))
@pytest.mark.parametrize(
    "fault", [dict(address=8), dict(device=1), dict(dtype=torch.float16)], ids=lambda f: str(f)
)
def test_predicate_rejects_one_odd_tensor(position, fault):
    tensors = [on_gpu(1, 4, 64), on_gpu(1, 4, 128)]
    assert can_use_gelu_tanh_concat_cuda(*tensors)
    tensors[position] = on_gpu(*tensors[position].shape, **fault)
    assert not can_use_gelu_tanh_concat_cuda(*tensors)


def test_predicate_on_strides():
    meta = torch.empty(2, 4, 136, dtype=torch.bfloat16, device="meta")
    x = on_gpu(2, 4, 64)
    for view, expected in (
        (meta[..., 8:72], True),
        (meta[..., 4:68], False),  # 8 bytes off
        (meta[..., 0:128:2], False),
        (meta[:, :2].repeat(1, 2, 1)[..., :64], True),
        (meta[:1, :, :64].expand(2, 4, 64), False),
        (meta[..., :64].transpose(0, 1).contiguous().transpose(0, 1), False),
        (torch.empty(2, 4, 68, dtype=torch.bfloat16, device="meta")[..., :64], False),
    ):
        assert can_use_gelu_tanh_concat_cuda(OnGpu(view), x) == expected, view.stride()
        assert can_use_gelu_tanh_concat_cuda(x, OnGpu(view)) == expected, view.stride()


@pytest.mark.parametrize("function", [gelu_tanh_concat, gelu_tanh_concat_cuda])
@pytest.mark.parametrize(
    "shapes",
    [((5, 64), (5, 128)), ((2, 5, 64), (5, 128)), ((2, 5, 64), (1, 5, 128)),
     ((2, 5, 64), (2, 4, 128)), ((1, 2, 5, 64), (1, 2, 5, 128))],
    ids=str,
)  # fmt: skip
def test_malformed_shapes_are_an_error(function, shapes):
    with pytest.raises(ValueError, match=r"got attn float32.*expected"):
        function(*(torch.zeros(shape) for shape in shapes))


def test_gradients_are_eager():
    tensors = inputs(2, 5, 64, 128, dtype=torch.float32, device="cpu")
    ours, eager = ([t.clone().requires_grad_() for t in tensors] for _ in range(2))
    gelu_tanh_concat(*ours).square().sum().backward()
    gelu_tanh_concat_reference(*eager).square().sum().backward()
    for a, b in zip(ours, eager, strict=True):
        assert torch.equal(a.grad, b.grad)


def test_opcheck_on_cpu():
    torch.library.opcheck(OP, inputs(2, 5, 64, 128, device="cpu"))


@pytest.mark.parametrize("function", [gelu_tanh_concat, gelu_tanh_concat_cuda])
def test_fullgraph_compile_without_a_gpu(function, fresh_inductor):
    compiled = torch.compile(lambda *t: function(*t) * 2, fullgraph=True, backend="aot_eager")
    tensors = inputs(2, 5, 64, 128, device="cpu")
    assert torch.equal(compiled(*tensors), gelu_tanh_concat_reference(*tensors) * 2)


# --- on a GPU ---


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_equals_eager_on_every_value(dtype):
    values = every_value(dtype)
    check_equal(values, values)
    check_equal(values.flip(2).contiguous(), values.flip(1).contiguous())


@pytest.mark.cuda
@pytest.mark.parametrize("width", (64, 2048, 2240, 2560, 3072, 4096, 8192))
@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_equals_eager(dtype, width):
    for batch in (1, 2, 3):
        for rows in ROWS[:4]:
            check_equal(*inputs(batch, rows, width, 4 * width, dtype=dtype))
    check_equal(*inputs(1, 17, 4 * width, width, dtype=dtype))


@pytest.mark.cuda
@pytest.mark.parametrize("rows", (512, 4216, 4608))
def test_equals_eager_at_flux_sizes(rows):
    check_equal(*inputs(1, rows, 3072, 12288))


@pytest.mark.cuda
@pytest.mark.parametrize("widths", ((8, 8), (8, 64), (64, 8), (2040, 16)))
def test_equals_eager_on_small_rows(widths):
    check_equal(*inputs(3, 301, *widths))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("batch", (1, 2))
def test_equals_eager_with_strided_rows(dtype, batch):
    packed = random_bits(batch, 300, 3 * 512 + 2048, dtype=dtype)  # q, k, v and mlp of one GEMM
    check_equal(packed[..., :512], packed[..., 1536:])
    check_equal(packed[..., 512:1024], packed[..., 1536:3072].contiguous())
    check_equal(packed[:, :1, 1024:1536], packed[:, :1, 1536:])
    check_equal(packed[:1, :1, :512].expand(1, 300, 512), packed[:1, :, 1536:])


@pytest.mark.cuda
def test_rejected_inputs_run_eager():
    attn, mlp = inputs(3, 17, 64, 128)
    check_rejected(attn.float(), mlp.float())
    check_rejected(attn, mlp.transpose(0, 1).contiguous().transpose(0, 1))
    check_rejected(attn[..., ::2], mlp[..., ::2])
    check_rejected(attn[:1].expand(3, 17, 64), mlp)
    check_rejected(attn[..., :60], mlp[..., :60])
    for width in (65, 3070):
        check_rejected(*inputs(1, 17, width, 128))
    check_rejected(*inputs(0, 17, 64, 128))


@pytest.mark.cuda
@pytest.mark.parametrize("position", range(2))
def test_an_offset_of_one_element_is_rejected(position):
    tensors = list(inputs(2, 4, 64, 128))
    shape = tensors[position].shape
    tensors[position] = torch.randn(shape.numel() + 1, device="cuda").bfloat16()[1:].view(shape)
    check_rejected(*tensors)


@pytest.mark.cuda
def test_offsets_past_two_to_the_31_elements():
    rows = 2**31 // 8192 + 5
    mlp = torch.randn(1, rows, 8192, device="cuda", dtype=torch.bfloat16)
    out = gelu_tanh_concat_cuda(mlp[..., :64], mlp)
    assert torch.equal(out[..., :64], mlp[..., :64])
    assert torch.equal(out[..., 64:], F.gelu(mlp, approximate="tanh"))


@pytest.mark.cuda
def test_opcheck_on_cuda():
    torch.library.opcheck(OP, inputs(2, 17, 64, 128))


@pytest.mark.cuda
@pytest.mark.parametrize("function", [gelu_tanh_concat, gelu_tanh_concat_cuda])
def test_fullgraph_compile(function, fresh_inductor):
    tensors = inputs(1, 512, 3072, 12288)
    # not relu: the GELU's underflow is -0, and eager and inductor differ on the sign of relu(-0)
    compiled = torch.compile(lambda *t: function(*t) * 2, fullgraph=True)
    assert_same_bits(compiled(*tensors), gelu_tanh_concat_reference(*tensors) * 2)


@pytest.mark.cuda
def test_graph_capture_and_replay():
    cases = [inputs(1, 512, 3072, 12288, seed=seed) for seed in range(3)]
    check_replays(gelu_tanh_concat_cuda, gelu_tanh_concat_reference, cases)


@pytest.mark.cuda
def test_two_streams():
    cases = [inputs(1, 4096, 3072, 12288, seed=seed) for seed in range(2)]
    check_two_streams(gelu_tanh_concat_cuda, gelu_tanh_concat_reference, cases)
