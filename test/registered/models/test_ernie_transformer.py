"""The ERNIE-Image transformer against diffusers' with the same weights, and its fused sites."""

import pytest
import torch
from diffusers import ErnieImageTransformer2DModel as Reference

from sglang.kernels.ops.diffusion.bitexact_gate import all_gates, fast_paths
from sglang.multimodal_gen.runtime.layers import layernorm
from sglang.multimodal_gen.runtime.layers.attention import AttentionBackend
from sglang.multimodal_gen.runtime.layers.layernorm import RMSNorm, find_backend
from sglang.multimodal_gen.runtime.models.dits import ernie_image as ernie
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.tiny_checkpoints import fill_at_unit_scale
from sglang.test.tiny_ernie import ernie_transformer_config

register_cpu_ci(est_time=15, suite="base-a-test-cpu")
register_cuda_ci(est_time=60, stage="base-b-kernel-unit", runner_config="1-gpu-large")

PUBLISHED = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_layers": 36,
    "ffn_hidden_size": 12288,
    "text_in_dim": 3072,
}
FULL_WIDTH = PUBLISHED | {"num_layers": 2}
EPS = 1e-6
SHAPES = [(1, 4216, 4096), (1, 4096, 4096), (2, 1140, 4096), (1, 128, 2048), (1, 37, 4096)]


def build_pair(config, dtype=torch.float32, device="cpu", backend="flash"):
    """(ours, diffusers'), the same random weights in both."""
    with torch.device(device):
        reference = Reference(**config)
        ours = ernie.ErnieImageTransformer2DModel(
            ernie.ErnieImageParams(**config), AttentionBackend(backend)
        )
    fill_at_unit_scale(reference, seed=0)
    ours.load_state_dict(reference.state_dict())
    return ours.to(dtype).eval(), reference.to(dtype).eval()


def inputs(config, batch, grid, text_tokens, dtype=torch.float32, device="cpu"):
    """(img, txt, timestep); `grid` is (rows, columns) of latents."""
    params = ernie.ErnieImageParams(**config)
    generator = torch.Generator().manual_seed(0)
    img = torch.randn(batch, params.in_channels, *grid, generator=generator)
    txt = torch.randn(batch, text_tokens, params.text_in_dim, generator=generator)
    timestep = torch.full([batch], 731.4)
    return tuple(tensor.to(device, dtype) for tensor in (img, txt, timestep))


@torch.inference_mode()
def run_reference(reference, img, txt, timestep):
    lengths = torch.full([len(txt)], txt.shape[1], device=txt.device)
    return reference(img, timestep, txt, lengths, return_dict=False)[0]


@pytest.mark.parametrize(("grid", "text"), [((4, 4), 64), ((6, 4), 7), ((4, 8), 1)])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("changes", [{}, {"patch_size": 2}, {"text_in_dim": 64}], ids=str)
def test_forward_equals_the_reference(changes, batch, grid, text):
    config = ernie_transformer_config(**changes)
    ours, reference = build_pair(config)
    request = inputs(config, batch, grid, text)
    expected = run_reference(reference, *request)
    with torch.inference_mode():
        got = ours(*request)
    assert expected.std() > 0.1, "the reference's output is (nearly) constant"
    assert torch.equal(got, expected)


def test_a_prompt_alone_gives_what_the_reference_gives_beside_a_longer_one():
    config = ernie_transformer_config()
    ours, reference = build_pair(config)
    img, txt, timestep = inputs(config, 2, (4, 6), 9)
    lengths = torch.tensor([4, 9])
    with torch.inference_mode():
        both = reference(img, timestep, txt, lengths, return_dict=False)[0]
        for i, length in enumerate(lengths):
            alone = ours(img[i : i + 1], txt[i : i + 1, :length], timestep[:1])
            assert (alone - both[i : i + 1]).abs().max() <= 1e-5 * both.abs().max()


def test_names_and_shapes_are_the_published_checkpoints():
    with torch.device("meta"):
        ours = ernie.ErnieImageTransformer2DModel(
            ernie.ErnieImageParams(**PUBLISHED), AttentionBackend("flash")
        )
        reference = Reference(**PUBLISHED)
    shapes = [{k: v.shape for k, v in m.state_dict().items()} for m in (ours, reference)]
    assert shapes[0] == shapes[1]
    assert sum(map(torch.Size.numel, shapes[0].values())) > 8e9


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_axes_dim": (8, 8, 8)}, r"rope_axes_dim: got \(8, 8, 8\).*= 32"),
        ({"num_attention_heads": 3}, "hidden_size: got 64, expected a multiple.*3"),
        ({"qk_layernorm": False}, "qk_layernorm: got False"),
    ],
)
def test_options_that_do_not_fit_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        ernie.ErnieImageParams(**ernie_transformer_config(**changes))


# The norm layer and the sites, one by one.


def site_inputs(shape, dtype, device="cpu"):
    """(norm, x, update, [gate, scale, shift]); the rows are chunks of one projection."""
    batch, _, hidden = shape
    generator = torch.Generator().manual_seed(hidden)

    def normal(*size):
        return torch.randn(*size, generator=generator).to(device, dtype)

    norm = RMSNorm(hidden, EPS).to(device, dtype).requires_grad_(False)
    norm.weight.copy_(1 + 0.1 * normal(hidden))
    rows = normal(batch, 6 * hidden)[:, None].chunk(6, dim=-1)
    return norm, normal(*shape) * 3 + 1, normal(*shape), rows[:3]


