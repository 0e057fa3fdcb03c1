"""The GLM-Image transformer and its fused sites against diffusers' with the same weights."""

import pytest
import torch
from diffusers import GlmImageTransformer2DModel as Reference
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers.transformer_glm_image import (
    GlmImageAdaLayerNormContinuous,
    GlmImageAdaLayerNormZero,
    GlmImageKVCache,
    GlmImageRotaryPosEmbed,
)

from sglang.kernels.ops.diffusion.bitexact_gate import all_gates, fast_paths
from sglang.kernels.ops.diffusion.triton.qk_layernorm_rope import rotate_
from sglang.multimodal_gen.runtime.layers.attention import AttentionBackend
from sglang.multimodal_gen.runtime.models.dits import glm_image
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.tiny_checkpoints import fill_at_unit_scale
from sglang.test.tiny_glm import glm_transformer_config

register_cpu_ci(est_time=15, suite="base-a-test-cpu")
register_cuda_ci(est_time=60, stage="base-b-kernel-unit", runner_config="1-gpu-large")

PUBLISHED = {"attention_head_dim": 128, "num_attention_heads": 32}
FULL_WIDTH = PUBLISHED | {"num_layers": 2}
SITES_ON_GPU = (
    glm_image.GLM_LN_MODULATE,
    glm_image.GLM_GATED_LN_MODULATE,
    glm_image.GLM_QK_NORM_ROPE,
    glm_image.GLM_LINEAR_GELU,
)
# x of the digest's shapes and the width of the conditioning vector
LN_SHAPES = [(1, 4096, 4096), (2, 301, 4096), (1, 1, 2560)]
QK_SHAPES = [(1, 4360, 32, 128), (2, 37, 3, 40), (1, 129, 5, 64)]


def build_pair(config, dtype, device="cpu", backend="flash"):
    """(ours, diffusers'), the same random weights in both."""
    with torch.device(device):
        reference = Reference(**config)
        params = glm_image.GlmImageParams(**config)
        ours = glm_image.GlmImageTransformer2DModel(params, AttentionBackend(backend))
    fill_at_unit_scale(reference, seed=0)
    reference.to(dtype)
    ours.to(dtype).load_state_dict(reference.state_dict())
    return ours.eval(), reference.eval()


def inputs(config, batch, grid, text_tokens, dtype, device="cpu", seed=0):
    """A request's tensors under the reference's names; `grid` is (rows, columns) of tokens."""
    params = glm_image.GlmImageParams(**config)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(device, dtype)

    codebook = params.prior_vq_quantizer_codebook_size
    ids = torch.randint(codebook, (batch, grid[0] * grid[1]), generator=generator)
    height, width = grid[0] * params.patch_size, grid[1] * params.patch_size
    return {
        "hidden_states": normal(batch, params.in_channels, height, width),
        "encoder_hidden_states": normal(batch, text_tokens, params.text_embed_dim),
        "prior_token_id": ids.to(device),
        "timestep": torch.full([batch], 730.0, device=device),
        "target_size": torch.tensor([[height * 8, width * 8]] * batch).to(device, dtype),
    }


@torch.inference_mode()
def run_reference(reference, request, drop):
    dropped = torch.full_like(request["prior_token_id"], drop, dtype=torch.bool)
    corner = torch.zeros_like(request["target_size"])
    extra = {"prior_token_drop": dropped, "crop_coords": corner, "return_dict": False}
    return reference(**request, **extra)[0]


@torch.inference_mode()
def run_ours(ours, request, drop, memory=None):
    latents, glyphs, ids, timestep, size = request.values()
    patch, device = ours.params.patch_size, latents.device
    grid = (latents.shape[2] // patch, latents.shape[3] // patch)
    tables = glm_image.glm_rope_tables(*grid, ours.params.attention_head_dim)
    rope = tuple(table.to(device) for table in tables)
    txt, prior = ours.condition(glyphs, ids, drop_prior=drop)
    return ours(latents, txt, prior, timestep, size, rope, memory)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("grid", "text"), [((4, 4), 64), ((6, 4), 7), ((4, 8), 1)])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("drop", [False, True])
