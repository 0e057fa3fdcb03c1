"""The FLUX.1 transformer, whole and top-down: model, blocks, attention, norms.

Module and parameter names are those of the diffusers checkpoint, so weights load unchanged. The
eager chain is `torch.equal` to `diffusers.FluxTransformer2DModel` 0.42.1 under the same attention
backend. Every fused site goes through one `_flux_*` function of `flux_sites.py`.

Shape legend: B batch, S image tokens, T text tokens, J = T + S joint tokens, D hidden,
H heads, E head size, C packed latent channels, M = 4 D mlp hidden.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from sglang.kernels.ops.diffusion.fused_linear_gelu import (
    can_fuse_linear_gelu,
    fused_gelu_active,
    fused_linear_gelu_tanh,
    mark_fused_gelu_site,
)
from sglang.kernels.ops.diffusion.fused_ln_modulate import mark_fused_ln_modulate_site
from sglang.multimodal_gen.runtime.distributed.parallel_state import Axis
from sglang.multimodal_gen.runtime.distributed.tensor_parallel import (
    RowParallelLinear,
    column_parallel,
)
from sglang.multimodal_gen.runtime.layers.attention import AttentionBackend
from sglang.multimodal_gen.runtime.layers.linear_gelu import linear_gelu, takes_linear_gelu
from sglang.multimodal_gen.runtime.layers.packed_projections import project
from sglang.multimodal_gen.runtime.layers.rotary import Rope, rope_tables
from sglang.multimodal_gen.runtime.layers.stream import Stream
from sglang.multimodal_gen.runtime.layers.timestep_embedding import (
    SiluProjection,
    sinusoidal_embedding,
)
from sglang.multimodal_gen.runtime.models.dits.flux_sites import (  # noqa: F401 - names of flux
    FLUX_GATED_LN_MODULATE,
    FLUX_GELU_CONCAT,
    FLUX_JOINT_QK_NORM_ROPE,
    FLUX_JOINT_VALUES,
    FLUX_LINEAR_GELU,
    FLUX_LN_MODULATE,
    FLUX_MODULATE,
    FLUX_QK_NORM_ROPE,
    FLUX_RESIDUAL_GATE_ADD,
    LN_EPS,
    _flux_added_up,
    _flux_attn_and_mlp,
    _flux_clipped,
    _flux_gelu_concat,
    _flux_joint_qk_norm_rope,
    _flux_joint_values,
    _flux_ln_modulate,
    _flux_modulate,
    _flux_qk_norm_rope,
    _flux_residual_gate_add,
    _flux_stream_norm,
)

WHOLE_WEIGHTS = Axis()  # no tensor parallelism
PLAIN_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, kw_only=True)
class FluxParams:
    """`transformer/config.json`; the defaults are the reference's."""

    patch_size: int = 1
    in_channels: int = 64
    out_channels: int | None = None
    num_layers: int = 19
    num_single_layers: int = 38
    attention_head_dim: int = 128
    num_attention_heads: int = 24
    joint_attention_dim: int = 4096
    pooled_projection_dim: int = 768
    guidance_embeds: bool = False
    axes_dims_rope: tuple[int, ...] = (16, 56, 56)

    @property
    def hidden(self) -> int:
        return self.num_attention_heads * self.attention_head_dim


