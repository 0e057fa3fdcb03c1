"""The GELU epilogue: predicate, mount protocol, and distance from the exact result."""

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from sglang.kernels.ops.diffusion import quality_gate
from sglang.kernels.ops.diffusion.fused_linear_gelu import (
    FUSED_LINEAR_GELU,
    can_fuse_linear_gelu,
    can_fuse_linear_gelu_static,
    fused_gelu_active,
    fused_linear_gelu_reference,
    fused_linear_gelu_tanh,
    mark_fused_gelu_site,
    mount_fused_linear_gelu,
    unmount_fused_linear_gelu,
)
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=15, suite="base-a-test-cpu")
register_cuda_ci(est_time=60, stage="base-b-kernel-unit", runner_config="1-gpu-large")

BF16, FP16 = torch.bfloat16, torch.float16
MOUNT_LINE = "Mounted fused linear+GELU (cublasLt epilogue) for quality=high"
# (rows, K, N): FLUX.1's image, text and joint streams, then odd rows and small layers
SHAPES = [(4096, 3072, 12288), (512, 3072, 12288), (4608, 3072, 12288)]
SHAPES += [(1, 3072, 12288), (7, 3072, 12288), (300, 2048, 8192), (17, 64, 256), (4216, 8, 16)]


class Site(nn.Module):
    """A feed-forward's first half, marked."""

    def __init__(self, linear):
        super().__init__()
        self.proj = linear
        mark_fused_gelu_site(self, "proj")

    def forward(self, x):
        if fused_gelu_active(self) and can_fuse_linear_gelu(self.proj, x):
            return fused_linear_gelu_tanh(x, self.proj.weight, self.proj.bias)
        return F.gelu(self.proj(x), approximate="tanh")


class SubclassedLinear(nn.Linear):
    pass


def make_linear(k=64, n=256, dtype=BF16, device="cuda", bias=True):
    return nn.Linear(k, n, bias=bias, device=device, dtype=dtype).requires_grad_(False)


# without a GPU


@pytest.mark.parametrize("dtype", [BF16, FP16, torch.float32])
def test_a_cpu_layer_is_rejected(dtype):
    linear = make_linear(dtype=dtype, device="cpu")
    assert not can_fuse_linear_gelu_static(linear)
    assert not can_fuse_linear_gelu(linear, torch.zeros(1, 4, 64, dtype=dtype))


def test_a_cpu_call_raises_and_says_what_to_do():
    linear = make_linear(device="cpu")
    with pytest.raises(ValueError, match="can_fuse_linear_gelu first") as error:
        fused_linear_gelu_tanh(torch.zeros(1, 4, 64, dtype=BF16), linear.weight, linear.bias)
    assert "x bfloat16[1, 4, 64] cpu" in str(error.value)


def test_a_cpu_model_is_not_mounted_and_runs_eager():
    root = nn.Sequential(Site(make_linear(device="cpu")))
    x = torch.randn(2, 3, 64, dtype=BF16)
    eager = root(x)
    assert mount_fused_linear_gelu(root) is False
    assert not fused_gelu_active(root[0])
    assert FUSED_LINEAR_GELU.last_reject.startswith("0: proj: its weight is on cpu")
    assert torch.equal(root(x), eager)


def test_marking_a_linear_that_is_not_there_raises():
    with pytest.raises(AttributeError, match="porj"):
        mark_fused_gelu_site(nn.Sequential(), "porj")


@pytest.mark.parametrize(
    "linear, reason",
    [
        (SubclassedLinear(64, 256), "SubclassedLinear is not a plain nn.Linear"),
        (nn.Identity(), "Identity is not a plain nn.Linear"),
        (make_linear(device="cpu", bias=False), "no bias"),
        (make_linear(device="cpu", dtype=torch.float32), "float32"),
    ],
)
def test_other_layers_are_rejected_with_a_reason(linear, reason):
    assert not can_fuse_linear_gelu_static(linear)
    assert mount_fused_linear_gelu(Site(linear)) is False
    assert reason in FUSED_LINEAR_GELU.last_reject


def test_a_hooked_layer_is_rejected():
    linear = make_linear(device="cpu")
    linear.register_forward_pre_hook(lambda module, inputs: None)
    mount_fused_linear_gelu(Site(linear))
    assert "hooked" in FUSED_LINEAR_GELU.last_reject


def test_the_fake_gives_shape_dtype_and_device():
    with FakeTensorMode():
        x, weight, bias = (
            torch.empty(shape, device="cuda", dtype=BF16) for shape in [(2, 5, 64), (256, 64), 256]
        )
        out = fused_linear_gelu_tanh(x, weight, bias)
    assert (out.shape, out.dtype, out.device.type) == ((2, 5, 256), BF16, "cuda")
    assert out.is_contiguous()


