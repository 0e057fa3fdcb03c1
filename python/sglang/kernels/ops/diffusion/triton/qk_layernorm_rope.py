"""LayerNorm of q and k per head, then rotary embedding of the image tokens behind the text's.

Equals, bit for bit, the eager chain of an attention block (16-bit q and k, fp32 tables):

    y = F.layer_norm(x, (D,), eps=eps)                           aten's vectorized CUDA kernel
    t = y[:, text_tokens:]
    t = t * cos + t.roll(D / 2, -1) * sin                        in fp32, rounded at the end

Numerical contract: the norm is that of `layernorm_modulate.py`, rounded once to the dtype. Text
tokens stay so. For the others, with i < D / 2 and j = i + D / 2, in fp32 with each operation
rounded, no FMA, then one rounding to the dtype:

    out[i] = round(y[i] * c[i] - y[j] * s[i])        c = cos[:, :D/2], s = sin[:, D/2:]
    out[j] = round(y[j] * c[i] + y[i] * s[i])

The tables must be what `GlmImageRotaryPosEmbed` makes: both halves of cos equal, the first half of
sin the negative of the second. The kernel reads c and s only; a predicate cannot see the rest.
Made after torch 2.11 (sm_90, CUDA 13).

Shapes: q, k `[B, S, H, D]` with D of 16, 32, 64 or 128 and H <= 128, cos, sin
`[S - text_tokens, D]`. q and k may be strided views with contiguous heads; outputs are contiguous
and new.
"""

from typing import Any

import torch

from sglang.kernels.ops.diffusion.triton.head_streams import MAX_HEADS, new_heads, table_fits
from sglang.kernels.ops.diffusion.triton.layernorm_modulate import qk_head_layernorm_reference
from sglang.kernels.ops.diffusion.triton.qk_rotate_half import (
    HEAD_DIMS,
    QK,
    aot_signature,
    halves_fit,
    launch,
)
from sglang.kernels.registration import describe, register_op


def rotate_(x: torch.Tensor, first: int, rope: QK) -> None:
    """Rotate the tokens of x `[B, S, H, D]` from `first` on, in place; rope: fp32 `[n, D]` tables.

    Channel i turns with channel i + D / 2. Products and sum are fp32 and rounded once, by
    mixed-type operations: no copy in fp32, no negated half, no copy back.
    """
    cos, sin = (table[None, :, None] for table in rope)
    tokens = x[:, first:]
    partners = tokens.roll(tokens.shape[-1] // 2, dims=-1)
    torch.add(tokens * cos, partners * sin, out=tokens)


def qk_layernorm_rope_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    text_tokens: int,
    eps: float,
) -> QK:
    """The eager chain: q, k `[B, S, H, D]` -> new tensors of the same shapes."""
    q, k = qk_head_layernorm_reference(q, k, eps)
    rotate_(q, text_tokens, (cos, sin))
    rotate_(k, text_tokens, (cos, sin))
    return q, k


def can_use_fused_qk_layernorm_rope(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, text_tokens: int
) -> bool:
    """Whether the fused kernel takes these inputs; otherwise run the eager chain."""
    if not halves_fit(q, k) or not 0 <= text_tokens < q.shape[1]:
        return False
    shape = (q.shape[1] - text_tokens, q.shape[3])
    return all(table_fits(table, shape, q, torch.float32) for table in (cos, sin))


def _qk_layernorm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    text_tokens: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    if not can_use_fused_qk_layernorm_rope(q, k, cos, sin, text_tokens):
        raise ValueError(
            f"fused_qk_layernorm_rope got {describe(q=q, k=k, cos=cos, sin=sin)}, text_tokens "
            f"{text_tokens}; expected CUDA (sm_80 or newer) tensors, 16-bit q, k [B, S, H, D] of "
            f"one shape and stride with D one of {HEAD_DIMS}, H of {MAX_HEADS} at most, contiguous "
            "heads and 16-byte aligned rows, 0 <= text_tokens < S, contiguous fp32 cos, sin "
            "[S - text_tokens, D], no gradient; ask can_use_fused_qk_layernorm_rope first and run "
            "the eager chain where it says no"
        )
    return launch(q, k, None, (cos, sin), text_tokens, eps)


_op = register_op("qk_layernorm_rope", _qk_layernorm_rope, new_heads)


def fused_qk_layernorm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    text_tokens: int,
    eps: float,
) -> QK:
    """`qk_layernorm_rope_reference` in one kernel, bit-exact; outputs are contiguous.

    Raises ValueError where `can_use_fused_qk_layernorm_rope` says no.
    """
    return _op(q, k, cos, sin, text_tokens, eps)


def aot_signatures() -> list[tuple[Any, dict[str, str], dict[str, Any], dict[str, int]]]:
    """GLM-Image's launch, and an odd one."""
    return [
        aot_signature("*bf16", "*fp32", False, 32, 128),
        aot_signature("*fp16", "*fp32", False, 3, 64),
    ]