class FluxTransformer2DModel(nn.Module):
    """Predicts the flow velocity of packed latents."""

    Params = FluxParams

    def __init__(
        self, params: FluxParams, attention: AttentionBackend, tp: Axis = WHOLE_WEIGHTS
    ) -> None:
        """With `tp` ranks each holds some heads and MLP columns of every block."""
        super().__init__()
        axes, head = params.axes_dims_rope, params.attention_head_dim
        if sum(axes) != head or any(dim % 2 for dim in axes):
            raise ValueError(
                f"axes_dims_rope: got {axes} (sum {sum(axes)}), expected even sizes that sum to"
                f" attention_head_dim = {head}"
            )
        self.params = params
        self.attention = attention
        dim = params.hidden
        self.time_text_embed = FluxTimeTextEmbed(
            dim, params.pooled_projection_dim, params.guidance_embeds
        )
        self.context_embedder = nn.Linear(params.joint_attention_dim, dim)
        self.x_embedder = nn.Linear(params.in_channels, dim)
        self.transformer_blocks = nn.ModuleList(
            FluxTransformerBlock(params, attention, tp) for _ in range(params.num_layers)
        )
        self.single_transformer_blocks = nn.ModuleList(
            FluxSingleTransformerBlock(params, attention, tp)
            for _ in range(params.num_single_layers)
        )
        self.norm_out = FluxAdaLayerNormContinuous(dim)
        out_channels = params.out_channels or params.in_channels
        self.proj_out = nn.Linear(dim, params.patch_size**2 * out_channels)

    def forward(
        self,
        img: torch.Tensor,
        txt: torch.Tensor,
        pooled: torch.Tensor,
        timestep: torch.Tensor,
        img_ids: torch.Tensor,
        txt_ids: torch.Tensor,
        guidance: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Velocity of `img`.

        img [B, S, C], txt [B, T, joint_attention_dim], pooled [B, pooled_projection_dim], in the
        model's dtype; timestep [B] in 0..1; img_ids [S, 3], txt_ids [T, 3] positions; guidance [B]
        float32, given exactly when the model has a guidance embedding; rows [B, R] what
        `modulation_rows` gives for them, where it is at hand. Returns [B, S, C].
        """
        # embed inputs; the conditioning becomes one modulation row for each norm
        img, txt = self.x_embedder(img), self.context_embedder(txt)
        if rows is None:
            rows = self.modulation_rows(timestep, guidance, pooled)
        row = iter(rows.split([norm.linear.out_features for norm in self.norms()], dim=-1))

        # with sequence parallelism: from here on this rank's tokens of both streams
        share = self.attention.share(img.device, txt.shape[1], img.shape[1])
        txt, img = share.local(txt, 0), share.local(img, 1)
        txt_ids, img_ids = share.local(txt_ids, 0, dim=0), share.local(img_ids, 1, dim=0)

        # one rotary table a step, shared by every attention layer
        rope = rope_tables(torch.cat((txt_ids, img_ids), dim=0), self.params.axes_dims_rope)

        # dual-stream blocks
        text_tokens, txt, img = txt.shape[1], Stream(txt), Stream(img)
        for block in self.transformer_blocks:
            txt, img = block(img, txt, next(row), next(row), rope)

        # single-stream blocks run over the joint sequence, text first
        joint = Stream(torch.cat([_flux_added_up(txt), _flux_added_up(img)], dim=1))
        for block in self.single_transformer_blocks:
            joint = block(joint, next(row), rope)

        # project image tokens back to latents
        img = Stream(_flux_added_up(joint)[:, text_tokens:])
        img, _ = self.norm_out.modulate(img, next(row))
        return share.whole(self.proj_out(img), 1)

    def modulation_rows(
        self, timestep: torch.Tensor, guidance: torch.Tensor | None, pooled: torch.Tensor
    ) -> torch.Tensor:
        """The modulation of every norm, in the order of `norms`: [B, R]. No pixel goes into it.

        Arguments as in `forward`.
        """
        return self.rows_of(self.conditioning(timestep, guidance, pooled))

    def conditioning(
        self, timestep: torch.Tensor, guidance: torch.Tensor | None, pooled: torch.Tensor
    ) -> torch.Tensor:
        """[B, D]; timestep and guidance are rounded before the factor 1000."""
        timestep = timestep.to(pooled.dtype) * 1000
        if guidance is not None:
            guidance = guidance.to(pooled.dtype) * 1000
        return F.silu(self.time_text_embed(timestep, guidance, pooled))

    def rows_of(self, vec: torch.Tensor) -> torch.Tensor:
        """The rows [B, R] of conditioning [B, D]."""
        return torch.cat([norm.linear(vec) for norm in self.norms()], dim=-1)

    def norms(self) -> Iterator["FluxAdaLayerNorm"]:
        """The norms that the conditioning modulates, in the order of `forward`."""
        for block in self.transformer_blocks:
            yield from (block.norm1, block.norm1_context)
        yield from (block.norm for block in self.single_transformer_blocks)
        yield self.norm_out

    def hoisted_layers(self) -> Iterator[nn.Linear]:
        """Layers of blocks that run before them: those that make the modulation rows."""
        return (norm.linear for norm in self.norms())


class FluxTimeTextEmbed(nn.Module):
    """Conditioning vector: timestep (+ guidance) + pooled text."""

    def __init__(self, dim: int, pooled_dim: int, guidance_embeds: bool) -> None:
        super().__init__()
        self.timestep_embedder = SiluProjection(256, dim)
        self.guidance_embedder = SiluProjection(256, dim) if guidance_embeds else None
        self.text_embedder = SiluProjection(pooled_dim, dim)

    def forward(
        self, timestep: torch.Tensor, guidance: torch.Tensor | None, pooled: torch.Tensor
    ) -> torch.Tensor:
        """timestep, guidance: [B] times 1000; pooled: [B, pooled_dim]. Returns [B, D]."""
        assert (guidance is None) == (self.guidance_embedder is None), (
            "guidance is given exactly when the model has a guidance embedding"
        )
        vec = self.timestep_embedder(sinusoidal_embedding(timestep).to(pooled.dtype))
        if self.guidance_embedder is not None:
            vec = vec + self.guidance_embedder(sinusoidal_embedding(guidance).to(pooled.dtype))
        return vec + self.text_embedder(pooled)


class FluxTransformerBlock(nn.Module):
    """Dual-stream block: image and text have their own weights and meet in attention."""

    def __init__(
        self, params: FluxParams, attention: AttentionBackend, tp: Axis = WHOLE_WEIGHTS
    ) -> None:
        super().__init__()
        dim = params.hidden
        self.norm1 = FluxAdaLayerNormZero(dim)
        self.norm1_context = FluxAdaLayerNormZero(dim)
        self.attn = FluxAttention(params, attention, joint=True)
        self.norm2 = FluxModulatedLayerNorm(dim)
        self.ff = _feed_forward(dim, tp)
        self.norm2_context = FluxModulatedLayerNorm(dim)
        self.ff_context = _feed_forward(dim, tp)
        if tp.size > 1:
            self.attn.cut(tp)

    def forward(
        self,
        img: Stream,
        txt: Stream,
        img_row: torch.Tensor,
        txt_row: torch.Tensor,
        rope: Rope,
    ) -> tuple[Stream, Stream]:
        """img [B, S, D], txt [B, T, D], modulation rows [B, 6 D]. Returns (txt, img)."""
        # modulate both streams for attention
        img_norm, img, img_gate, *img_mlp_rows = self.norm1.modulate(img, img_row)
        txt_norm, txt, txt_gate, *txt_mlp_rows = self.norm1_context.modulate(txt, txt_row)

        # attention over the joint sequence
        img_attn, txt_attn = self.attn.forward_joint(img_norm, txt_norm, rope)

        # image stream; the norm takes the gated attention on the way
        shift, scale, gate = img_mlp_rows
        norm, img = self.norm2.of(Stream(img, img_attn, img_gate), scale, shift)
        img = Stream(img, self.ff(norm), gate)

        # text stream
        shift, scale, gate = txt_mlp_rows
        norm, txt = self.norm2_context.of(Stream(txt, txt_attn, txt_gate), scale, shift)
        return _flux_clipped(Stream(txt, self.ff_context(norm), gate)), img


class FluxSingleTransformerBlock(nn.Module):
    """Single-stream block: attention and MLP in parallel over the joint sequence."""

    def __init__(
        self, params: FluxParams, attention: AttentionBackend, tp: Axis = WHOLE_WEIGHTS
    ) -> None:
        super().__init__()
        dim = params.hidden
        self.norm = FluxAdaLayerNormZeroSingle(dim)
        self.proj_mlp = nn.Linear(dim, 4 * dim)
        self.proj_out = nn.Linear(5 * dim, dim)
        self.attn = FluxAttention(params, attention, joint=False)
        if tp.size > 1:
            self.attn.cut(tp)
            self.proj_mlp = column_parallel(self.proj_mlp, tp)
            self.proj_out = RowParallelLinear(self.proj_out, tp, (dim, 4 * dim))
        _mark_plain_gelu_site(self, "proj_mlp")

    def forward(self, joint: Stream, row: torch.Tensor, rope: Rope) -> Stream:
        """joint [B, J, D], modulation row [B, 3 D]."""
        norm, joint, gate = self.norm.modulate(joint, row)
        attention = self.attn.begin(norm, rope)
        exact = self.attn.attention.parts == 1 and takes_linear_gelu(
            FLUX_LINEAR_GELU, self.proj_mlp, norm, attention()
        )
        if not exact and fused_gelu_active(self) and can_fuse_linear_gelu(self.proj_mlp, norm):
            mlp = fused_linear_gelu_tanh(norm, self.proj_mlp.weight, self.proj_mlp.bias)
            out = self._project_apart(attention(), mlp)
        else:
            out = self.proj_out(_flux_attn_and_mlp(attention, self.proj_mlp, norm, exact))
        return _flux_clipped(Stream(joint, out, gate))

    def _project_apart(self, attn: torch.Tensor, mlp: torch.Tensor) -> torch.Tensor:
        """`proj_out` of the two without joining them: on an H200 24 us more than one GEMM, where
        the join takes 72 us. For `quality="high"`, as the sum is rounded between the two."""
        if type(self.proj_out) is not nn.Linear:  # quantized, or a part of one
            return self.proj_out(torch.cat([attn, mlp], dim=2))
        of_attn, of_mlp = self.proj_out.weight.split([attn.shape[2], mlp.shape[2]], dim=1)
        out = F.linear(attn, of_attn, self.proj_out.bias)
        return torch.addmm(out.flatten(0, 1), mlp.flatten(0, 1), of_mlp.t()).view_as(out)


class FluxAttention(nn.Module):
    """Multi-head attention with RMS-normalised, rotated queries and keys.

    `joint=True` adds the text stream's projections and the output projections.
    """

    def __init__(self, params: FluxParams, attention: AttentionBackend, *, joint: bool) -> None:
        super().__init__()
        dim, head = params.hidden, params.attention_head_dim
        self.head_dim = head
        self.joint = joint
        self.attention = attention
        self.norm_q = nn.RMSNorm(head, eps=LN_EPS)
        self.norm_k = nn.RMSNorm(head, eps=LN_EPS)
        self.to_q, self.to_k, self.to_v = (nn.Linear(dim, dim) for _ in range(3))
        self.PACKED = (("to_q", "to_k", "to_v"),)
        if joint:
            # values of two streams are written into one buffer instead, which spares a join
            self.PACKED = (("to_q", "to_k"), ("add_q_proj", "add_k_proj"))
            self.to_out = nn.ModuleList([nn.Linear(dim, dim)])
            self.norm_added_q = nn.RMSNorm(head, eps=LN_EPS)
            self.norm_added_k = nn.RMSNorm(head, eps=LN_EPS)
            self.add_q_proj, self.add_k_proj, self.add_v_proj = (
                nn.Linear(dim, dim) for _ in range(3)
            )
            self.to_add_out = nn.Linear(dim, dim)

    def begin(self, x: torch.Tensor, rope: Rope) -> Callable[[], torch.Tensor]:
        """One stream, no output projection. x [B, J, D] -> [B, J, D], returned by the call."""
        q, k, v = map(self._heads, project(x, self.to_q, self.to_k, self.to_v))
        q, k = _flux_qk_norm_rope(q, k, self.norm_q.weight, self.norm_k.weight, rope)
        return self.attention.begin(q, k, v)

    def forward_joint(
        self, img: torch.Tensor, txt: torch.Tensor, rope: Rope
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Two streams. img [B, S, D], txt [B, T, D] -> (img, txt), projected."""
        q, k = map(self._heads, project(img, self.to_q, self.to_k))
        txt_q, txt_k = map(self._heads, project(txt, self.add_q_proj, self.add_k_proj))
        v = self._heads(_flux_joint_values(txt, img, self.add_v_proj, self.to_v))

        # text comes first in the joint sequence
        norms = (self.norm_added_q, self.norm_added_k, self.norm_q, self.norm_k)
        q, k = _flux_joint_qk_norm_rope(txt_q, txt_k, q, k, *(n.weight for n in norms), rope)
        out = self.attention(q, k, v)

        txt_out, img_out = out.split_with_sizes([txt.shape[1], img.shape[1]], dim=1)
        return self.to_out[0](img_out.contiguous()), self.to_add_out(txt_out.contiguous())

    def cut(self, tp: Axis) -> None:
        """Keep this rank's heads; comes before the weights are loaded."""
        to_heads = ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj")
        for name in to_heads if self.joint else to_heads[:3]:
            setattr(self, name, column_parallel(getattr(self, name), tp))
        if self.joint:
            self.to_out[0] = RowParallelLinear(self.to_out[0], tp)
            self.to_add_out = RowParallelLinear(self.to_add_out, tp)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.head_dim))


