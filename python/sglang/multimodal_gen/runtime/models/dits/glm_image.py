"""The GLM-Image transformer, whole and top-down: model, block, attention, norms.

Module and parameter names are those of the diffusers checkpoint, so weights load unchanged. The
eager chain is `torch.equal` to `diffusers.GlmImageTransformer2DModel` 0.42.1 under the same
attention backend. Every fused site goes through one `_glm_*` function of `glm_sites.py`.

What does not change over the steps of an image (projected text, projected prior, rotary tables) is
made once by `condition` and `glm_rope_tables`, and handed to every `forward`.

Shape legend: B batch, C latent channels, h x w latent size, p patch size, S = (h / p) * (w / p)
image tokens, T text tokens, J = T + S joint tokens, D hidden, H heads, E head size, V conditioning
width, N layers, M tokens of condition images.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from sglang.kernels.ops.diffusion.fused_linear_gelu import mark_fused_gelu_site
from sglang.multimodal_gen.runtime.layers.attention import AttentionBackend
from sglang.multimodal_gen.runtime.layers.condition_memory import LayerMemory, layer_memory
from sglang.multimodal_gen.runtime.layers.linear_gelu import linear_gelu
from sglang.multimodal_gen.runtime.layers.packed_projections import project
from sglang.multimodal_gen.runtime.layers.rotary import Rope
from sglang.multimodal_gen.runtime.layers.stream import Stream
from sglang.multimodal_gen.runtime.layers.timestep_embedding import (
    SiluProjection,
    sinusoidal_embedding,
)
from sglang.multimodal_gen.runtime.models.dits.glm_sites import (  # noqa: F401 - names of glm_image
    GLM_GATED_LN_MODULATE,
    GLM_LINEAR_GELU,
    GLM_LN_MODULATE,
    GLM_QK_LAYERNORM,
    GLM_QK_NORM_ROPE,
    GLM_RESIDUAL_GATE_ADD,
    LN_EPS,
    _glm_ln_modulate,
    _glm_qk_layernorm,
    _glm_qk_norm_rope,
    _glm_residual_gate_add,
    _glm_stream_norm,
)

ROPE_THETA = 10000.0
ADALN_ROWS = 12  # shift, scale, gate of two sites in two streams


@dataclass(frozen=True, kw_only=True)
class GlmImageParams:
    """`transformer/config.json`; the defaults are the reference's."""

    patch_size: int = 2
    in_channels: int = 16
    out_channels: int = 16
    num_layers: int = 30
    attention_head_dim: int = 40
    num_attention_heads: int = 64
    text_embed_dim: int = 1472
    time_embed_dim: int = 512
    condition_dim: int = 256
    prior_vq_quantizer_codebook_size: int = 16384

    @property
    def hidden(self) -> int:
        return self.num_attention_heads * self.attention_head_dim


