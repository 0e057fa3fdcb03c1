"""The FLUX.1 transformer and its norms against diffusers' with the same weights, bit for bit."""

import pytest
import torch
from diffusers import FluxTransformer2DModel as Reference
from diffusers.models.embeddings import Timesteps
from diffusers.models.normalization import AdaLayerNormZero, AdaLayerNormZeroSingle
from diffusers.models.transformers.transformer_flux import FluxPosEmbed

from sglang.kernels.ops.diffusion.bitexact_gate import all_gates, fast_paths
from sglang.multimodal_gen.runtime.layers.attention import AttentionBackend
from sglang.multimodal_gen.runtime.layers.rotary import rope_tables
from sglang.multimodal_gen.runtime.layers.timestep_embedding import sinusoidal_embedding
from sglang.multimodal_gen.runtime.models.dits import flux
from sglang.multimodal_gen.runtime.pipelines.stages.latent_preparation import position_ids
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.tiny_checkpoints import fill_at_unit_scale, transformer_config

register_cpu_ci(est_time=15, suite="base-a-test-cpu")
register_cuda_ci(est_time=60, stage="base-b-kernel-unit", runner_config="1-gpu-large")

FULL_WIDTH = {"num_layers": 2, "num_single_layers": 2, "guidance_embeds": True}
NORMS = [
    (flux.FluxAdaLayerNormZero, AdaLayerNormZero),
    (flux.FluxAdaLayerNormZeroSingle, AdaLayerNormZeroSingle),
]
SITES_ON_GPU = (
    flux.FLUX_RESIDUAL_GATE_ADD,
    flux.FLUX_LN_MODULATE,
    flux.FLUX_QK_NORM_ROPE,
    flux.FLUX_JOINT_QK_NORM_ROPE,
    flux.FLUX_JOINT_VALUES,
    flux.FLUX_GATED_LN_MODULATE,
)


def build_pair(config, dtype, device="cpu", backend="flash"):
    """(ours, diffusers'), the same random weights in both."""
    with torch.device(device):
        reference = Reference(**config)
        ours = flux.FluxTransformer2DModel(flux.FluxParams(**config), AttentionBackend(backend))
    fill_at_unit_scale(reference, seed=0)
    reference.to(dtype)
    ours.to(dtype).load_state_dict(reference.state_dict())
    return ours.eval(), reference.eval()


def inputs(config, batch, grid, text_tokens, dtype, device="cpu", seed=0):
    """A request's tensors under the reference's names; `grid` is (rows, columns) of tokens."""
    params = flux.FluxParams(**config)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(device, dtype)

    guidance = torch.full([batch], 3.5, device=device) if params.guidance_embeds else None
    return {
        "hidden_states": normal(batch, grid[0] * grid[1], params.in_channels),
        "encoder_hidden_states": normal(batch, text_tokens, params.joint_attention_dim),
        "pooled_projections": normal(batch, params.pooled_projection_dim),
        "timestep": torch.full([batch], 0.7314, device=device).to(dtype),
        "img_ids": position_ids(*grid).to(device, dtype),
        "txt_ids": torch.zeros(text_tokens, 3, device=device, dtype=dtype),
        "guidance": guidance,
    }


@torch.inference_mode()
def run_reference(reference, request):
    return reference(**request, return_dict=False)[0]


@torch.inference_mode()
def run_ours(ours, request):
    return ours(*request.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("grid", "text"), [((4, 4), 512), ((6, 4), 7), ((4, 8), 1)])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("guidance", [True, False])
def test_forward_equals_the_reference(guidance, batch, grid, text, dtype):
    config = transformer_config(guidance)
    ours, reference = build_pair(config, dtype)
    request = inputs(config, batch, grid, text, dtype)
    expected = run_reference(reference, request)
    got = run_ours(ours, request)
    assert expected.std() > 0.1, "the reference's output is (nearly) constant"
    assert torch.equal(got, expected)


def test_half_precision_overflow_is_clipped_as_in_the_reference():
    config = transformer_config(True)
    ours, reference = build_pair(config, torch.float16)
    for model in (ours, reference):
        model.transformer_blocks[0].ff_context.net[2].weight.data.mul_(60000)
        model.single_transformer_blocks[0].proj_out.weight.data.mul_(60000)
    clipped = []
    ours.transformer_blocks[0].register_forward_hook(
        lambda module, args, streams: clipped.append(streams[0].x)
    )
    ours.single_transformer_blocks[0].register_forward_hook(
        lambda module, args, stream: clipped.append(stream.x)
    )
    request = inputs(config, 1, (4, 4), 16, torch.float16)
    assert torch.equal(run_ours(ours, request), run_reference(reference, request))
    assert [x.abs().max().item() for x in clipped] == [65504, 65504], "nothing was clipped"


def test_guidance_acts_and_is_required_where_the_model_has_it():
    config = transformer_config(True)
    ours, _ = build_pair(config, torch.float32)
    request = inputs(config, 1, (4, 4), 8, torch.float32)
    other = {**request, "guidance": torch.tensor([7.0])}
    assert not torch.equal(run_ours(ours, request), run_ours(ours, other))
    with pytest.raises(AssertionError, match="guidance is given exactly when"):
        run_ours(ours, {**request, "guidance": None})


