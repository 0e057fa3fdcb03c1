"""The ERNIE-Image transformer, whole and top-down: model, block, attention, norms, fused sites.

Module and parameter names are those of the diffusers checkpoint, so weights load unchanged. In
float32 the chain is that of `diffusers.ErnieImageTransformer2DModel` 0.42.1. In half precision a
norm rounds once and each operation of its modulation rounds again; diffusers rounds within the norm
and computes the modulation in float32. Every fused site goes through one `_ernie_*` function at the
end of the file.

Shape legend: B batch, C latent channels, S image tokens, T text tokens, J = S + T joint tokens, the
image first, D hidden, H heads, E head size.
"""

from dataclasses import dataclass

import torch
from torch import nn

from sglang.kernels.ops.diffusion.bitexact_gate import BitExactFusionGate
from sglang.kernels.ops.diffusion.gelu_mul import (
    can_use_gelu_mul_cuda,
    gelu_mul_cuda,
    gelu_mul_reference,
)
from sglang.kernels.ops.diffusion.residual_gate_add import (
    can_use_residual_gate_add_cuda,
    residual_gate_add_cuda,
    residual_gate_add_reference,
)
from sglang.kernels.ops.diffusion.triton.qk_rmsnorm_rotate_half import (
    can_use_fused_qk_rmsnorm_rotate_half,
    fused_qk_rmsnorm_rotate_half,
    qk_rmsnorm_rotate_half_reference,
)
from sglang.kernels.ops.diffusion.triton.rmsnorm_scale_shift_bitexact import (
    can_use_fused_rmsnorm_scale_shift,
    fused_rmsnorm_scale_shift_bitexact,
    fused_scale_residual_rmsnorm_scale_shift_bitexact,
)
from sglang.multimodal_gen.runtime.layers.attention import AttentionBackend
from sglang.multimodal_gen.runtime.layers.fused_site import run_site, takes
from sglang.multimodal_gen.runtime.layers.layernorm import (
    ARITHMETIC_OF_BACKEND,
    RMSNorm,
    rms_norm,
)
from sglang.multimodal_gen.runtime.layers.packed_projections import project
from sglang.multimodal_gen.runtime.layers.rotary import Rope
from sglang.multimodal_gen.runtime.layers.stream import Stream
from sglang.multimodal_gen.runtime.layers.timestep_embedding import (
    SiluProjection,
    sinusoidal_embedding,
)

ERNIE_NORM_SCALE_SHIFT = BitExactFusionGate("ernie.norm_scale_shift", per_signature=True)
ERNIE_GATED_NORM_SCALE_SHIFT = BitExactFusionGate(
    "ernie.gated_norm_scale_shift", per_signature=True
)
ERNIE_RESIDUAL_GATE_ADD = BitExactFusionGate("ernie.residual_gate_add", per_signature=True)
ERNIE_QK_NORM_ROPE = BitExactFusionGate("ernie.qk_norm_rope", per_signature=True)
ERNIE_GELU_MUL = BitExactFusionGate("ernie.gelu_mul", per_signature=True)


@dataclass(frozen=True, kw_only=True)
class ErnieImageParams:
    """`transformer/config.json`; the defaults are the reference's."""

    hidden_size: int = 3072
    num_attention_heads: int = 24
    num_layers: int = 24
    ffn_hidden_size: int = 8192
    in_channels: int = 128
    out_channels: int = 128
    patch_size: int = 1
    text_in_dim: int = 2560
    rope_theta: int = 256
    rope_axes_dim: tuple[int, ...] = (32, 48, 48)
    eps: float = 1e-6
    qk_layernorm: bool = True

    def __post_init__(self) -> None:
        if self.hidden_size != self.head_size * self.num_attention_heads:
            raise ValueError(
                f"hidden_size: got {self.hidden_size}, expected a multiple of"
                f" num_attention_heads = {self.num_attention_heads}"
            )
        if len(self.rope_axes_dim) != 3 or sum(self.rope_axes_dim) != self.head_size:
            raise ValueError(
                f"rope_axes_dim: got {self.rope_axes_dim}, expected 3 numbers with a sum of"
                f" hidden_size / num_attention_heads = {self.head_size}"
            )
        if not self.qk_layernorm:
            raise ValueError("qk_layernorm: got False, expected True, as the reference does")

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_attention_heads