class GlmImageTransformer2DModel(nn.Module):
    """Predicts the flow velocity of latents from glyph text and prior image tokens."""

    Params = GlmImageParams

    def __init__(self, params: GlmImageParams, attention: AttentionBackend) -> None:
        super().__init__()
        if params.attention_head_dim % 4:
            raise ValueError(
                f"attention_head_dim: got {params.attention_head_dim}, expected a multiple of 4"
                " (rows and columns each rotate pairs of channels)"
            )
        self.params = params
        self.attention = attention
        dim = params.hidden
        self.image_projector = GlmImageProjector(params.in_channels, dim, params.patch_size)
        self.glyph_projector = GlmFeedForward(GlmGELU(params.text_embed_dim, dim), dim)
        self.prior_token_embedding = nn.Embedding(params.prior_vq_quantizer_codebook_size, dim)
        self.prior_projector = GlmFeedForward(GlmLinearSilu(dim, dim), dim)
        self.time_condition_embed = GlmTimeConditionEmbed(
            params.time_embed_dim, params.condition_dim
        )
        self.transformer_blocks = nn.ModuleList(
            GlmImageTransformerBlock(params, attention) for _ in range(params.num_layers)
        )
        self.norm_out = GlmImageAdaLayerNormContinuous(dim, params.time_embed_dim)
        self.proj_out = nn.Linear(dim, params.patch_size**2 * params.out_channels)

    def condition(
        self, glyphs: torch.Tensor, prior_ids: torch.Tensor, *, drop_prior: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What every step of an image shares: text [B, T, D] and prior [B, S, D], projected.

        glyphs [B, T, text_embed_dim] in the model's dtype; prior_ids int64 [B, S] codebook indices.
        With `drop_prior` (the unconditional branch) the prior's embedding is zeroed.
        """
        prior = self.prior_token_embedding(prior_ids)
        if drop_prior:
            prior = prior * 0.0
        return self.glyph_projector(glyphs), self.prior_projector(prior)

    def remember(
        self, latents: torch.Tensor, prior_ids: torch.Tensor, rope: Rope, pixels: tuple[int, int]
    ) -> torch.Tensor:
        """The keys and values [N, 2, 1, S, H, E] of a condition image, for `memory` of `forward`;
        of this rank's heads where ranks share them.

        latents [1, C, h, w] in the model's dtype; prior_ids int64 [1, S] of its own; `pixels` its
        (height, width). One forward without text at timestep 0; images do not see each other.
        """
        p = self.params
        no_glyphs = latents.new_zeros(1, 0, p.text_embed_dim)
        txt, prior = self.condition(no_glyphs, prior_ids, drop_prior=False)
        heads = p.num_attention_heads // self.attention.parts
        shape = (p.num_layers, 2, *prior.shape[:2], heads, p.attention_head_dim)
        memory = latents.new_empty(shape)
        start = torch.zeros(1, device=latents.device)
        size = torch.tensor([pixels], device=latents.device, dtype=torch.float32)
        self(latents, txt, prior, start, size, rope, memory, writes_memory=True)
        return memory

    def forward(
        self,
        latents: torch.Tensor,
        txt: torch.Tensor,
        prior: torch.Tensor,
        timestep: torch.Tensor,
        target_size: torch.Tensor,
        rope: Rope,
        memory: torch.Tensor | None = None,
        writes_memory: bool = False,
    ) -> torch.Tensor:
        """Velocity of `latents`.

        latents [B, C, h, w] in the model's dtype; txt [B, T, D] and prior [B, S, D] of `condition`;
        timestep float32 [B] in 0..999; target_size [B, 2] (height, width) in pixels; rope of
        `glm_rope_tables`; memory [N, 2, B, M, H, E] of `remember`. Returns [B, C, h, w].
        """
        # embed inputs and conditioning; the prior is added token by token
        img = self.image_projector(latents) + prior
        vec = self.time_condition_embed(timestep, target_size, img.dtype)

        # with sequence parallelism: from here on this rank's tokens of both streams
        share = self.attention.share(img.device, txt.shape[1], img.shape[1])
        txt, img = share.local(txt, 0), share.local(img, 1)
        rope = tuple(share.local(table, 1, dim=0) for table in rope)

        # dual-stream blocks with shared attention and feed-forward weights
        img, txt = Stream(img), Stream(txt)
        for i, block in enumerate(self.transformer_blocks):
            kept = layer_memory(memory, i, writing=writes_memory)
            img, txt = block(img, txt, vec, rope, kept)

        # project image tokens back to latents
        img = share.whole(self.proj_out(self.norm_out.modulate(img, vec)), 1)
        return unpatchify(img, latents.shape[-2], latents.shape[-1], self.params.patch_size)


def unpatchify(tokens: torch.Tensor, height: int, width: int, patch: int) -> torch.Tensor:
    """[B, S, C p p] -> [B, C, height, width]; height and width are those of the latents."""
    grid = tokens.unflatten(1, (height // patch, width // patch))
    grid = grid.unflatten(-1, (-1, patch, patch))
    return grid.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)


def glm_rope_tables(rows: int, columns: int, head_dim: int) -> Rope:
    """Rotary tables of an image of rows x columns tokens: (cos, sin), float32 [S, E] on the CPU.

    A quarter of the channels turns with the row, a quarter with the column, and both halves of the
    head share the angles; the sines of the first half are negated. Formed in float32 on the CPU, as
    the reference does on every device.
    """
    half = head_dim // 2
    exponents = torch.arange(0, half, 2, dtype=torch.float32) / half
    frequencies = 1.0 / (ROPE_THETA**exponents)
    row_angles = torch.outer(torch.arange(rows), frequencies)[:, None].expand(-1, columns, -1)
    column_angles = torch.outer(torch.arange(columns), frequencies)[None].expand(rows, -1, -1)
    angles = torch.cat([row_angles, column_angles], dim=-1)
    angles = angles.reshape(rows * columns, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


class GlmTimeConditionEmbed(nn.Module):
    """Conditioning vector: timestep + crop corner and target size."""

    def __init__(self, time_embed_dim: int, condition_dim: int) -> None:
        super().__init__()
        self.time_embed_dim = time_embed_dim
        self.condition_dim = condition_dim
        self.timestep_embedder = SiluProjection(time_embed_dim, time_embed_dim)
        self.condition_embedder = SiluProjection(4 * condition_dim, time_embed_dim)

    def forward(
        self, timestep: torch.Tensor, target_size: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """timestep [B], target_size [B, 2]; the crop corner is (0, 0). Returns [B, V]."""
        time = sinusoidal_embedding(timestep, self.time_embed_dim)
        corner_and_size = torch.cat([torch.zeros_like(target_size), target_size], dim=1)
        sizes = sinusoidal_embedding(corner_and_size.flatten(), self.condition_dim)
        sizes = sizes.view(target_size.shape[0], -1)
        vec = self.timestep_embedder(time.to(dtype)) + self.condition_embedder(sizes.to(dtype))
        return F.silu(vec)


class GlmImageProjector(nn.Module):
    """Patches of p x p latents to tokens."""

    def __init__(self, in_channels: int, hidden: int, patch_size: int) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.proj = nn.Linear(in_channels * patch_size**2, hidden)

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        """[B, C, h, w] -> [B, S, D]."""
        b, c, h, w = latents.shape
        p = self.patch_size
        patches = latents.reshape(b, c, h // p, p, w // p, p).permute(0, 2, 4, 1, 3, 5)
        return self.proj(patches.flatten(3, 5).flatten(1, 2))


class GlmImageTransformerBlock(nn.Module):
    """Image and text with modulations of their own, one attention and one feed-forward."""

    def __init__(self, params: GlmImageParams, attention: AttentionBackend) -> None:
        super().__init__()
        dim = params.hidden
        self.norm1 = GlmImageAdaLayerNormZero(params.time_embed_dim, dim)
        self.attn1 = GlmImageAttention(params, attention)
        self.ff = GlmFeedForward(GlmTanhGELU(dim, 4 * dim), dim)

    def forward(
        self,
        img: Stream,
        txt: Stream,
        vec: torch.Tensor,
        rope: Rope,
        memory: LayerMemory | None = None,
    ) -> tuple[Stream, Stream]:
        """img [B, S, D], txt [B, T, D], vec [B, V]. Returns (img, txt)."""
        # modulate both streams for attention
        img_row, txt_row = self.norm1.rows(vec)
        img_norm, img = _glm_stream_norm(img, img_row.scale_msa, img_row.shift_msa)
        txt_norm, txt = _glm_stream_norm(txt, txt_row.scale_msa, txt_row.shift_msa)

        # attention over the joint sequence
        img_attn, txt_attn = self.attn1(img_norm, txt_norm, rope, memory)

        # feed-forward, stream by stream
        img = self._feed_forward(img, img_attn, img_row)
        return img, self._feed_forward(txt, txt_attn, txt_row)

    def _feed_forward(self, x: torch.Tensor, attn: torch.Tensor, row: "ModulationRows") -> Stream:
        """The norm takes the gated attention on the way, and leaves the gated MLP to the next."""
        norm, x = _glm_stream_norm(Stream(x, attn, row.gate_msa), row.scale_mlp, row.shift_mlp)
        return Stream(x, self.ff(norm), row.gate_mlp)


class ModulationRows(NamedTuple):
    """Of one stream in one block, each [B, D]."""

    shift_msa: torch.Tensor
    scale_msa: torch.Tensor
    gate_msa: torch.Tensor
    shift_mlp: torch.Tensor
    scale_mlp: torch.Tensor
    gate_mlp: torch.Tensor


class GlmImageAdaLayerNormZero(nn.Module):
    """Modulated LayerNorm of both streams; no SiLU before its linear, rows of the two in turn."""

    def __init__(self, embedding_dim: int, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(embedding_dim, ADALN_ROWS * dim)

    def rows(self, vec: torch.Tensor) -> tuple[ModulationRows, ModulationRows]:
        """vec [B, V]. Returns those of img and of txt."""
        rows = self.linear(vec).chunk(ADALN_ROWS, dim=1)
        return ModulationRows(*rows[::2]), ModulationRows(*rows[1::2])

    def forward(
        self, img: torch.Tensor, txt: torch.Tensor, vec: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """img [B, S, D], txt [B, T, D], vec [B, V].

        Returns (img, gate_msa, shift_mlp, scale_mlp, gate_mlp) and the same five of txt.
        """
        img_row, txt_row = self.rows(vec)
        img = _glm_ln_modulate(img, img_row.scale_msa, img_row.shift_msa)
        txt = _glm_ln_modulate(txt, txt_row.scale_msa, txt_row.shift_msa)
        return img, *img_row[2:], txt, *txt_row[2:]


class GlmImageAdaLayerNormContinuous(nn.Module):
    """The last norm. Its linear gives scale first, then shift, and has no activation before it."""

    def __init__(self, dim: int, embedding_dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(embedding_dim, 2 * dim)

    def forward(self, x: torch.Tensor, vec: torch.Tensor) -> torch.Tensor:
        """x [B, S, D], vec [B, V]. Returns [B, S, D]."""
        return self.modulate(Stream(x), vec)

    def modulate(self, x: Stream, vec: torch.Tensor) -> torch.Tensor:
        """The same of a stream."""
        scale, shift = self.linear(vec).chunk(2, dim=1)
        return _glm_stream_norm(x, scale, shift)[0]


class GlmImageAttention(nn.Module):
    """Attention over text and image with normalised queries and keys; only the image is rotated.

    `to_out.1` is the reference's dropout, which does nothing here.
    """

    PACKED = (("to_q", "to_k", "to_v"),)

    def __init__(self, params: GlmImageParams, attention: AttentionBackend) -> None:
        super().__init__()
        dim = params.hidden
        self.head_dim = params.attention_head_dim
        self.attention = attention
        self.to_q, self.to_k, self.to_v = (nn.Linear(dim, dim) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(dim, dim), nn.Identity()])

    def forward(
        self,
        img: torch.Tensor,
        txt: torch.Tensor,
        rope: Rope,
        memory: LayerMemory | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """img [B, S, D], txt [B, T, D] -> (img, txt), projected."""
        # text comes first in the joint sequence
        text_tokens = txt.shape[1]
        joint = torch.cat([txt, img], dim=1)
        q, k, v = map(self._heads, project(joint, self.to_q, self.to_k, self.to_v))
        q, k = _glm_qk_norm_rope(q, k, text_tokens, rope)
        out = self.to_out[0](self.attention(q, k, v, memory))
        txt, img = out.split_with_sizes([text_tokens, img.shape[1]], dim=1)
        return img, txt

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.head_dim))


class GlmFeedForward(nn.Module):
    """Activated projection, then a linear. `net.1` is the reference's dropout."""

    def __init__(self, activated_projection: nn.Module, dim: int) -> None:
        super().__init__()
        inner = activated_projection.proj.out_features
        self.net = nn.ModuleList([activated_projection, nn.Identity(), nn.Linear(inner, dim)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net[2](self.net[0](x))


class GlmTanhGELU(nn.Module):
    """Projection and tanh-GELU, a site of `quality="high"`."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.proj = nn.Linear(in_features, out_features)
        mark_fused_gelu_site(self, "proj")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear_gelu(GLM_LINEAR_GELU, self, self.proj, x)


class GlmGELU(nn.Module):
    """Projection and exact GELU."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.proj = nn.Linear(in_features, out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.proj(x))


class GlmLinearSilu(nn.Module):
    """Projection and SiLU."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.proj = nn.Linear(in_features, out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(self.proj(x))
