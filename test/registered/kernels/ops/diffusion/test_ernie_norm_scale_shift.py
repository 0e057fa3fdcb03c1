import importlib.util

import pytest
import torch
from elementwise_checks import poison, random_bits
from rms_models import (
    aten_sum_of_squares,
    flashinfer_sum_of_squares,
    rmsnorm_from_sum,
)
from torch._subclasses.fake_tensor import FakeTensorMode

from sglang.kernels.ops.diffusion.triton import rmsnorm_scale_shift_bitexact as module
from sglang.kernels.ops.diffusion.triton.rmsnorm_scale_shift_bitexact import (
    FLASHINFER_THREADS,
    can_use_fused_rmsnorm_scale_shift,
    fused_rmsnorm_scale_shift_bitexact,
    fused_scale_residual_rmsnorm_scale_shift_bitexact,
    rmsnorm_scale_shift_reference,
    scale_residual_rmsnorm_scale_shift_reference,
)
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=20, suite="base-a-test-cpu")
register_cuda_ci(est_time=80, stage="base-b-kernel-unit", runner_config="1-gpu-large")

EPS = 1e-6
BF16 = torch.bfloat16
ERNIE_SHAPES = ((1, 4216, 4096), (1, 4096, 4096), (2, 1140, 4096), (1, 128, 2048))
# "model" is flashinfer's arithmetic in torch operations: its order is tested without the package.
REFERENCES = ["aten", "model"]
if importlib.util.find_spec("flashinfer") is not None:
    REFERENCES.append("flashinfer")


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def inputs(batch, tokens, hidden, device="cuda", seed=0, scale=1.0):
    """residual, update, gate, weight, scale, shift."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device=device).to(BF16)

    full = [(normal(batch, tokens, hidden).float() * scale).to(BF16) for _ in range(2)]
    weight = 1 + 0.5 * normal(hidden)
    return *full, normal(batch, hidden), weight, normal(batch, hidden), normal(batch, hidden)


def norm_of(reference):
    return "aten" if reference == "aten" else "flashinfer"


def flashinfer_model(x, weight, eps, norm):
    rows = x.reshape(-1, x.shape[-1])
    total = flashinfer_sum_of_squares(rows, FLASHINFER_THREADS[x.shape[-1]])
    return rmsnorm_from_sum(rows, weight, total, eps).view(x.shape)


@pytest.fixture
def use_reference(monkeypatch):
    def use(reference):
        if reference == "model":
            monkeypatch.setattr(module, "rmsnorm_reference", flashinfer_model)

    return use


def assert_same(got, want):
    """Every bit equal, NaN payloads and the signs of zeros aside."""
    assert got.is_contiguous() and got.shape == want.shape and got.dtype == want.dtype
    assert torch.equal(got.isnan(), want.isnan())
    wrong = int((got.nan_to_num(0) != want.nan_to_num(0)).sum())
    assert wrong == 0, f"{wrong} of {want.numel()} values differ"


def check(residual, update, gate, weight, scale, shift, reference="aten", eps=EPS):
    """Both ops, which raise where they do not run, against the chain."""
    norm = norm_of(reference)
    rows = (weight, scale, shift)
    assert can_use_fused_rmsnorm_scale_shift(residual, *rows, update=update, gate=gate, norm=norm)
    expected = rmsnorm_scale_shift_reference(residual, *rows, eps, norm)
    poison(*residual.shape, dtype=BF16)
    assert_same(fused_rmsnorm_scale_shift_bitexact(residual, *rows, eps, norm), expected)
    arguments = (residual, update, gate, *rows, eps, norm)
    expected = scale_residual_rmsnorm_scale_shift_reference(*arguments)
    before = residual.clone()
    poison(2, *residual.shape, dtype=BF16)
    actual = fused_scale_residual_rmsnorm_scale_shift_bitexact(*arguments)
    assert_same(actual[1], expected[1])
    assert_same(actual[0], expected[0])
    assert_same(residual, before)


# --- without a GPU -------------------------------------------------------------------------------


@pytest.fixture
def any_device(monkeypatch):
    """The predicate's other limits, tried on CPU tensors."""
    monkeypatch.setattr(module, "triton_runs_on", lambda device: True)


