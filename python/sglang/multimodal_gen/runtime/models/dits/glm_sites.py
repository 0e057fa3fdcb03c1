"""The fused sites of GLM-Image: one function a kind of site, each with its gate.

A site runs its fused op where the op's predicate allows and its gate has proven it equal, else the
eager chain. Shapes as in `glm_image.py`, which re-exports every name.
"""

import torch

from sglang.kernels.ops.diffusion.bitexact_gate import BitExactFusionGate
from sglang.kernels.ops.diffusion.residual_gate_add import (
    can_use_residual_gate_add_cuda,
    residual_gate_add_cuda,
    residual_gate_add_reference,
)
from sglang.kernels.ops.diffusion.triton.layernorm_modulate import (
    can_use_fused_layernorm_modulate,
    can_use_fused_qk_head_layernorm,
    fused_layernorm_modulate,
    fused_qk_head_layernorm,
    layernorm_modulate_reference,
    qk_head_layernorm_reference,
)
from sglang.kernels.ops.diffusion.triton.qk_layernorm_rope import (
    can_use_fused_qk_layernorm_rope,
    fused_qk_layernorm_rope,
    qk_layernorm_rope_reference,
    rotate_,
)
from sglang.multimodal_gen.runtime.layers.fused_site import run_site, takes
from sglang.multimodal_gen.runtime.layers.gated_norm import gated_ln_modulate
from sglang.multimodal_gen.runtime.layers.rotary import Rope
from sglang.multimodal_gen.runtime.layers.stream import Stream

LN_EPS = 1e-5

GLM_GATED_LN_MODULATE = BitExactFusionGate("glm_image.gated_layernorm_modulate", per_signature=True)
GLM_LINEAR_GELU = BitExactFusionGate("glm_image.linear_gelu", per_signature=True)
GLM_LN_MODULATE = BitExactFusionGate("glm_image.layernorm_modulate", per_signature=True)
GLM_QK_LAYERNORM = BitExactFusionGate("glm_image.qk_layernorm", per_signature=True)
GLM_QK_NORM_ROPE = BitExactFusionGate("glm_image.qk_norm_rope", per_signature=True)
GLM_RESIDUAL_GATE_ADD = BitExactFusionGate("glm_image.residual_gate_add", per_signature=True)


def _glm_stream_norm(
    x: Stream, scale: torch.Tensor, shift: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(LayerNorm(x) * (1 + scale) + shift, x added up). x [B, L, D], rows [B, D]; 119 sites a
    forward add up."""
    if x.update is None:
        return _glm_ln_modulate(x.x, scale, shift), x.x
    sites = (GLM_GATED_LN_MODULATE, _glm_residual_gate_add, _glm_ln_modulate)
    return gated_ln_modulate(*sites, x, scale, shift, LN_EPS)


def _glm_ln_modulate(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """LayerNorm(x) * (1 + scale) + shift. x [B, L, D], rows [B, D]; two sites a forward."""
    usable = takes(can_use_fused_layernorm_modulate, x, scale, shift)
    fused = fused_layernorm_modulate if usable else None
    args = (x, scale, shift, LN_EPS)
    return run_site(GLM_LN_MODULATE, fused, layernorm_modulate_reference, *args)


def _glm_qk_layernorm(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """LayerNorm over each head of q and k. [B, J, H, E]. New tensors."""
    fused = fused_qk_head_layernorm if takes(can_use_fused_qk_head_layernorm, q, k) else None
    return run_site(GLM_QK_LAYERNORM, fused, qk_head_layernorm_reference, q, k, LN_EPS)


def _glm_qk_norm_rope(
    q: torch.Tensor, k: torch.Tensor, text_tokens: int, rope: Rope
) -> tuple[torch.Tensor, torch.Tensor]:
    """The LayerNorm of both, then the rotation of the image's tokens. New [B, J, H, E]; 30 sites a
    forward. Where the one kernel does not run, that of the norm alone may: a site of its own.
    """
    args = (q, k, *rope, text_tokens)
    if takes(can_use_fused_qk_layernorm_rope, *args) and not GLM_QK_NORM_ROPE.disabled:
        fused, reference = fused_qk_layernorm_rope, qk_layernorm_rope_reference
        return run_site(GLM_QK_NORM_ROPE, fused, reference, *args, LN_EPS)

    def in_two_steps(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k = _glm_qk_layernorm(q, k)
        rotate_(q, text_tokens, rope)
        rotate_(k, text_tokens, rope)
        return q, k

    return run_site(GLM_QK_NORM_ROPE, None, in_two_steps, q, k)


def _glm_residual_gate_add(
    residual: torch.Tensor, update: torch.Tensor, gate: torch.Tensor
) -> torch.Tensor:
    """residual + gate * update. [B, L, D], gate [B, 1, D]; half of a site above."""
    usable = residual.dtype != torch.float32 and takes(
        can_use_residual_gate_add_cuda, residual, update, gate
    )
    return run_site(
        GLM_RESIDUAL_GATE_ADD,
        residual_gate_add_cuda if usable else None,
        residual_gate_add_reference,
        residual,
        update,
        gate,
    )