def test_sites_step_aside_under_compile(monkeypatch):
    site = Site(make_linear(device="cpu"))
    setattr(site, FUSED_LINEAR_GELU.enabled_attr, True)
    assert fused_gelu_active(site)
    seen = []

    @torch.compile(backend="eager", fullgraph=True)
    def traced(x):
        seen.append(fused_gelu_active(site))
        return site(x)

    x = torch.randn(2, 3, 64, dtype=BF16)
    assert torch.equal(traced(x), fused_linear_gelu_reference(x, site.proj.weight, site.proj.bias))
    assert seen == [False]


# on a GPU


def exact(x, weight, bias):
    """(GELU of the pre-activation, pre-activation, sum of |terms|), in float64."""
    x, weight, bias = x.double(), weight.double(), bias.double()
    z = F.linear(x, weight, bias)
    terms = F.linear(x.abs(), weight.abs(), bias.abs())
    return F.gelu(z, approximate="tanh"), z, terms


def error_bounds(z, terms, k, dtype):
    """How far one output, fused and eager, may be from the exact one. u = eps / 2.

    gemm: at most (K + 1) 2^-23 sum|terms| (tensor cores may truncate each float32 addition);
    |gelu'| <= 1.13 carries it to the output. Rounding the output: u |gelu| <= u (|z| + gemm).
    Fused: tanh.approx.f32 has a relative error of 2^-11, so gelu = z/2 (1 + tanh) one of z/2 2^-11.
    Eager: rounding the pre-activation, u (|z| + gemm), carried to the output by 1.13.
    2^-25: half of float16's smallest subnormal, for each rounding.
    """
    u = torch.finfo(dtype).eps / 2
    gemm = (k + 1) * 2.0**-23 * terms
    rounding = u * (z.abs() + gemm) + 2.0**-25
    shared = 1.13 * gemm + rounding
    return shared + z.abs() * 2.0**-12, shared + 1.13 * rounding


def make_inputs(rows, k, n, dtype):
    generator = torch.Generator("cuda").manual_seed(rows)
    randn = lambda *shape: torch.randn(*shape, generator=generator, device="cuda")  # noqa: E731
    x, weight, bias = randn(1, rows, k), randn(n, k) / k**0.5, randn(n)
    return x.to(dtype), weight.to(dtype), bias.to(dtype)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("rows, k, n", SHAPES)
def test_close_to_exact_and_to_eager(rows, k, n, dtype):
    x, weight, bias = make_inputs(rows, k, n, dtype)
    fused = fused_linear_gelu_tanh(x, weight, bias)
    eager = fused_linear_gelu_reference(x, weight, bias)
    assert fused.shape == (1, rows, n) and fused.dtype == dtype and fused.is_contiguous()
    truth, z, terms = exact(x, weight, bias)
    fused_bound, eager_bound = error_bounds(z, terms, k, dtype)
    assert bool(((fused - truth).abs() <= fused_bound).all())
    assert bool(((fused.double() - eager).abs() <= fused_bound + eager_bound).all())


@pytest.mark.cuda
def test_one_rounding_is_nearer_to_exact_than_two():
    x, weight, bias = make_inputs(512, 3072, 12288, BF16)
    truth = exact(x, weight, bias)[0]
    fused_error = (fused_linear_gelu_tanh(x, weight, bias) - truth).square().mean()
    eager_error = (fused_linear_gelu_reference(x, weight, bias) - truth).square().mean()
    assert fused_error < eager_error


@pytest.mark.cuda
def test_repeats_give_the_same_bits():
    x, weight, bias = make_inputs(512, 3072, 12288, BF16)
    first = fused_linear_gelu_tanh(x, weight, bias)
    assert all(torch.equal(first, fused_linear_gelu_tanh(x, weight, bias)) for _ in range(5))


@pytest.mark.cuda
def test_large_and_special_values():
    x, weight, bias = make_inputs(16, 64, 256, BF16)
    x[0, 0] *= 1e4
    x[0, 1, 3] = float("nan")
    fused = fused_linear_gelu_tanh(x, weight, bias)
    eager = fused_linear_gelu_reference(x, weight, bias)
    assert torch.equal(fused.isnan(), eager.isnan())
    assert fused[0, 1].isnan().all() and fused[0, 0].isfinite().all()


@pytest.mark.cuda
@pytest.mark.parametrize("lead", [(5,), (2, 3), (2, 1, 3)])
def test_any_leading_shape(lead):
    _, weight, bias = make_inputs(1, 64, 256, BF16)
    x = torch.randn(*lead, 64, device="cuda", dtype=BF16)
    assert can_fuse_linear_gelu(as_linear(weight, bias), x)
    out = fused_linear_gelu_tanh(x, weight, bias)
    assert out.shape == (*lead, 256)
    assert torch.equal(out.view(-1, 256), fused_linear_gelu_tanh(x.view(-1, 64), weight, bias))


