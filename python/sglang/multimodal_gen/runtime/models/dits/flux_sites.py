"""The fused sites of FLUX.1: one function a kind of site, each with its gate.

A site runs its fused op where the op's predicate allows and its gate has proven it equal, else the
eager chain. Shapes as in `flux.py`, which re-exports every name.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from sglang.kernels.ops.diffusion.bitexact_gate import BitExactFusionGate
from sglang.kernels.ops.diffusion.fused_ln_modulate import (
    can_fuse_ln_modulate,
    fused_ln_modulate,
    fused_ln_modulate_active,
)
from sglang.kernels.ops.diffusion.gelu_tanh_concat import (
    can_use_gelu_tanh_concat_cuda,
    gelu_tanh_concat_cuda,
    gelu_tanh_concat_reference,
)
from sglang.kernels.ops.diffusion.modulate_scale_shift import (
    can_use_modulate_scale_shift_cuda,
    modulate_scale_shift_cuda,
    modulate_scale_shift_reference,
)
from sglang.kernels.ops.diffusion.residual_gate_add import (
    can_use_residual_gate_add_cuda,
    residual_gate_add_cuda,
    residual_gate_add_reference,
)
from sglang.kernels.ops.diffusion.triton.layernorm_modulate import (
    can_use_fused_layernorm_modulate,
    fused_layernorm_modulate,
    layernorm_modulate_reference,
)
from sglang.kernels.ops.diffusion.triton.qk_rmsnorm_rope import (
    can_use_fused_joint_qk_rmsnorm_rope,
    can_use_fused_qk_rmsnorm_rope,
    fused_joint_qk_rmsnorm_rope,
    fused_qk_rmsnorm_rope,
    joint_qk_rmsnorm_rope_reference,
    qk_rmsnorm_rope_reference,
)
from sglang.multimodal_gen.runtime.layers.fused_site import run_site, takes
from sglang.multimodal_gen.runtime.layers.gated_norm import gated_ln_modulate
from sglang.multimodal_gen.runtime.layers.linear_gelu import fused_linear_gelu
from sglang.multimodal_gen.runtime.layers.rotary import Rope
from sglang.multimodal_gen.runtime.layers.stream import Stream

if TYPE_CHECKING:
    from sglang.multimodal_gen.runtime.models.dits.flux import FluxModulatedLayerNorm

LN_EPS = 1e-6
FP16_MAX = 65504

FLUX_RESIDUAL_GATE_ADD = BitExactFusionGate("flux.residual_gate_add", per_signature=True)
FLUX_LN_MODULATE = BitExactFusionGate("flux.layernorm_modulate", per_signature=True)
FLUX_GATED_LN_MODULATE = BitExactFusionGate("flux.gated_layernorm_modulate", per_signature=True)
FLUX_MODULATE = BitExactFusionGate("flux.modulate_scale_shift", per_signature=True)
FLUX_QK_NORM_ROPE = BitExactFusionGate("flux.qk_rmsnorm_rope", per_signature=True)
FLUX_JOINT_QK_NORM_ROPE = BitExactFusionGate("flux.joint_qk_rmsnorm_rope", per_signature=True)
FLUX_JOINT_VALUES = BitExactFusionGate("flux.joint_values", per_signature=True)
FLUX_GELU_CONCAT = BitExactFusionGate("flux.gelu_tanh_concat", per_signature=True)
FLUX_LINEAR_GELU = BitExactFusionGate("flux.linear_gelu", per_signature=True)


def _flux_residual_gate_add(
    residual: torch.Tensor, update: torch.Tensor, gate: torch.Tensor
) -> torch.Tensor:
    """residual + gate * update. [B, L, D], gate [B, 1, D]; 3 sites a step, fp32 stays eager."""
    usable = residual.dtype != torch.float32 and takes(
        can_use_residual_gate_add_cuda, residual, update, gate
    )
    return run_site(
        FLUX_RESIDUAL_GATE_ADD,
        residual_gate_add_cuda if usable else None,
        residual_gate_add_reference,
        residual,
        update,
        gate,
    )


def _flux_modulate(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """x * (1 + scale) + shift. x [B, L, D], rows [B, D]."""
    usable = takes(can_use_modulate_scale_shift_cuda, x, scale, shift)
    return run_site(
        FLUX_MODULATE,
        modulate_scale_shift_cuda if usable else None,
        modulate_scale_shift_reference,
        x,
        scale,
        shift,
    )


def _flux_ln_modulate(
    site: "FluxModulatedLayerNorm", x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor
) -> torch.Tensor:
    """LayerNorm and modulate, 4 sites a step: in one bit-exact kernel; else, under a mounted
    `quality="high"`, folded into the affine; else LayerNorm and the modulate site."""
    usable = takes(can_use_fused_layernorm_modulate, x, scale, shift)
    if usable and not FLUX_LN_MODULATE.disabled:
        args = (x, scale, shift, LN_EPS)
        return run_site(
            FLUX_LN_MODULATE, fused_layernorm_modulate, layernorm_modulate_reference, *args
        )
    if fused_ln_modulate_active(site) and can_fuse_ln_modulate(x, scale, shift):
        return fused_ln_modulate(x, scale, shift, LN_EPS)
    return run_site(FLUX_LN_MODULATE, None, _ln_then_modulate, x, scale, shift)


def _ln_then_modulate(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    return _flux_modulate(F.layer_norm(x, (x.shape[-1],), eps=LN_EPS), scale, shift)


def _flux_qk_norm_rope(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, rope: Rope
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm over each head, then rotation. q, k [B, J, H, E]; 38 sites a step."""
    args = (q, k, q_weight, k_weight, *rope)
    fused = fused_qk_rmsnorm_rope if takes(can_use_fused_qk_rmsnorm_rope, *args) else None
    return run_site(FLUX_QK_NORM_ROPE, fused, qk_rmsnorm_rope_reference, *args, LN_EPS)