@pytest.mark.parametrize("guidance", [True, False])
def test_names_and_shapes_are_the_published_checkpoints(guidance):
    config = {"guidance_embeds": guidance}  # the defaults are FLUX.1's sizes
    ours, reference = build_meta_pair(config)
    assert ours == reference
    assert sum(map(torch.Size.numel, ours.values())) > 11.8e9


def build_meta_pair(config):
    with torch.device("meta"):
        ours = flux.FluxTransformer2DModel(flux.FluxParams(**config), AttentionBackend("flash"))
        reference = Reference(**config)
    return tuple({k: v.shape for k, v in m.state_dict().items()} for m in (ours, reference))


def test_axes_that_do_not_fit_the_head_are_refused():
    config = {**transformer_config(True), "axes_dims_rope": (8, 8, 8)}
    with pytest.raises(ValueError, match=r"axes_dims_rope: got \(8, 8, 8\) \(sum 24\).*32"):
        flux.FluxTransformer2DModel(flux.FluxParams(**config), AttentionBackend("flash"))


@pytest.mark.parametrize("axes", [(8, 12, 12), (16, 56, 56)])
def test_rotary_tables_equal_the_reference(axes):
    ids = torch.cat([torch.zeros(16, 3), position_ids(64, 96)])
    expected = FluxPosEmbed(theta=10000, axes_dim=axes)(ids)
    for got, table in zip(rope_tables(ids, axes), expected, strict=True):
        assert got.dtype == torch.float32 and torch.equal(got, table)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sinusoidal_embedding_equals_the_reference(dtype):
    values = torch.linspace(0, 3500, 101).to(dtype)
    reference = Timesteps(256, flip_sin_to_cos=True, downscale_freq_shift=0)
    assert torch.equal(sinusoidal_embedding(values), reference(values))


def norm_pair(ours, reference, width, dtype, device="cpu"):
    with torch.device(device):
        mine, theirs = ours(width), reference(width)
    fill_at_unit_scale(theirs, seed=1)
    mine.load_state_dict(theirs.state_dict())
    return mine.to(dtype), theirs.to(dtype)


def normal_inputs(width, rows, dtype, device="cpu", batch=1):
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(batch, rows, width, generator=generator) * 3 + 1
    emb = torch.randn(batch, width, generator=generator)
    return x.to(device, dtype), emb.to(device, dtype)


@torch.inference_mode()
def assert_norms_equal(mine, theirs, x, emb):
    got, expected = mine(x, emb), theirs(x, emb=emb)
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("ours", "reference"), NORMS)
def test_norm_equals_the_reference(ours, reference, dtype):
    pair = norm_pair(ours, reference, 96, dtype)
    assert_norms_equal(*pair, *normal_inputs(96, 33, dtype, batch=2))


# On the GPU, bfloat16, at FLUX.1's width.


@pytest.fixture
def fresh_gates():
    """Every verdict is formed in this test, on its own shapes."""
    for gate in all_gates():
        gate.reset()


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [4096, 512, 4608])
@pytest.mark.parametrize(("ours", "reference"), NORMS)
@pytest.mark.parametrize("fast", [False, True], ids=["eager", "fast"])
def test_norm_equals_the_reference_on_cuda(fresh_gates, fast, ours, reference, rows):
    pair = norm_pair(ours, reference, 3072, torch.bfloat16, "cuda")
    x, emb = normal_inputs(3072, rows, torch.bfloat16, "cuda")
    with fast_paths(fast):
        for _ in range(2):  # the call that verifies, and one after it
            assert_norms_equal(*pair, x, emb)
    state = flux.FLUX_LN_MODULATE.state()
    assert (state.fused_calls, state.eager_calls) == ((2, 0) if fast else (0, 0)), state


@pytest.fixture(scope="module")
def full_width():
    """(ours, diffusers') of FLUX.1-dev's width with four blocks, cuDNN attention in both."""
    pair = build_pair(FULL_WIDTH, torch.bfloat16, "cuda", backend="cudnn")
    pair[1].set_attention_backend("_native_cudnn")
    return pair


@pytest.mark.cuda
@pytest.mark.parametrize("grid", [(64, 64), (32, 48)], ids=["1024x1024", "768x512"])
def test_eager_forward_equals_the_reference_on_cuda(full_width, grid):
    ours, reference = full_width
    request = inputs(FULL_WIDTH, 1, grid, 512, torch.bfloat16, "cuda")
    with fast_paths(False):
        got = run_ours(ours, request)
    assert got.isfinite().all() and got.float().std() > 0.1
    assert torch.equal(got, run_reference(reference, request))


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("grid", "gelu"),
    [
        pytest.param((64, 64), flux.FLUX_LINEAR_GELU, id="1024x1024"),
        pytest.param((32, 48), flux.FLUX_LINEAR_GELU, id="768x512"),
        pytest.param((16, 16), flux.FLUX_GELU_CONCAT, id="256x256"),
    ],
)
def test_fast_paths_equal_eager_on_cuda(full_width, fresh_gates, grid, gelu):
    ours, _ = full_width
    request = inputs(FULL_WIDTH, 1, grid, 512, torch.bfloat16, "cuda")
    with fast_paths(False):
        expected = run_ours(ours, request)
    verifying, verified = run_ours(ours, request), run_ours(ours, request)
    assert torch.equal(verifying, expected) and torch.equal(verified, expected)
    for gate in (*SITES_ON_GPU, gelu):
        state = gate.state()
        assert state.status == "verified" and not state.eager_calls, state