def test_forward_equals_the_reference(drop, batch, grid, text, dtype):
    config = glm_transformer_config()
    ours, reference = build_pair(config, dtype)
    request = inputs(config, batch, grid, text, dtype)
    expected = run_reference(reference, request, drop)
    assert expected.std() > 0.1, "the reference's output is (nearly) constant"
    assert torch.equal(run_ours(ours, request, drop), expected)


@torch.inference_mode()
def remembered(ours, reference, conditions):
    """(memory, the reference's cache) of condition images: (latents, prior ids, (height, width))"""
    cache = GlmImageKVCache(num_layers=ours.params.num_layers)
    cache.set_mode("write")
    memories = []
    for latents, ids, pixels in conditions:
        grid = (latents.shape[2] // 2, latents.shape[3] // 2)
        rope = glm_image.glm_rope_tables(*grid, ours.params.attention_head_dim)
        memories.append(ours.remember(latents, ids, rope, pixels))
        request = {
            "hidden_states": latents,
            "encoder_hidden_states": latents.new_zeros(1, 0, ours.params.text_embed_dim),
            "prior_token_id": ids[0],
            "timestep": torch.zeros(1),
            "target_size": torch.tensor([pixels]),
            "kv_caches": cache,
        }
        run_reference(reference, request, False)
    return torch.cat(memories, dim=3), cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grids", [[(4, 4)], [(2, 6), (4, 2)]], ids=["one", "two"])
def test_condition_images_act_as_the_references_cache(grids, dtype):
    config = glm_transformer_config()
    ours, reference = build_pair(config, dtype)
    conditions = []
    for seed, (rows, columns) in enumerate(grids):
        made = inputs(config, 1, (rows, columns), 1, dtype, seed=seed + 5)
        pixels = (1056 * rows, 16 * columns)  # beyond what bfloat16 tells apart
        conditions.append((made["hidden_states"], made["prior_token_id"], pixels))
    memory, cache = remembered(ours, reference, conditions)
    cache.set_mode("read")
    request = inputs(config, 1, (6, 4), 7, dtype)
    expected = run_reference(reference, {**request, "kv_caches": cache}, False)
    got = run_ours(ours, request, False, memory)
    assert torch.equal(got, expected) and not torch.equal(got, run_ours(ours, request, False))


@pytest.mark.parametrize("name", ["encoder_hidden_states", "prior_token_id", "target_size"])
def test_every_condition_acts(name):
    config = glm_transformer_config()
    ours, _ = build_pair(config, torch.float32)
    request = inputs(config, 1, (4, 4), 8, torch.float32)
    other = {**request, name: request[name].flip(1) * 2 % 64}
    assert not torch.equal(run_ours(ours, request, False), run_ours(ours, other, False))


def test_a_dropped_prior_does_not_act():
    config = glm_transformer_config()
    ours, _ = build_pair(config, torch.float32)
    request = inputs(config, 1, (4, 4), 8, torch.float32)
    other = {**request, "prior_token_id": (request["prior_token_id"] + 1) % 64}
    assert torch.equal(run_ours(ours, request, True), run_ours(ours, other, True))


def test_names_and_shapes_are_the_published_checkpoints():
    with torch.device("meta"):
        params = glm_image.GlmImageParams(**PUBLISHED)
        ours = glm_image.GlmImageTransformer2DModel(params, AttentionBackend("flash"))
        reference = Reference(**PUBLISHED)
    shapes = [{k: v.shape for k, v in m.state_dict().items()} for m in (ours, reference)]
    assert shapes[0] == shapes[1]
    assert sum(map(torch.Size.numel, shapes[0].values())) > 6.9e9


def test_a_head_that_cannot_rotate_is_refused():
    params = glm_image.GlmImageParams(**{**glm_transformer_config(), "attention_head_dim": 30})
    with pytest.raises(ValueError, match="attention_head_dim: got 30, expected a multiple of 4"):
        glm_image.GlmImageTransformer2DModel(params, AttentionBackend("flash"))


@pytest.mark.parametrize("grid", [(64, 64), (32, 48), (3, 5)])
@pytest.mark.parametrize("head_dim", [128, 40])
def test_rotary_tables_equal_the_reference(grid, head_dim):
    latents = torch.empty(1, 1, 2 * grid[0], 2 * grid[1])
    cos, sin = GlmImageRotaryPosEmbed(head_dim, patch_size=2)(latents)
    sin[:, : head_dim // 2] *= -1  # the reference negates the partners instead
    for got, table in zip(glm_image.glm_rope_tables(*grid, head_dim), (cos, sin), strict=True):
        assert got.dtype == torch.float32 and torch.equal(got, table)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rotation_equals_the_reference(dtype):
    check_rotation((2, 24 + 5, 3, 40), (4, 6), dtype, "cpu")


def norm_pair(ours, reference, dtype, device, widths, **options):
    with torch.device(device):
        mine, theirs = ours(*widths), reference(*widths, **options)
    fill_at_unit_scale(theirs, seed=1)
    mine.load_state_dict(theirs.state_dict())
    return mine.to(dtype), theirs.to(dtype)


def normal(shape, dtype, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 3 + 1).to(device, dtype)


@torch.inference_mode()
def check_norm_zero(shape, dtype, device):
    """Both streams and all rows; the rows are strided chunks of one projection."""
    widths = (512, shape[2])
    mine, theirs = norm_pair(
        glm_image.GlmImageAdaLayerNormZero, GlmImageAdaLayerNormZero, dtype, device, widths
    )
    img, txt = normal(shape, dtype, device), normal((shape[0], 7, shape[2]), dtype, device, 1)
    vec = normal((shape[0], 512), dtype, device, 2)
    got, expected = mine(img, txt, vec), theirs(img, txt, vec)
    assert len(got) == len(expected) == 10
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


@torch.inference_mode()
def check_norm_continuous(shape, dtype, device):
    """The last norm."""
    mine, theirs = norm_pair(
        glm_image.GlmImageAdaLayerNormContinuous, GlmImageAdaLayerNormContinuous, dtype, device,
        (shape[2], 512), elementwise_affine=False,
    )  # fmt: skip
    x, vec = normal(shape, dtype, device), normal((shape[0], 512), dtype, device, 2)
    assert torch.equal(mine(x, vec), theirs(x, vec))


@torch.inference_mode()
def check_qk_norm(shape, dtype, device):
    """The norms of diffusers' attention: no affine."""
    q, k = normal(shape, dtype, device), normal(shape, dtype, device, 1)
    norm = torch.nn.LayerNorm(shape[-1], eps=1e-5, elementwise_affine=False)
    for got, x in zip(glm_image._glm_qk_layernorm(q, k), (q, k), strict=True):
        assert torch.equal(got, norm(x)) and got.data_ptr() != x.data_ptr()


@torch.inference_mode()
def check_gate_add(shape, dtype, device):
    """The reference multiplies the other way round, which has the same bits."""
    x, update = normal(shape, dtype, device), normal(shape, dtype, device, 1)
    gate = normal((shape[0], 1, shape[2]), dtype, device, 2)
    assert torch.equal(glm_image._glm_residual_gate_add(x, update, gate), x + update * gate)


@torch.inference_mode()
def check_rotation(shape, grid, dtype, device):
    """Text tokens first, which stay; then those of the grid."""
    x, head_dim = normal(shape, dtype, device), shape[-1]
    text = shape[1] - grid[0] * grid[1]
    latents = torch.empty(1, 1, 2 * grid[0], 2 * grid[1])
    tables = GlmImageRotaryPosEmbed(head_dim, patch_size=2)(latents)
    turned = apply_rotary_emb(x[:, text:], tables, sequence_dim=1, use_real_unbind_dim=-2)
    rope = tuple(t.to(device) for t in glm_image.glm_rope_tables(*grid, head_dim))
    expected = torch.cat([x[:, :text], turned], dim=1)
    rotate_(x, text, rope)
    assert torch.equal(x, expected) and x.dtype == dtype


MODULATE_CHECKS = [check_norm_zero, check_norm_continuous]
SMALL = (2, 33, 96)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("check", [*MODULATE_CHECKS, check_gate_add])
def test_site_equals_the_reference(check, dtype):
    check(SMALL, dtype, "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_qk_norm_equals_the_reference(dtype):
    check_qk_norm((2, 9, 3, 40), dtype, "cpu")


# On the GPU, bfloat16, at GLM-Image's width and the digest's shapes.


@pytest.fixture
def fresh_gates():
    """Every verdict is formed in this test, on its own shapes."""
    for gate in all_gates():
        gate.reset()


def assert_fused(gate, fast):
    state = gate.state()
    assert not state.eager_calls and (state.fused_calls > 0) is fast, state


@pytest.mark.cuda
@pytest.mark.parametrize("fast", [False, True], ids=["eager", "fast"])
@pytest.mark.parametrize("check", MODULATE_CHECKS)
@pytest.mark.parametrize("shape", LN_SHAPES)
def test_modulated_norm_equals_the_reference_on_cuda(fresh_gates, shape, check, fast):
    with fast_paths(fast):
        for _ in range(2):  # the call that verifies, and one after it
            check(shape, torch.bfloat16, "cuda")
    assert_fused(glm_image.GLM_LN_MODULATE, fast)


@pytest.mark.cuda
@pytest.mark.parametrize("fast", [False, True], ids=["eager", "fast"])
@pytest.mark.parametrize("shape", QK_SHAPES)
def test_qk_norm_equals_the_reference_on_cuda(fresh_gates, shape, fast):
    with fast_paths(fast):
        for _ in range(2):
            check_qk_norm(shape, torch.bfloat16, "cuda")
    assert_fused(glm_image.GLM_QK_LAYERNORM, fast)


@pytest.mark.cuda
@pytest.mark.parametrize("grid", [(64, 64), (32, 48), (5, 7)])
def test_rotation_equals_the_reference_on_cuda(grid):
    check_rotation((1, grid[0] * grid[1] + 9, 32, 128), grid, torch.bfloat16, "cuda")


@pytest.mark.cuda
@pytest.mark.parametrize("shape", [(1, 4096, 4096), (1, 264, 4096)])
def test_gate_add_equals_the_reference_on_cuda(fresh_gates, shape):
    for _ in range(2):
        check_gate_add(shape, torch.bfloat16, "cuda")
    assert_fused(glm_image.GLM_RESIDUAL_GATE_ADD, True)


@pytest.fixture(scope="module")
def full_width():
    """(ours, diffusers') of GLM-Image's width with two blocks, cuDNN attention in both."""
    pair = build_pair(FULL_WIDTH, torch.bfloat16, "cuda", backend="cudnn")
    pair[1].set_attention_backend("_native_cudnn")
    return pair


@pytest.mark.cuda
@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("grid", [(64, 64), (32, 48)], ids=["1024x1024", "512x768"])
def test_eager_forward_equals_the_reference_on_cuda(full_width, grid, drop):
    ours, reference = full_width
    request = inputs(FULL_WIDTH, 1, grid, 264, torch.bfloat16, "cuda")
    with fast_paths(False):
        got = run_ours(ours, request, drop)
    assert got.isfinite().all() and got.float().std() > 0.1
    assert torch.equal(got, run_reference(reference, request, drop))


@pytest.mark.cuda
@pytest.mark.parametrize("grid", [(64, 64), (32, 48)], ids=["1024x1024", "512x768"])
def test_fast_paths_equal_eager_on_cuda(full_width, fresh_gates, grid):
    ours, _ = full_width
    request = inputs(FULL_WIDTH, 1, grid, 264, torch.bfloat16, "cuda")
    with fast_paths(False):
        expected = run_ours(ours, request, False)
    verifying, verified = (run_ours(ours, request, False) for _ in range(2))
    assert torch.equal(verifying, expected) and torch.equal(verified, expected)
    for gate in SITES_ON_GPU:
        assert gate.state().status == "verified", gate.state()
        assert_fused(gate, True)