def _flux_joint_qk_norm_rope(
    txt_q: torch.Tensor,
    txt_k: torch.Tensor,
    img_q: torch.Tensor,
    img_k: torch.Tensor,
    txt_q_weight: torch.Tensor,
    txt_k_weight: torch.Tensor,
    img_q_weight: torch.Tensor,
    img_k_weight: torch.Tensor,
    rope: Rope,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same over two streams, joined text first. [B, T|S, H, E] -> [B, J, H, E]; 19 sites."""
    weights = (txt_q_weight, txt_k_weight, img_q_weight, img_k_weight)
    args = (txt_q, txt_k, img_q, img_k, *weights, *rope)
    usable = takes(can_use_fused_joint_qk_rmsnorm_rope, *args)
    return run_site(
        FLUX_JOINT_QK_NORM_ROPE,
        fused_joint_qk_rmsnorm_rope if usable else None,
        joint_qk_rmsnorm_rope_reference,
        *args,
        LN_EPS,
    )


def _flux_joint_values(
    txt: torch.Tensor, img: torch.Tensor, txt_proj: nn.Module, img_proj: nn.Module
) -> torch.Tensor:
    """cat([txt_proj(txt), img_proj(img)]): two GEMMs into one buffer, on the GPU. txt [B, T, D],
    img [B, S, D] -> [B, J, N]; 19 sites a step."""

    def joined(txt: torch.Tensor, img: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return torch.cat([txt_proj(txt), img_proj(img)], dim=1)

    plain = all(type(proj) is nn.Linear and proj.bias is not None for proj in (txt_proj, img_proj))
    usable = plain and txt.is_cuda and len(txt) == 1 and txt.dtype == img_proj.weight.dtype
    parameters = [p for proj in (txt_proj, img_proj) for p in proj.parameters()] if plain else []
    return run_site(
        FLUX_JOINT_VALUES, _project_into_one if usable else None, joined, txt, img, *parameters
    )


def _project_into_one(
    txt: torch.Tensor,
    img: torch.Tensor,
    txt_weight: torch.Tensor,
    txt_bias: torch.Tensor,
    img_weight: torch.Tensor,
    img_bias: torch.Tensor,
) -> torch.Tensor:
    tokens = txt.shape[1]
    out = img.new_empty(1, tokens + img.shape[1], len(img_weight))
    torch.addmm(txt_bias, txt[0], txt_weight.t(), out=out[0, :tokens])
    torch.addmm(img_bias, img[0], img_weight.t(), out=out[0, tokens:])
    return out


def _flux_attn_and_mlp(
    attention: Callable[[], torch.Tensor], proj_mlp: nn.Module, x: torch.Tensor, in_one: bool
) -> torch.Tensor:
    """cat([attention(), gelu(proj_mlp(x))]). x [B, J, D] -> [B, J, D + M]; 38 sites a step.

    `in_one` asks for one kernel of projection, GELU and join, which takes them. Otherwise the
    projection runs first, while ranks exchange heads for attention.
    """
    if in_one:
        return fused_linear_gelu(FLUX_LINEAR_GELU, proj_mlp, x, attention())
    mlp = proj_mlp(x)
    return _flux_gelu_concat(attention(), mlp)


def _flux_gelu_concat(attn: torch.Tensor, mlp: torch.Tensor) -> torch.Tensor:
    """cat([attn, gelu(mlp)]). attn [B, J, D], mlp [B, J, M]; 38 sites a step."""
    usable = takes(can_use_gelu_tanh_concat_cuda, attn, mlp)
    fused = gelu_tanh_concat_cuda if usable else None
    return run_site(FLUX_GELU_CONCAT, fused, gelu_tanh_concat_reference, attn, mlp)


def _flux_stream_norm(
    site: "FluxModulatedLayerNorm", x: Stream, scale: torch.Tensor, shift: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(LayerNorm(x) * (1 + scale) + shift, x added up). x [B, L, D], rows [B, D]; 111 sites a step
    add up."""
    if x.update is None:
        return site(x.x, scale, shift), x.x
    args = (x, scale, shift, LN_EPS)
    return gated_ln_modulate(FLUX_GATED_LN_MODULATE, _flux_residual_gate_add, site, *args)


def _flux_added_up(x: Stream) -> torch.Tensor:
    """The tokens [B, L, D] of a stream."""
    return x.x if x.update is None else _flux_residual_gate_add(x.x, x.update, x.gate[:, None])


def _flux_clipped(x: Stream) -> Stream:
    """Half precision only: infinities of the residual stream become the largest finite value."""
    if x.x.dtype != torch.float16:
        return x
    return Stream(_flux_added_up(x).clip(-FP16_MAX, FP16_MAX))