def test_reference_rounds_at_every_boundary():
    # A row of ones: y = 1. 1 + 2^-8 rounds to 1, 1 * 1 = 1, and 1 + 2^-8 rounds to 1 again.
    x = torch.ones(1, 1, 64, dtype=BF16)
    tiny = torch.full((1, 64), 2.0**-8, dtype=BF16)
    out = rmsnorm_scale_shift_reference(x, x[0, 0], tiny, tiny, 0.0, "aten")
    assert out.eq(1).all()
    # The gated residual 1 + 2^-8 * 1 rounds to 1 as well.
    out, residual = scale_residual_rmsnorm_scale_shift_reference(
        x, x, tiny, x[0, 0], tiny, tiny, 0.0, "aten"
    )
    assert residual.eq(1).all() and out.eq(1).all()


def test_summation_orders_by_hand():
    # In fp32 2^24 + 1 = 2^24: a lone 1 is lost beside 4096^2, two ones added first are not.
    def totals(*ones):
        row = torch.zeros(1, 4096)
        row[0, 0] = 4096
        row[0, list(ones)] = 1
        return aten_sum_of_squares(row).item(), flashinfer_sum_of_squares(row, 64).item()

    assert totals(1, 2) == (2**24, 2**24)  # thread 0's own, serially
    assert totals(512, 1024) == (2**24, 2**24)  # thread 0's next chunks
    assert totals(8, 9) == (2**24 + 2, 2**24 + 2)  # another thread adds its two first
    assert totals(4, 68) == (2**24 + 2, 2**24)  # aten: lanes 1 and 17; flashinfer: 0 and 8
    assert totals(16, 24) == (2**24, 2**24 + 2)  # aten: lanes 4 and 6; flashinfer: 2 and 3
    assert totals(128, 384) == (2**24 + 2, 2**24)  # aten: warps 1 and 3; flashinfer: lanes 16, 48


def test_the_models_are_an_rmsnorm():
    residual, _, _, weight, _, _ = inputs(1, 5, 2048, device="cpu")
    exact = torch.nn.functional.rms_norm(residual.double(), (2048,), weight.double(), EPS)
    aten = rmsnorm_from_sum(residual[0], weight, aten_sum_of_squares(residual[0]), EPS)
    for got in (aten[None], flashinfer_model(residual, weight, EPS, "flashinfer")):
        # one rounding to bf16 is at most 2^-8; the fp32 steps before it add far less than 1 % of it
        assert ((got.double() - exact).abs() <= 1.01 * 2**-8 * exact.abs()).all()


@pytest.mark.parametrize("hidden,flashinfer,aten", [
    (64, False, True), (2040, False, True), (2044, False, False), (2048, True, True),
    (3072, False, True), (4096, True, True), (8192, True, True), (8200, False, False),
])  # fmt: skip
def test_predicate_hidden_size(any_device, hidden, flashinfer, aten):
    residual, update, gate, *rows = inputs(1, 2, hidden, device="cpu")
    for norm, fits in (("flashinfer", flashinfer), ("aten", aten), ("layer", False)):
        assert can_use_fused_rmsnorm_scale_shift(residual, *rows, norm=norm) is fits
        both = dict(update=update, gate=gate, norm=norm)
        assert can_use_fused_rmsnorm_scale_shift(residual, *rows, **both) is fits


def test_predicate_rejects_each_limit(any_device):
    residual, update, gate, weight, scale, shift = inputs(2, 3, 2048, device="cpu")
    adaln = torch.empty(2, 6 * 2048, dtype=BF16)
    fits = can_use_fused_rmsnorm_scale_shift
    assert fits(residual, weight, scale[:, None], shift)
    assert fits(residual, weight, *adaln.chunk(6, -1)[1:3], update=update, gate=adaln[:, :2048])
    assert not fits(residual.half(), weight.half(), scale.half(), shift.half())
    assert not fits(residual, weight.float(), scale, shift)
    assert not fits(residual[0], weight, scale, shift)
    assert not fits(residual[:0], weight, scale[:0], shift[:0])
    assert not fits(residual.transpose(0, 1), weight, scale, shift)
    assert not fits(residual[:, ::2], weight, scale, shift)
    assert not fits(residual, weight[:1024], scale, shift)
    assert not fits(residual, weight, scale[:1], shift)
    assert not fits(residual, weight, scale, shift[:, None].expand(-1, 3, -1))
    assert not fits(residual, weight, scale.t().contiguous().t(), shift)
    assert not fits(residual, weight, scale, torch.empty(2, 2052, dtype=BF16)[:, :2048])
    assert not fits(residual, weight, scale, adaln[:, 1:2049])
    assert not fits(residual, weight, scale, shift, update=update[:1], gate=gate)
    assert not fits(residual, weight, scale, shift, update=update, gate=gate.float())
    with torch.enable_grad():
        assert not fits(residual.requires_grad_(), weight, scale, shift)


