"""The folded LayerNorm: predicate, mount protocol, and distance from the exact result."""

import logging

import pytest
import torch
import torch.nn.functional as F
from elementwise_checks import on_gpu
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from sglang.kernels.ops.diffusion import quality_gate
from sglang.kernels.ops.diffusion.fused_ln_modulate import (
    FUSED_LN_MODULATE,
    can_fuse_ln_modulate,
    fused_ln_modulate,
    fused_ln_modulate_active,
    fused_ln_modulate_reference,
    mark_fused_ln_modulate_site,
    mount_fused_ln_modulate,
    unmount_fused_ln_modulate,
)
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=15, suite="base-a-test-cpu")
register_cuda_ci(est_time=40, stage="base-b-kernel-unit", runner_config="1-gpu-large")

BF16, FP16 = torch.bfloat16, torch.float16
EPS = 1e-6
MOUNT_LINE = "Mounted fused LN+modulate (affine folding) for quality=high"
SHAPES = [(4096, 3072), (512, 3072), (4608, 3072)]
SHAPES += [(1, 64), (17, 2240), (300, 2560), (4216, 4096), (1025, 65), (7, 8192), (1025, 8196)]


class Site(nn.Module):
    """An adaLN: a projection gives the rows, the norm is modulated by them."""

    def __init__(self, width=64, dtype=BF16, device="cuda"):
        super().__init__()
        self.linear = nn.Linear(width, 2 * width, device=device, dtype=dtype)
        mark_fused_ln_modulate_site(self)
        self.requires_grad_(False)

    def forward(self, x, embedding):
        scale, shift = self.linear(embedding).chunk(2, dim=1)
        if fused_ln_modulate_active(self) and can_fuse_ln_modulate(x, scale, shift):
            return fused_ln_modulate(x, scale, shift, EPS)
        return fused_ln_modulate_reference(x, scale, shift, EPS)


# without a GPU


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_cpu_tensors_are_rejected(dtype):
    x, row = torch.zeros(1, 4, 64, dtype=dtype), torch.zeros(1, 64, dtype=dtype)
    assert not can_fuse_ln_modulate(x, row, row)
    with pytest.raises(ValueError, match="can_fuse_ln_modulate first") as error:
        fused_ln_modulate(x, row, row, EPS)
    assert "[1, 4, 64] cpu" in str(error.value)


def test_a_cpu_model_is_not_mounted_and_runs_eager():
    site = Site(device="cpu")
    x, embedding = torch.randn(1, 4, 64, dtype=BF16), torch.randn(1, 64, dtype=BF16)
    eager = site(x, embedding)
    assert mount_fused_ln_modulate(nn.Sequential(site)) is False
    assert not fused_ln_modulate_active(site)
    assert FUSED_LN_MODULATE.last_reject == (
        "0: Site has no float16 or bfloat16 parameter on a GPU"
    )
    assert torch.equal(site(x, embedding), eager)


def test_a_site_without_parameters_on_a_cpu_is_not_mounted():
    site = nn.Identity()
    mark_fused_ln_modulate_site(site)
    root = nn.Sequential(nn.Linear(8, 8, dtype=BF16), site)
    assert mount_fused_ln_modulate(root) is False
    assert FUSED_LN_MODULATE.last_reject.startswith("1: Sequential has no float16 or bfloat16")
    assert not fused_ln_modulate_active(site)


def test_without_any_parameter_the_predicate_alone_decides():
    site = nn.Identity()
    mark_fused_ln_modulate_site(site)
    assert mount_fused_ln_modulate(site) is True and fused_ln_modulate_active(site)