class ErnieImageTransformer2DModel(nn.Module):
    """Predicts the flow velocity of latents, given one prompt's text embedding."""

    Params = ErnieImageParams

    def __init__(self, params: ErnieImageParams, attention: AttentionBackend) -> None:
        super().__init__()
        self.params = params
        self.attention = attention
        dim = params.hidden_size
        self.x_embedder = ErnieImagePatchEmbed(params.in_channels, dim, params.patch_size)
        self.text_proj = (
            nn.Linear(params.text_in_dim, dim, bias=False) if params.text_in_dim != dim else None
        )
        self.time_embedding = SiluProjection(dim, dim)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))
        self.layers = nn.ModuleList(
            ErnieImageBlock(params, attention) for _ in range(params.num_layers)
        )
        self.final_norm = ErnieImageFinalNorm(dim, params.eps)
        self.final_linear = nn.Linear(dim, params.patch_size**2 * params.out_channels)

    def forward(self, img: torch.Tensor, txt: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        """Velocity of `img`.

        img [B, C, h, w], txt [B, T, text_in_dim] without padding, in the model's dtype; timestep
        [B] in 0..1000. Returns [B, out_channels, h, w].
        """
        # embed image and text, one sequence, the image first
        rows, columns = (side // self.params.patch_size for side in img.shape[2:])
        text = txt if self.text_proj is None else self.text_proj(txt)
        joint = torch.cat([self.x_embedder(img), text], dim=1)

        # one rotary table a step, shared by every attention layer
        rope = rope_tables(rows, columns, txt.shape[1], self.params, img.device, img.dtype)

        # with sequence parallelism: from here on this rank's tokens
        share = self.attention.share(img.device, joint.shape[1])
        joint, rope = share.local(joint), tuple(share.local(table, dim=0) for table in rope)

        # six modulation rows [B, 1, D], the same in every block; this embedding has sines first
        cosines, sines = sinusoidal_embedding(timestep, self.params.hidden_size).chunk(2, dim=-1)
        vec = self.time_embedding(torch.cat([sines, cosines], dim=-1).to(img.dtype))
        modulation = self.adaLN_modulation(vec)[:, None].chunk(6, dim=-1)

        # a block leaves its MLP's gated sum to the norm that comes next
        stream = Stream(joint)
        for block in self.layers:
            stream = block(stream, modulation, rope)
        joint = _ernie_residual_gate_add(*stream)

        # project image tokens back to latents
        tokens = share.whole(self.final_linear(self.final_norm(joint, vec)))
        return self._unpatchify(tokens[:, : rows * columns], rows, columns)

    def _unpatchify(self, tokens: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        p = self.params.patch_size
        patches = tokens.unflatten(2, (p, p, -1)).unflatten(1, (rows, columns))
        return patches.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)


class ErnieImagePatchEmbed(nn.Module):
    """Patches of latents to tokens, row by row."""

    def __init__(self, in_channels: int, dim: int, patch_size: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_channels, dim, kernel_size=patch_size, stride=patch_size)

    def forward(self, img: torch.Tensor) -> torch.Tensor:
        """[B, C, h, w] -> [B, S, D]."""
        return self.proj(img).flatten(2).transpose(1, 2).contiguous()


class ErnieImageBlock(nn.Module):
    """Attention and MLP over the joint sequence, each behind a modulated RMSNorm and a gate."""

    def __init__(self, params: ErnieImageParams, attention: AttentionBackend) -> None:
        super().__init__()
        self.adaLN_sa_ln = RMSNorm(params.hidden_size, params.eps)
        self.self_attention = ErnieImageAttention(params, attention)
        self.adaLN_mlp_ln = RMSNorm(params.hidden_size, params.eps)
        self.mlp = ErnieImageFeedForward(params.hidden_size, params.ffn_hidden_size)

    def forward(self, x: Stream, modulation: tuple[torch.Tensor, ...], rope: Rope) -> Stream:
        """x [B, J, D], modulation six rows [B, 1, D]."""
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = modulation

        # attention
        norm, x = _ernie_stream_norm(self.adaLN_sa_ln, x, scale_msa, shift_msa)
        attn = self.self_attention(norm, rope)

        # MLP; its norm takes the gated attention on the way
        norm, x = _ernie_gated_norm_scale_shift(
            self.adaLN_mlp_ln, x, attn, gate_msa, scale_mlp, shift_mlp
        )
        return Stream(x, self.mlp(norm), gate_mlp)


class ErnieImageAttention(nn.Module):
    """Multi-head attention with RMS-normalised, rotated queries and keys; no biases."""

    PACKED = (("to_q", "to_k", "to_v"),)

    def __init__(self, params: ErnieImageParams, attention: AttentionBackend) -> None:
        super().__init__()
        dim, head = params.hidden_size, params.head_size
        self.head_size = head
        self.attention = attention
        self.norm_q = nn.RMSNorm(head, eps=params.eps)
        self.norm_k = nn.RMSNorm(head, eps=params.eps)
        self.to_q, self.to_k, self.to_v = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(dim, dim, bias=False)])

    def forward(self, x: torch.Tensor, rope: Rope) -> torch.Tensor:
        """x [B, J, D] -> [B, J, D]."""
        q, k, v = (
            part.unflatten(-1, (-1, self.head_size))
            for part in project(x, self.to_q, self.to_k, self.to_v)
        )
        q, k = _ernie_qk_norm_rope(self.norm_q, self.norm_k, q, k, rope)
        return self.to_out[0](self.attention(q, k, v))