def eager_chain(norm, x, scale, shift):
    """Operation by operation, each with its own rounding."""
    normed = norm(x)
    scaled = normed * (1 + scale)
    return scaled + shift


def run_sites(norm, x, update, rows):
    gate, scale, shift = rows
    return {
        "norm": ernie._ernie_norm_scale_shift(norm, x, scale, shift),
        "gated": ernie._ernie_gated_norm_scale_shift(norm, x, update, gate, scale, shift),
        "add": ernie._ernie_residual_gate_add(x, update, gate),
    }


def assert_sites_equal_the_chain(norm, x, update, rows):
    gate, scale, shift = rows
    got = run_sites(norm, x, update, rows)
    residual = x + gate * update
    out = eager_chain(norm, residual, scale, shift)
    assert torch.equal(got["norm"], eager_chain(norm, x, scale, shift))
    assert torch.equal(got["gated"][0], out) and torch.equal(got["gated"][1], residual)
    assert torch.equal(got["add"], residual)


@pytest.fixture
def fresh_gates():
    """Every verdict is formed in this test, on its own shapes."""
    for gate in all_gates():
        gate.reset()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 33, 64), (2, 7, 2048)])
def test_sites_equal_the_eager_chain(fresh_gates, shape, dtype):
    assert_sites_equal_the_chain(*site_inputs(shape, dtype))
    state = ernie.ERNIE_GATED_NORM_SCALE_SHIFT.state()
    assert state.status == "eager" and "on cpu" in state.reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_is_atens_on_the_cpu(dtype):
    norm, x, _, _ = site_inputs((2, 5, 64), dtype)
    assert norm.backend == "aten"
    assert torch.equal(norm(x), torch.nn.functional.rms_norm(x, (64,), norm.weight, EPS))


def test_a_norm_package_that_does_not_run_is_warned_of_and_passed_over(monkeypatch, caplog):
    def broken(x, weight, eps, backend):
        if backend == "sgl_kernel":
            raise ModuleNotFoundError("No module named 'sgl_kernel'")
        raise RuntimeError("no compiler found")

    caplog.set_level("WARNING", logger="sglang")
    monkeypatch.setattr(layernorm, "rms_norm", broken)
    for backend in ("sgl_kernel", "flashinfer"):
        assert not layernorm._runs(backend, torch.device("cpu"), torch.bfloat16)
    assert [record.getMessage() for record in caplog.records] == [
        "RMSNorm does not run by flashinfer (RuntimeError: no compiler found);"
        " trying the next kernel"
    ]


# On the GPU, bfloat16, at ERNIE-Image's width.


@pytest.mark.cuda
def test_the_norm_runs_by_the_backend_that_it_names():
    norm, x, _, _ = site_inputs((1, 128, 4096), torch.bfloat16, "cuda")
    assert norm.backend == find_backend(norm.weight.device, torch.bfloat16)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + EPS).sqrt()
    # one rounding to bf16 (2^-9 relative, half an ulp) after float32 arithmetic
    error = (norm(x).double() - exact * norm.weight.double()).abs()
    assert (error <= 2**-8 * exact.abs() * norm.weight.abs()).all()


@pytest.mark.cuda
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_fused_sites_equal_the_eager_chain_on_cuda(fresh_gates, shape):
    request = site_inputs(shape, torch.bfloat16, "cuda")
    for _ in range(2):  # the call that verifies, and one after it
        assert_sites_equal_the_chain(*request)
    for gate in (ernie.ERNIE_NORM_SCALE_SHIFT, ernie.ERNIE_GATED_NORM_SCALE_SHIFT):
        state = gate.state()
        assert (state.status, state.fused_calls, state.eager_calls) == ("verified", 2, 0), state


@pytest.fixture(scope="module")
def full_width():
    """(ours, diffusers') of ERNIE-Image's width with two blocks."""
    return build_pair(FULL_WIDTH, torch.bfloat16, "cuda", backend="cudnn")


@pytest.mark.cuda
@pytest.mark.parametrize("grid", [(64, 64), (32, 48)], ids=["1024x1024", "768x512"])
def test_fast_paths_equal_eager_on_cuda(full_width, fresh_gates, grid):
    ours, _ = full_width
    request = inputs(FULL_WIDTH, 1, grid, 120, torch.bfloat16, "cuda")
    with torch.inference_mode():
        with fast_paths(False):
            expected = ours(*request)
        assert expected.isfinite().all() and expected.float().std() > 0.1
        verifying, verified = ours(*request), ours(*request)
    assert torch.equal(verifying, expected) and torch.equal(verified, expected)
    for gate in (
        ernie.ERNIE_NORM_SCALE_SHIFT,
        ernie.ERNIE_GATED_NORM_SCALE_SHIFT,
        ernie.ERNIE_RESIDUAL_GATE_ADD,
        ernie.ERNIE_QK_NORM_ROPE,
        ernie.ERNIE_GELU_MUL,
    ):
        state = gate.state()
        assert state.status == "verified" and not state.eager_calls, state