def test_a_mount_does_not_walk_all_parameters_for_every_site(monkeypatch):
    """FLUX.1 has 115 sites and 780 parameters, and is mounted for every request."""
    seen = []

    class Fits:
        is_cuda, dtype = True, BF16

    def parameters(self):
        for _ in range(780):
            seen.append(self)
            yield Fits()

    root = nn.Sequential(*(nn.Identity() for _ in range(115)))
    for site in root:
        mark_fused_ln_modulate_site(site)
    monkeypatch.setattr(nn.Sequential, "parameters", parameters)
    assert mount_fused_ln_modulate(root) is True
    assert len(seen) <= 2 * 115


def test_a_root_without_sites_is_not_mounted():
    assert mount_fused_ln_modulate(nn.Linear(2, 2)) is False
    assert "no module is marked" in FUSED_LN_MODULATE.last_reject


def test_the_reference_is_the_plain_chain():
    x, scale, shift = torch.randn(2, 4, 64), torch.randn(2, 64), torch.randn(2, 64)
    chain = F.layer_norm(x, (64,), eps=EPS) * (1 + scale[:, None]) + shift[:, None]
    assert torch.equal(fused_ln_modulate_reference(x, scale, shift, EPS), chain)


def test_folding_is_the_same_function():
    """The algebra, in float64 on the CPU: weight = 1 + scale, bias = shift."""
    x, scale, shift = (torch.randn(*s, dtype=torch.float64) for s in [(1, 7, 64), (1, 64), (1, 64)])
    folded = F.layer_norm(x, (64,), 1 + scale[0], shift[0], EPS)
    reference = fused_ln_modulate_reference(x, scale, shift, EPS)
    # float64 rounding of values below 10, a few operations deep
    assert torch.allclose(folded, reference, rtol=0, atol=10 * 8 * 2.0**-53)


def test_the_fake_gives_shape_dtype_and_device():
    with FakeTensorMode():
        x = torch.empty(1, 5, 64, device="cuda", dtype=BF16)
        row = torch.empty(1, 64, device="cuda", dtype=BF16)
        out = fused_ln_modulate(x, row, row, EPS)
    assert (out.shape, out.dtype, out.device.type) == ((1, 5, 64), BF16, "cuda")


def test_sites_step_aside_under_compile():
    site = Site(device="cpu")
    setattr(site, FUSED_LN_MODULATE.enabled_attr, True)
    assert fused_ln_modulate_active(site)
    seen = []

    @torch.compile(backend="eager", fullgraph=True)
    def traced(x, embedding):
        seen.append(fused_ln_modulate_active(site))
        return site(x, embedding)

    traced(torch.randn(1, 4, 64, dtype=BF16), torch.randn(1, 64, dtype=BF16))
    assert seen == [False]


def test_the_predicate_without_a_gpu():
    row = on_gpu(1, 64)
    for x in (on_gpu(1, 1024, 64), on_gpu(1, 1025, 64)):
        assert can_fuse_ln_modulate(x, row, row) and can_fuse_ln_modulate(x, on_gpu(64), row)
    few, none = [on_gpu(1, rows, 64) for rows in (1, 77, 1023)], on_gpu(1, 0, 64)
    for x in (*few, none, on_gpu(2, 1024, 64), on_gpu(1024, 64), on_gpu(1, 1, 1024, 64)):
        assert not can_fuse_ln_modulate(x, row, row), x.shape
    assert not can_fuse_ln_modulate(on_gpu(1, 1024, 64, dtype=torch.float32), row, row)
    for other in (on_gpu(2, 64), on_gpu(1, 32), on_gpu(1, 64, dtype=FP16), on_gpu()):
        assert not can_fuse_ln_modulate(on_gpu(1, 1024, 64), other, row), other.shape
        assert not can_fuse_ln_modulate(on_gpu(1, 1024, 64), row, other), other.shape


# on a GPU


def make_inputs(rows, width, dtype):
    generator = torch.Generator("cuda").manual_seed(rows)
    randn = lambda *shape: torch.randn(*shape, generator=generator, device="cuda")  # noqa: E731
    projection = (randn(1, 6 * width) * 0.5).to(dtype)
    scale, shift = projection.chunk(6, dim=1)[1], projection.chunk(6, dim=1)[0]
    return (randn(1, rows, width) * 3 + 0.5).to(dtype), scale, shift