def as_linear(weight, bias):
    linear = make_linear(weight.shape[1], weight.shape[0], weight.dtype)
    linear.weight.copy_(weight)
    linear.bias.copy_(bias)
    return linear


@pytest.mark.cuda
def test_the_predicate_at_its_boundaries():
    linear = make_linear()
    x = torch.randn(2, 6, 64, device="cuda", dtype=BF16)
    assert can_fuse_linear_gelu_static(linear) and can_fuse_linear_gelu(linear, x)
    rejected_inputs = {
        "dtype": x.half(),
        "width": x[..., :56].contiguous(),
        "device": x.cpu(),
        "strides": x.transpose(0, 1),
        "every other row": x[:, ::2],
        "offset": torch.zeros(12 * 64 + 1, device="cuda", dtype=BF16)[1:].view(2, 6, 64),
        "empty": x[:, :0],
        "one dimension": x[0, 0],
        "gradient": x.clone().requires_grad_(),
    }
    taken = [name for name, value in rejected_inputs.items() if can_fuse_linear_gelu(linear, value)]
    assert taken == []
    for value in rejected_inputs.values():
        with pytest.raises(ValueError, match="fused_linear_gelu_tanh got"):
            fused_linear_gelu_tanh(value, linear.weight, linear.bias)


@pytest.mark.cuda
@pytest.mark.parametrize("k, n", [(60, 256), (64, 252), (65, 256), (64, 255)])
def test_sizes_that_are_no_multiple_of_8_are_rejected(k, n):
    assert not can_fuse_linear_gelu_static(make_linear(k, n))


@pytest.mark.cuda
def test_quantized_and_patched_layers_are_rejected():
    fp8 = make_linear()
    fp8.weight = nn.Parameter(fp8.weight.to(torch.float8_e4m3fn), requires_grad=False)
    patched = make_linear()
    patched.forward = lambda x: x
    single = make_linear(dtype=torch.float32)
    layers = [fp8, patched, single, make_linear(bias=False), SubclassedLinear(64, 256).cuda()]
    assert [can_fuse_linear_gelu_static(layer) for layer in layers] == [False] * 5


@pytest.mark.cuda
def test_mount_runs_fused_and_unmount_restores_eager(caplog):
    caplog.set_level(logging.INFO, logger=quality_gate.__name__)
    root = nn.Sequential(Site(make_linear(64, 256)), Site(make_linear(256, 64)))
    x = torch.randn(1, 300, 64, device="cuda", dtype=BF16)
    eager = root(x)
    assert mount_fused_linear_gelu(root) is True
    assert [record.getMessage() for record in caplog.records] == [MOUNT_LINE]
    hidden = fused_linear_gelu_tanh(x, root[0].proj.weight, root[0].proj.bias)
    fused = fused_linear_gelu_tanh(hidden, root[1].proj.weight, root[1].proj.bias)
    assert torch.equal(root(x), fused)
    unmount_fused_linear_gelu(root)
    assert torch.equal(root(x), eager)


@pytest.mark.cuda
def test_one_rejected_site_leaves_all_unmounted():
    root = nn.Sequential(Site(make_linear(64, 256)), Site(make_linear(256, 60)))
    assert mount_fused_linear_gelu(root) is False
    assert not fused_gelu_active(root[0]) and not fused_gelu_active(root[1])
    assert FUSED_LINEAR_GELU.last_reject.startswith("1: proj: its sizes (60, 256)")


@pytest.mark.cuda
def test_fullgraph_compile_calls_the_op():
    x, weight, bias = make_inputs(300, 64, 256, BF16)
    compiled = torch.compile(fused_linear_gelu_tanh, fullgraph=True)
    assert torch.equal(compiled(x, weight, bias), fused_linear_gelu_tanh(x, weight, bias))


@pytest.mark.cuda
def test_graph_capture_and_replay():
    x, weight, bias = make_inputs(300, 64, 256, BF16)
    fused_linear_gelu_tanh(x, weight, bias)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fused_linear_gelu_tanh(x, weight, bias)
    x.copy_(x.flip(1))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, fused_linear_gelu_tanh(x, weight, bias))


@pytest.mark.cuda
def test_the_predicate_at_the_boundary_of_the_rows():
    linear = make_linear(64, 8)
    x = torch.randn(8193, 64, device="cuda", dtype=BF16)
    for shape in ((8192, 64), (2, 4096, 64), (1, 8192, 64)):
        assert can_fuse_linear_gelu(linear, x[:8192].view(shape)), shape
    assert not can_fuse_linear_gelu(linear, x) and not can_fuse_linear_gelu(linear, x[None])
    with pytest.raises(ValueError, match="x has 8193 rows, more than the 8192"):
        fused_linear_gelu_tanh(x, linear.weight, linear.bias)
