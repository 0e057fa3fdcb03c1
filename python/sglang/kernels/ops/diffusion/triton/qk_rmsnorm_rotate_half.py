"""RMSNorm of q and k per head, then rotary embedding of half-split channels, rounded as eager does.

Equals, bit for bit, the eager chain of an attention block (all tensors of one 16-bit dtype):

    y   = F.rms_norm(x, (D,), weight, eps)                       aten's fused CUDA kernel
    y_1, y_2 = y.chunk(2, -1)
    out = y * cos + cat([-y_2, y_1], -1) * sin

Numerical contract: the norm is that of `qk_rmsnorm_rope.py`, rounded once to the dtype. Then, with
i < D / 2 and j = i + D / 2, both products and the sum are rounded to the dtype, each to nearest:

    out[i] = round(round(y[i] * cos[i]) - round(y[j] * sin[i]))
    out[j] = round(round(y[j] * cos[j]) + round(y[i] * sin[j]))

bf16 arithmetic stands in for fp32 where it provably gives the same bits (`ptx.rotate_rounded`).
Made after torch 2.11's `_fused_rms_norm` (sm_90, CUDA 13).

Shapes: q, k `[B, S, H, D]` with D of 16, 32, 64 or 128 and H <= 128, cos, sin `[S, 1, D]`,
weights `[D]`. q, k may be strided views (of a packed q|k|v projection, say) with contiguous heads;
outputs are contiguous and new.
"""

from typing import Any

import torch
import torch.nn.functional as F

from sglang.kernels.ops.diffusion.triton.head_streams import MAX_HEADS, new_heads, table_fits
from sglang.kernels.ops.diffusion.triton.qk_rotate_half import (
    HEAD_DIMS,
    QK,
    aot_signature,
    halves_fit,
    launch,
)
from sglang.kernels.registration import describe, register_op


def rotate_half(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x * cos + (-x_2, x_1) * sin with x_1, x_2 the halves of a head. x `[B, S, H, D]`."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def qk_rmsnorm_rotate_half_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
) -> QK:
    """The eager chain: q, k `[B, S, H, D]` -> the same shapes, normed and rotated."""
    q = F.rms_norm(q, q.shape[-1:], q_weight, eps)
    k = F.rms_norm(k, k.shape[-1:], k_weight, eps)
    return rotate_half(q, cos, sin), rotate_half(k, cos, sin)


def can_use_fused_qk_rmsnorm_rotate_half(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> bool:
    """Whether the fused kernel takes these inputs; otherwise run the eager chain."""
    if not halves_fit(q, k, q_weight, k_weight):
        return False
    shape = (q.shape[1], 1, q.shape[3])
    return all(table_fits(table, shape, q, q.dtype) for table in (cos, sin))


def _qk_rmsnorm_rotate_half(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    if not can_use_fused_qk_rmsnorm_rotate_half(q, k, q_weight, k_weight, cos, sin):
        got = describe(q=q, k=k, q_weight=q_weight, k_weight=k_weight, cos=cos, sin=sin)
        raise ValueError(
            f"fused_qk_rmsnorm_rotate_half got {got}; expected CUDA (sm_80 or newer) tensors of "
            f"one 16-bit dtype: q, k [B, S, H, D] of one shape and stride with D one of {HEAD_DIMS}"
            f", H of {MAX_HEADS} at most, contiguous heads and 16-byte aligned rows, weights [D], "
            "contiguous cos, sin [S, 1, D], no gradient; ask can_use_fused_qk_rmsnorm_rotate_half "
            "first and run the eager chain where it says no"
        )
    return launch(q, k, (q_weight, k_weight), (cos, sin), 0, eps)


_op = register_op("qk_rmsnorm_rotate_half", _qk_rmsnorm_rotate_half, new_heads)


def fused_qk_rmsnorm_rotate_half(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
) -> QK:
    """`qk_rmsnorm_rotate_half_reference` in one kernel, bit-exact; outputs are contiguous.

    Raises ValueError where `can_use_fused_qk_rmsnorm_rotate_half` says no.
    """
    return _op(q, k, q_weight, k_weight, cos, sin, eps)


def aot_signatures() -> list[tuple[Any, dict[str, str], dict[str, Any], dict[str, int]]]:
    """ERNIE-Image's launch, and an odd one."""
    return [
        aot_signature("*bf16", "*bf16", True, 32, 128),
        aot_signature("*fp16", "*fp16", True, 3, 16),
    ]