def exact(x, scale, shift):
    """(normalized * round(1 + scale), that + shift) in float64."""
    width = x.shape[-1]
    scaled = F.layer_norm(x.double(), (width,), eps=EPS) * (1 + scale).double()
    return scaled, scaled + shift.double()


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("rows, width", SHAPES)
def test_close_to_exact_and_to_eager(rows, width, dtype):
    """u = eps / 2. Folded: one rounding, u |y|; float32 statistics of D values, at most
    D 2^-24 relative to x's spread plus mean, here below (1 + |mean| / std) <= 2, on n (1 + scale).
    Eager has these and rounds n and the product: u |n (1 + scale)| each, times (1 + u)."""
    x, scale, shift = make_inputs(rows, width, dtype)
    assert can_fuse_ln_modulate(x, scale, shift)
    folded = fused_ln_modulate(x, scale, shift, EPS)
    eager = fused_ln_modulate_reference(x, scale, shift, EPS)
    assert folded.shape == x.shape and folded.dtype == dtype and folded.is_contiguous()
    u = torch.finfo(dtype).eps / 2
    scaled, y = exact(x, scale, shift)
    statistics = 2 * width * 2.0**-24 * (scaled.abs() + (1 + scale.double()).abs())
    bound = u * y.abs() + 1.01 * statistics + 2.0**-25
    assert bool(((folded - y).abs() <= bound).all())
    eager_bound = bound + 2 * u * (1 + 2 * u) * scaled.abs()
    assert bool(((folded.double() - eager).abs() <= bound + eager_bound).all())


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("rows, width", SHAPES)
def test_equals_aten_with_weight_and_bias(rows, width, dtype):
    x, scale, shift = make_inputs(rows, width, dtype)
    x[0, 0, 1] = float("nan")
    folded = fused_ln_modulate(x, scale, shift, EPS)
    aten = F.layer_norm(x, (width,), (1 + scale).flatten(), shift.flatten(), EPS)
    assert torch.equal(folded.isnan(), aten.isnan())
    assert torch.equal(folded.nan_to_num(), aten.nan_to_num())


@pytest.mark.cuda
def test_one_rounding_is_nearer_to_exact_than_four():
    x, scale, shift = make_inputs(512, 3072, BF16)
    y = exact(x, scale, shift)[1]
    folded_error = (fused_ln_modulate(x, scale, shift, EPS) - y).square().mean()
    eager_error = (fused_ln_modulate_reference(x, scale, shift, EPS) - y).square().mean()
    assert folded_error < eager_error


@pytest.mark.cuda
@pytest.mark.parametrize("view", ["chunk", "contiguous", "token row"])
def test_row_layouts_give_the_same_bits(view):
    x, scale, shift = make_inputs(300, 3072, BF16)
    expected = fused_ln_modulate(x, scale, shift, EPS)
    if view == "contiguous":
        scale, shift = scale.clone(), shift.clone()
    if view == "token row":
        scale, shift = scale[:, None], shift[:, None]
    assert can_fuse_ln_modulate(x, scale, shift)
    assert torch.equal(fused_ln_modulate(x, scale, shift, EPS), expected)


@pytest.mark.cuda
def test_a_row_of_nan_stays_in_its_row():
    x, scale, shift = make_inputs(300, 3072, BF16)
    x[0, 5, 100] = float("nan")
    x[0, 6, 100] = float("inf")
    folded = fused_ln_modulate(x, scale, shift, EPS)
    eager = fused_ln_modulate_reference(x, scale, shift, EPS)
    assert torch.equal(folded.isnan(), eager.isnan())
    assert bool(folded[0, 5].isnan().all()) and bool(folded[0, :5].isfinite().all())


