"""A gated residual sum, LayerNorm without affine and the adaLN modulation in one kernel; bit-exact.

Equals, bit for bit, the eager chain of an adaLN block on 16-bit tensors (no weight, no bias; rows
gate, scale, shift of a batch entry broadcast over its tokens):

    residual = residual + gate * update
    out      = F.layer_norm(residual, (D,), eps=eps) * (1 + scale) + shift

Numerical contract: `residual = round(residual + round(gate * update))`, both to nearest even in the
dtype of the tensors; the fp32 product and sum before them change no bit (see `ptx.add_gated`). What
follows is the contract of `layernorm_modulate`, whose kernel this is, with the residual as its x.
The sum stays in registers between its store and the norm.
"""

from typing import Any

import torch

from sglang.kernels.ops.diffusion.triton.layernorm_modulate import (
    MAX_HIDDEN,
    VECTOR,
    aot_of_rows,
    launch_rows,
    layernorm_modulate_reference,
    modulate_options,
    takes_rows,
)
from sglang.kernels.ops.diffusion.triton.row_launch import RowLaunch
from sglang.kernels.registration import describe, kernel_reads, register_op

LAUNCH = RowLaunch()  # with two rows of two inputs in registers only two programs fit
Pair = tuple[torch.Tensor, torch.Tensor]


def gated_layernorm_modulate_reference(
    residual: torch.Tensor,
    update: torch.Tensor,
    gate: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
) -> Pair:
    """The eager chain: residual, update `[B, S, D]`, rows `[B, D]` -> (out, new residual)."""
    residual = residual + gate[:, None] * update
    return layernorm_modulate_reference(residual, scale, shift, eps), residual


def can_use_fused_gated_layernorm_modulate(
    residual: torch.Tensor,
    update: torch.Tensor,
    gate: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
) -> bool:
    """Whether the fused kernel takes these inputs; otherwise run the eager chain."""
    return (
        kernel_reads(residual, update, gate, scale, shift)
        and takes_rows(residual, gate, scale, shift)
        and takes_rows(update)
        and update.shape == residual.shape
        and update.dtype == residual.dtype
        and update.device == residual.device
    )


def launch(
    residual: torch.Tensor,
    update: torch.Tensor,
    gate: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
    how: RowLaunch = LAUNCH,
) -> Pair:
    """The kernel, on inputs that the predicate took -> (out, new residual)."""
    out, residual_out = launch_rows(residual, update, gate, scale, shift, eps, how)
    assert residual_out is not None, "a launch with a gate gives the new residual"
    return out, residual_out


def _gated_layernorm_modulate(
    residual: torch.Tensor,
    update: torch.Tensor,
    gate: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
) -> Pair:
    tensors = (residual, update, gate, scale, shift)
    if not can_use_fused_gated_layernorm_modulate(*tensors):
        names = ("residual", "update", "gate", "scale", "shift")
        raise ValueError(
            "fused_gated_layernorm_modulate got "
            f"{describe(**dict(zip(names, tensors, strict=True)))}; it takes CUDA tensors of one "
            f"16-bit dtype, residual and update [B, S, D] with D % {VECTOR} == 0 and D <= "
            f"{MAX_HIDDEN}, rows [B, D], 16-byte aligned, last axis dense; test with "
            "can_use_fused_gated_layernorm_modulate and run gated_layernorm_modulate_reference "
            "otherwise"
        )
    return launch(*tensors, eps)


def _gated_layernorm_modulate_fake(
    residual: torch.Tensor,
    update: torch.Tensor,
    gate: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
) -> Pair:
    return residual.new_empty(residual.shape), residual.new_empty(residual.shape)


_op = register_op(
    "fused_gated_layernorm_modulate", _gated_layernorm_modulate, _gated_layernorm_modulate_fake
)


def fused_gated_layernorm_modulate(
    residual: torch.Tensor,
    update: torch.Tensor,
    gate: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
) -> Pair:
    """`gated_layernorm_modulate_reference` in one kernel, bit for bit -> (out, new residual).

    residual and update `[B, S, D]` (batch and sequence strides free), gate, scale and shift
    `[B, D]` (chunk views welcome), one 16-bit dtype -> two new contiguous `[B, S, D]`; the inputs
    are not changed. ValueError where the predicate says no.
    """
    return _op(residual, update, gate, scale, shift, eps)


def aot_signatures() -> list[tuple[Any, dict[str, str], dict[str, Any], dict[str, int]]]:
    """(kernel, signature, constants, options) of the shapes that the models use, and odd ones."""
    return [
        aot_of_rows(pointer, modulate_options(hidden, LAUNCH, gated=True), LAUNCH.warps)
        for pointer, hidden in [("*bf16", 3072), ("*bf16", 4096), ("*bf16", 8192), ("*fp16", 516)]
    ]