def test_a_cpu_tensor_is_rejected_with_advice():
    residual, update, gate, *rows = inputs(1, 2, 2048, device="cpu")
    with pytest.raises(ValueError, match=r"got norm='flashinfer', x bfloat16 \(1, 2, 2048\)"):
        fused_rmsnorm_scale_shift_bitexact(residual, *rows, EPS)
    with pytest.raises(ValueError, match="expected CUDA.*ask can_use_fused_rmsnorm_scale_shift"):
        fused_scale_residual_rmsnorm_scale_shift_bitexact(residual, update, gate, *rows, EPS)


def test_fakes_give_contiguous_outputs_of_the_right_shape():
    with FakeTensorMode(allow_non_fake_inputs=False):
        x, row = torch.empty(2, 3, 2048, dtype=BF16), torch.empty(2, 2048, dtype=BF16)
        out = fused_rmsnorm_scale_shift_bitexact(x, row[0], row, row, EPS)
        outs = fused_scale_residual_rmsnorm_scale_shift_bitexact(
            x, x, row, row[0], row, row, EPS, "aten"
        )
        for got in (out, *outs):
            assert got.shape == x.shape and got.dtype == BF16 and got.is_contiguous()


# --- on the GPU ----------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("reference", REFERENCES)
@pytest.mark.parametrize("shape", ERNIE_SHAPES)
def test_ernie_shapes(use_reference, shape, reference):
    use_reference(reference)
    check(*inputs(*shape), reference)


@pytest.mark.cuda
@pytest.mark.parametrize("reference", REFERENCES)
@pytest.mark.parametrize("tokens", (1, 7, 17, 300))
@pytest.mark.parametrize("batch,hidden", ((1, 8192), (2, 4096), (3, 2048)))
def test_row_counts(use_reference, batch, tokens, hidden, reference):
    use_reference(reference)
    check(*inputs(batch, tokens, hidden), reference)


@pytest.mark.cuda
@pytest.mark.parametrize("hidden", (8, 64, 504, 2240, 2560, 3072, 8184))
def test_other_hidden_sizes_with_aten(hidden):
    check(*inputs(2, 300, hidden))


@pytest.mark.cuda
@pytest.mark.parametrize("hidden", (65, 3070, 8200))
def test_rejected_hidden_sizes(hidden):
    residual, _, _, *rows = inputs(1, 3, hidden)
    for norm in ("aten", "flashinfer"):
        assert not can_use_fused_rmsnorm_scale_shift(residual, *rows, norm=norm)
        with pytest.raises(ValueError, match="a multiple of 8 up to 8192"):
            fused_rmsnorm_scale_shift_bitexact(residual, *rows, EPS, norm)


@pytest.mark.cuda
@pytest.mark.parametrize("chunks", (3, 6, 12))
@pytest.mark.parametrize("batch", (1, 3))
def test_rows_that_are_chunks_of_a_projection(chunks, batch):
    residual, update, _, weight, _, _ = inputs(batch, 17, 4096)
    projection = torch.randn(batch, chunks * 4096, device="cuda").to(BF16)
    for adaln in (projection, projection[:, None]):
        gate, scale, shift = adaln.chunk(chunks, dim=-1)[-3:]
        check(residual, update, gate, weight, scale, shift)


@pytest.mark.cuda
def test_expanded_rows():
    residual, update, gate, weight, scale, shift = inputs(3, 17, 4096)
    one = (row[:1].expand(3, -1) for row in (gate, scale, shift))
    check(residual, update, next(one), weight, *one)


@pytest.mark.cuda
def test_an_offset_of_one_element_is_rejected():
    residual, _, _, *rows = inputs(1, 3, 2048)
    shifted = torch.zeros(residual.numel() + 1, device="cuda", dtype=BF16)[1:].view(residual.shape)
    assert not can_use_fused_rmsnorm_scale_shift(shifted, *rows)
    with pytest.raises(ValueError, match="16-byte aligned"):
        fused_rmsnorm_scale_shift_bitexact(shifted, *rows, EPS)