@pytest.mark.cuda
def test_the_predicate_at_its_boundaries():
    x, scale, shift = make_inputs(1024, 64, BF16)
    assert can_fuse_ln_modulate(x, scale, shift)
    odd, *odd_rows = make_inputs(1023, 66, BF16)
    two = torch.cat([x, x])
    rejected = {
        "two samples": (two, scale, shift),
        "two samples, two rows": (two, scale.repeat(2, 1), shift.repeat(2, 1)),
        "float32": (x.float(), scale.float(), shift.float()),
        "row dtype": (x, scale.half(), shift),
        "row device": (x, scale.cpu(), shift),
        "row width": (x, scale[:, :32], shift),
        "row stride": (x, torch.zeros(1, 128, device="cuda", dtype=BF16)[:, ::2], shift),
        "expanded row": (x, scale[:, :1].expand(1, 64), shift),
        "a row a token": (x, x, shift),
        "strides": (x.transpose(1, 2).contiguous().transpose(1, 2), scale, shift),
        "two dimensions": (x[0], scale, shift),
        "empty": (x[:, :0], scale, shift),
        "few rows, of a width for aten alone": (odd, *odd_rows),
        "gradient": (x.clone().requires_grad_(), scale, shift),
    }
    assert [name for name, inputs in rejected.items() if can_fuse_ln_modulate(*inputs)] == []
    for inputs in rejected.values():
        with pytest.raises(ValueError, match="fused_ln_modulate got"):
            fused_ln_modulate(*inputs, EPS)


@pytest.mark.cuda
def test_mount_runs_folded_and_unmount_restores_eager(caplog):
    caplog.set_level(logging.INFO, logger=quality_gate.__name__)
    site = Site()
    x, embedding = (torch.randn(*s, device="cuda", dtype=BF16) for s in [(1, 300, 64), (1, 64)])
    eager = site(x, embedding)
    assert mount_fused_ln_modulate(site) is True
    assert [record.getMessage() for record in caplog.records] == [MOUNT_LINE]
    scale, shift = site.linear(embedding).chunk(2, dim=1)
    assert torch.equal(site(x, embedding), fused_ln_modulate(x, scale, shift, EPS))
    unmount_fused_ln_modulate(site)
    assert torch.equal(site(x, embedding), eager)


@pytest.mark.cuda
def test_one_rejected_site_leaves_all_unmounted():
    root = nn.Sequential(Site(), Site(dtype=torch.float32))
    assert mount_fused_ln_modulate(root) is False
    assert not fused_ln_modulate_active(root[0]) and not fused_ln_modulate_active(root[1])
    assert FUSED_LN_MODULATE.last_reject.startswith("1: Site has no float16 or bfloat16")


@pytest.mark.cuda
def test_a_site_without_parameters_is_judged_by_its_root():
    site = nn.Identity()
    mark_fused_ln_modulate_site(site)
    half = nn.Linear(8, 8, device="cuda", dtype=BF16)
    assert mount_fused_ln_modulate(nn.Sequential(half, site)) is True
    assert mount_fused_ln_modulate(nn.Sequential(half.float(), site)) is False
    assert not fused_ln_modulate_active(site)


@pytest.mark.cuda
def test_fullgraph_compile_calls_the_op():
    x, scale, shift = make_inputs(300, 64, BF16)
    compiled = torch.compile(fused_ln_modulate, fullgraph=True)
    assert torch.equal(compiled(x, scale, shift, EPS), fused_ln_modulate(x, scale, shift, EPS))


@pytest.mark.cuda
def test_graph_capture_and_replay():
    x, scale, shift = make_inputs(300, 64, BF16)
    fused_ln_modulate(x, scale, shift, EPS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fused_ln_modulate(x, scale, shift, EPS)
    x.copy_(x.flip(1))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, fused_ln_modulate(x, scale, shift, EPS))