class FluxFeedForward(nn.Module):
    """Linear, tanh-GELU, linear. `net.1` is the reference's dropout, which does nothing here."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.net = nn.ModuleList(
            [FluxFusedGELUProj(nn.Linear(dim, 4 * dim)), nn.Identity(), nn.Linear(4 * dim, dim)]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net[2](self.net[0](x))


class FluxFusedGELUProj(nn.Module):
    """Up-projection and tanh-GELU. Re-homes a linear as `.proj`: its path stays `net.0.proj`."""

    def __init__(self, proj: nn.Linear) -> None:
        super().__init__()
        self.proj = proj
        _mark_plain_gelu_site(self, "proj")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear_gelu(FLUX_LINEAR_GELU, self, self.proj, x)


class FluxGELU(FluxFusedGELUProj):
    """The same for this rank's columns of an MLP that is cut over `tp` ranks."""

    def __init__(self, proj: nn.Linear, tp: Axis) -> None:
        super().__init__(column_parallel(proj, tp))


class FluxParallelFeedForward(nn.Module):
    """`FluxFeedForward` over `tp` ranks: columns of the first linear, rows of the second."""

    def __init__(self, dim: int, tp: Axis) -> None:
        super().__init__()
        up, down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.net = nn.ModuleList([FluxGELU(up, tp), nn.Identity(), RowParallelLinear(down, tp)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net[2](self.net[0](x))


def _feed_forward(dim: int, tp: Axis) -> nn.Module:
    return FluxFeedForward(dim) if tp.size == 1 else FluxParallelFeedForward(dim, tp)


class FluxModulatedLayerNorm(nn.Module):
    """LayerNorm without affine, then `* (1 + scale) + shift`. Holds no parameters."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim
        mark_fused_ln_modulate_site(self)

    def forward(self, x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        """x [B, L, D], scale and shift [B, D]. Returns [B, L, D]."""
        return _flux_ln_modulate(self, x, scale, shift)

    def of(
        self, x: Stream, scale: torch.Tensor, shift: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(x normed, x added up)."""
        return _flux_stream_norm(self, x, scale, shift)


class FluxAdaLayerNorm(nn.Module):
    """Modulated LayerNorm whose rows come from the conditioning vector."""

    ROWS: int

    def __init__(self, embedding_dim: int) -> None:
        super().__init__()
        self.silu = nn.SiLU()
        self.linear = nn.Linear(embedding_dim, self.ROWS * embedding_dim)
        self.norm = FluxModulatedLayerNorm(embedding_dim)

    def forward(
        self, x: torch.Tensor, emb: torch.Tensor
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """x [B, L, D], emb [B, D]. Returns x normed, and the rows that are left."""
        normed, _, *rows = self.modulate(Stream(x), self.linear(self.silu(emb)))
        return (normed, *rows) if rows else normed


class FluxAdaLayerNormZero(FluxAdaLayerNorm):
    """Six rows: shift, scale, gate, once for attention and once for the MLP."""

    ROWS = 6

    def modulate(self, x: Stream, row: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """x [B, L, D], row [B, 6 D]. Returns (normed, x, gate_msa, shift, scale, gate_mlp)."""
        shift, scale, *rows = row.chunk(6, dim=1)
        return *self.norm.of(x, scale, shift), *rows


class FluxAdaLayerNormZeroSingle(FluxAdaLayerNorm):
    """Three rows: shift, scale, gate."""

    ROWS = 3

    def modulate(self, x: Stream, row: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """x [B, L, D], row [B, 3 D]. Returns (normed, x, gate)."""
        shift, scale, gate = row.chunk(3, dim=1)
        return *self.norm.of(x, scale, shift), gate


class FluxAdaLayerNormContinuous(FluxAdaLayerNorm):
    """The last norm. Its linear gives scale first, then shift: the checkpoint's order."""

    ROWS = 2

    def modulate(self, x: Stream, row: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """x [B, L, D], row [B, 2 D]. Returns (normed, x)."""
        scale, shift = row.chunk(2, dim=1)
        return self.norm.of(x, scale, shift)


def _mark_plain_gelu_site(module: nn.Module, linear_name: str) -> None:
    """Quantized linears (a subclass, or a weight that is not a plain float) are never marked."""
    linear = module.get_submodule(linear_name)
    if type(linear) is nn.Linear and linear.weight.dtype in PLAIN_DTYPES:
        mark_fused_gelu_site(module, linear_name)