@pytest.mark.cuda
@pytest.mark.parametrize("reference", REFERENCES)
@pytest.mark.parametrize("scale", (1e-39, 1e-8, 300.0, 1e18, 1e30))
def test_magnitudes(use_reference, scale, reference):
    use_reference(reference)
    check(*inputs(1, 300, 4096, scale=scale), reference)


@pytest.mark.cuda
@pytest.mark.parametrize("reference", REFERENCES)
def test_rows_with_inf_nan_and_zero(use_reference, reference):
    use_reference(reference)
    residual, update, *rest = inputs(1, 300, 4096)
    for token, value in enumerate((float("inf"), -float("inf"), float("nan"), 3e38)):
        residual[0, token, 77] = update[0, token + 4, 4000] = value
    residual[0, 10] = update[0, 10] = 0.0
    check(residual, update, *rest, reference)


@pytest.mark.cuda
def test_every_bit_pattern_in_the_rows():
    residual, update, _, weight, _, _ = inputs(2, 17, 4096)
    gate, scale, shift = (random_bits(2, 4096, dtype=BF16, seed=seed) for seed in range(3))
    check(residual, update, gate, weight, scale, shift)


@pytest.mark.cuda
def test_aten_is_its_model():
    residual, _, _, weight, _, _ = inputs(1, 4216, 4096)
    rstd = torch.ops.aten._fused_rms_norm(residual[0], [4096], weight, EPS)[1].flatten()
    assert torch.equal(rstd, torch.rsqrt(aten_sum_of_squares(residual[0]) / 4096 + EPS))


@pytest.mark.cuda
def test_offsets_past_2_31_elements():
    tokens = 2**31 // 8192 + 3
    residual = torch.zeros(1, tokens, 8192, dtype=BF16, device="cuda")
    small, _, _, *rows = inputs(1, 2, 8192)
    residual[:, -2:] = small
    out = fused_rmsnorm_scale_shift_bitexact(residual, *rows, EPS, "aten")
    assert_same(out[:, -2:].clone(), rmsnorm_scale_shift_reference(small, *rows, EPS, "aten"))


@pytest.mark.cuda
@pytest.mark.parametrize("norm", ("aten", "flashinfer"))
def test_fullgraph_compile(fresh_inductor, norm):
    residual, update, gate, *rows = inputs(1, 300, 4096)
    expected = fused_rmsnorm_scale_shift_bitexact(residual, *rows, EPS, norm)
    compiled = torch.compile(fused_rmsnorm_scale_shift_bitexact, fullgraph=True)
    assert_same(compiled(residual, *rows, EPS, norm), expected)
    fused = fused_scale_residual_rmsnorm_scale_shift_bitexact
    expected = fused(residual, update, gate, *rows, EPS, norm)
    actual = torch.compile(fused, fullgraph=True)(residual, update, gate, *rows, EPS, norm)
    for got, want in zip(actual, expected, strict=True):
        assert_same(got, want)


@pytest.mark.cuda
def test_cuda_graph_replays_on_new_values():
    arguments = inputs(1, 300, 4096)
    fused = fused_scale_residual_rmsnorm_scale_shift_bitexact
    fused(*arguments, EPS, "aten")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = fused(*arguments, EPS, "aten")
    for seed in (5, 6):
        for old, new in zip(arguments, inputs(1, 300, 4096, seed=seed), strict=True):
            old.copy_(new)
        for out in outputs:
            out.fill_(float("nan"))
        graph.replay()
        expected = scale_residual_rmsnorm_scale_shift_reference(*arguments, EPS, "aten")
        for got, want in zip(outputs, expected, strict=True):
            assert_same(got, want)


@pytest.mark.cuda
def test_two_streams_at_once():
    cases = [inputs(1, 4216, 4096, seed=seed) for seed in (1, 2)]
    fused = fused_scale_residual_rmsnorm_scale_shift_bitexact
    expected = [scale_residual_rmsnorm_scale_shift_reference(*c, EPS, "aten") for c in cases]
    torch.cuda.synchronize()
    queues, results = [torch.cuda.Stream() for _ in cases], [None, None]
    for _ in range(5):
        for number, (queue, case) in enumerate(zip(queues, cases, strict=True)):
            with torch.cuda.stream(queue):
                results[number] = fused(*case, EPS, "aten")
    torch.cuda.synchronize()
    for actual, wanted in zip(results, expected, strict=True):
        for got, want in zip(actual, wanted, strict=True):
            assert_same(got, want)