class ErnieImageFeedForward(nn.Module):
    """Two projections up, one of them through GELU, their product down; no biases."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.linear_fc2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear_fc2(_ernie_gelu_mul(self.up_proj(x), self.gate_proj(x)))


class ErnieImageFinalNorm(nn.Module):
    """The last norm, a LayerNorm. Its linear gives scale first, then shift."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim, elementwise_affine=False, eps=eps)
        self.linear = nn.Linear(dim, 2 * dim)

    def forward(self, x: torch.Tensor, vec: torch.Tensor) -> torch.Tensor:
        """x [B, J, D], vec [B, D]. Returns [B, J, D]."""
        scale, shift = self.linear(vec)[:, None].chunk(2, dim=-1)
        return self.norm(x) * (1 + scale) + shift


def rope_tables(
    rows: int,
    columns: int,
    text_tokens: int,
    params: ErnieImageParams,
    device: torch.device,
    dtype: torch.dtype,
) -> Rope:
    """Cosine and sine of the joint sequence, each [J, 1, E] of `dtype`; angles are float32.

    An image token stands at (text_tokens, row, column), text token t at (t, 0, 0). Each angle
    stands twice, side by side, though the rotation pairs channels half a head apart: it looks wrong
    and is what the checkpoints were trained with.
    """
    grid = torch.meshgrid(
        torch.full([1], float(text_tokens), device=device),
        torch.arange(rows, dtype=torch.float32, device=device),
        torch.arange(columns, dtype=torch.float32, device=device),
        indexing="ij",
    )
    text = torch.zeros(text_tokens, 3, device=device)
    text[:, 0] = torch.arange(text_tokens, device=device)
    ids = torch.cat([torch.stack(grid, dim=-1).reshape(-1, 3), text])
    axes = []
    for axis, dim in enumerate(params.rope_axes_dim):
        exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
        axes.append(torch.outer(ids[:, axis], 1.0 / (params.rope_theta**exponents)))
    angles = torch.cat(axes, dim=-1).repeat_interleave(2, dim=-1)[:, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


# Fused sites: the fused op where its predicate allows and its gate has proven it, else eager.


def _ernie_stream_norm(
    norm: RMSNorm, x: Stream, scale: torch.Tensor, shift: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(x) * (1 + scale) + shift, x added up)."""
    if x.update is None:
        return _ernie_norm_scale_shift(norm, x.x, scale, shift), x.x
    return _ernie_gated_norm_scale_shift(norm, *x, scale, shift)


def _ernie_norm_scale_shift(
    norm: RMSNorm, x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor
) -> torch.Tensor:
    """norm(x) * (1 + scale) + shift. x [B, J, D], rows [B, 1, D]; one site a forward."""
    args = (x, norm.weight, scale, shift)
    arithmetic = ARITHMETIC_OF_BACKEND[norm.backend]
    usable = takes(can_use_fused_rmsnorm_scale_shift, *args, norm=arithmetic)
    return run_site(
        ERNIE_NORM_SCALE_SHIFT,
        _fused_norm_scale_shift if usable else None,
        _norm_scale_shift,
        *args,
        norm.eps,
        norm.backend,
    )


def _ernie_gated_norm_scale_shift(
    norm: RMSNorm,
    residual: torch.Tensor,
    update: torch.Tensor,
    gate: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """residual = residual + gate * update, then the norm of it -> (out, residual).

    residual, update [B, J, D], rows [B, 1, D]; two sites a block, one in the first. Where the one
    kernel does not run, its two halves may: each is a site of its own.
    """
    usable = takes(
        can_use_fused_rmsnorm_scale_shift,
        residual,
        norm.weight,
        scale,
        shift,
        update=update,
        gate=gate,
        norm=ARITHMETIC_OF_BACKEND[norm.backend],
    )
    if usable and not ERNIE_GATED_NORM_SCALE_SHIFT.disabled:
        fused, reference = _fused_gated_norm_scale_shift, _gated_norm_scale_shift
        args = (residual, update, gate, norm.weight, scale, shift, norm.eps, norm.backend)
        return run_site(ERNIE_GATED_NORM_SCALE_SHIFT, fused, reference, *args)

    def in_two_sites(*rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        added = _ernie_residual_gate_add(*rows)
        return _ernie_norm_scale_shift(norm, added, scale, shift), added

    return run_site(ERNIE_GATED_NORM_SCALE_SHIFT, None, in_two_sites, residual, update, gate)


def _ernie_residual_gate_add(
    residual: torch.Tensor, update: torch.Tensor, gate: torch.Tensor
) -> torch.Tensor:
    """residual + gate * update. [B, J, D], gate [B, 1, D]; one site a forward, fp32 stays eager."""
    usable = residual.dtype != torch.float32 and takes(
        can_use_residual_gate_add_cuda, residual, update, gate
    )
    return run_site(
        ERNIE_RESIDUAL_GATE_ADD,
        residual_gate_add_cuda if usable else None,
        residual_gate_add_reference,
        residual,
        update,
        gate,
    )


def _ernie_qk_norm_rope(
    norm_q: nn.RMSNorm, norm_k: nn.RMSNorm, q: torch.Tensor, k: torch.Tensor, rope: Rope
) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k normalised head by head, then rotated. [B, J, H, E]; one site a block."""
    args = (q, k, norm_q.weight, norm_k.weight, *rope)
    usable = takes(can_use_fused_qk_rmsnorm_rotate_half, *args)
    fused = fused_qk_rmsnorm_rotate_half if usable else None
    return run_site(ERNIE_QK_NORM_ROPE, fused, qk_rmsnorm_rotate_half_reference, *args, norm_q.eps)


def _ernie_gelu_mul(up: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """up * gelu(gate). [B, J, F], halves of one projection or not; one site a block."""
    fused = gelu_mul_cuda if takes(can_use_gelu_mul_cuda, up, gate) else None
    return run_site(ERNIE_GELU_MUL, fused, gelu_mul_reference, up, gate)


def _norm_scale_shift(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
    backend: str,
) -> torch.Tensor:
    """The eager chain, with the norm that the layer dispatches to."""
    return rms_norm(x, weight, eps, backend) * (1 + scale) + shift


def _fused_norm_scale_shift(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
    backend: str,
) -> torch.Tensor:
    arithmetic = ARITHMETIC_OF_BACKEND[backend]
    return fused_rmsnorm_scale_shift_bitexact(x, weight, scale, shift, eps, arithmetic)


def _gated_norm_scale_shift(
    residual: torch.Tensor,
    update: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The eager chain, with the norm that the layer dispatches to."""
    residual = residual_gate_add_reference(residual, update, gate)
    return _norm_scale_shift(residual, weight, scale, shift, eps, backend), residual


def _fused_gated_norm_scale_shift(
    residual: torch.Tensor,
    update: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = (weight, scale, shift, eps, ARITHMETIC_OF_BACKEND[backend])
    return fused_scale_residual_rmsnorm_scale_shift_bitexact(residual, update, gate, *rows)
