"""Triton kernel of `qk_rmsnorm_rotate_half.py` and `qk_layernorm_rope.py`: contracts are there.

Channel i of a head turns with channel i + D / 2, so a head is loaded as two halves, and a thread
that holds one channel holds its partner too. The halves are also what aten merges first: its lane i
takes lane i + 16, with vectors of 4 channels a lane.
"""

import triton
import triton.language as tl

from sglang.kernels.ops.diffusion.triton.ptx import (
    add_rn,
    div_rn,
    mul_rn,
    rotate_rounded,
    round_to,
    rsqrt_approx,
    sub_rn,
    widen,
)
from sglang.kernels.ops.diffusion.triton.rms_sum import (
    add_squares_of_4,
    fold_halves,
    rstd_of_sum,
)
from sglang.kernels.ops.diffusion.triton.welford import (
    fold_even,
    merge_empty,
    merge_even,
    welford_vector,
)


@triton.jit
def _rms_norm(
    first: tl.tensor,
    second: tl.tensor,
    first_weight: tl.tensor,
    second_weight: tl.tensor,
    eps: tl.tensor,
) -> tl.tensor:
    """fp32 weight * (rstd * x) of 16-bit halves [ROWS, D / 2]."""
    first = widen(first)
    second = widen(second)
    none = tl.zeros((first.shape[0], first.shape[1] // 4), tl.float32)
    sums = add_rn(add_squares_of_4(none, first), add_squares_of_4(none, second))
    rstd = rstd_of_sum(fold_halves(sums), eps, 2 * first.shape[1])[:, None]
    first = mul_rn(widen(first_weight), mul_rn(rstd, first))
    return first, mul_rn(widen(second_weight), mul_rn(rstd, second))


@triton.jit
def _half_moments(half: tl.tensor) -> tl.tensor:
    """[ROWS, D / 2] -> mean, m2 of each vector of 4, merged with the lanes that D leaves empty."""
    rows: tl.constexpr = half.shape[0]
    vectors: tl.constexpr = half.shape[1] // 4
    none = tl.zeros((rows, vectors), tl.float32)
    mean, m2 = welford_vector(tl.reshape(half, (rows, vectors, 4)), none, none, 0)
    for step in tl.static_range(5):
        if 32 >> step > 2 * vectors:
            mean, m2 = merge_empty(mean, m2)
    return mean, m2


@triton.jit
def _layer_norm(first: tl.tensor, second: tl.tensor, eps: tl.tensor) -> tl.tensor:
    """fp32 rstd * (x - mean) of 16-bit halves [ROWS, D / 2]."""
    mean, m2 = _half_moments(first)
    second_mean, second_m2 = _half_moments(second)
    mean, m2 = merge_even(mean, m2, second_mean, second_m2, 4.0)
    mean, m2 = fold_even(mean, m2, 8.0)
    mean, m2 = merge_empty(mean, m2)  # warp 2
    mean, m2 = merge_empty(mean, m2)  # warps 1 and 3
    rstd = rsqrt_approx(add_rn(div_rn(m2, first.shape[1] * 2.0), eps))[:, None]
    mean = mean[:, None]
    return mul_rn(rstd, sub_rn(widen(first), mean)), mul_rn(rstd, sub_rn(widen(second), mean))


@triton.jit
def _rotate_once(
    first: tl.tensor, second: tl.tensor, cos: tl.tensor, sin: tl.tensor, dtype: tl.constexpr
) -> tl.tensor:
    """Round a pair and rotate it in fp32 by fp32 tables -> fp32, to be rounded."""
    first = round_to(first, dtype)
    second = round_to(second, dtype)
    first_out = sub_rn(mul_rn(first, cos), mul_rn(second, sin))
    return first_out, add_rn(mul_rn(second, cos), mul_rn(first, sin))


@triton.jit
def _finish(
    out_ptrs: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    tables: tl.tuple,
    turns: tl.tensor,
    mask: tl.tensor,
    RMS: tl.constexpr,
) -> None:
    """Rotate normed halves where the token `turns`, and store them."""
    dtype: tl.constexpr = out_ptrs.dtype.element_ty
    if RMS:
        first, second = rotate_rounded(first, second, *tables)
    elif turns:
        first, second = _rotate_once(first, second, tables[0], tables[1], dtype)
    tl.store(out_ptrs, first.to(dtype), mask=mask)
    tl.store(out_ptrs + first.shape[1], second.to(dtype), mask=mask)


# Alignment is in the address arithmetic, so a new length or stride need not compile a new kernel.
@triton.jit(do_not_specialize=["stride_b", "stride_s", "stride_h", "text_tokens"])
def qk_rotate_half_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    q_weight_ptr: tl.tensor,
    k_weight_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    q_out_ptr: tl.tensor,
    k_out_ptr: tl.tensor,
    stride_b: tl.tensor,
    stride_s: tl.tensor,
    stride_h: tl.tensor,
    text_tokens: tl.tensor,
    eps: tl.tensor,
    RMS: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_H: tl.constexpr,
) -> None:
    """One program = all heads of q and k of one token. Grid (tokens, batch).

    RMS: RMSNorm with weights, then `rotate_rounded`; else LayerNorm, then `_rotate_once` of the
    tokens from `text_tokens` on, by the first half of cos and the second of sin. Strides are in
    units of 8 elements. Weights and tables are loaded in the shape of a tile, so that they come in
    its layout; all but the first load hit L1.
    """
    HALF: tl.constexpr = D // 2
    token = tl.program_id(0).to(tl.int64)
    batch = tl.program_id(1).to(tl.int64)
    head = tl.arange(0, BLOCK_H)[:, None].to(tl.int64)
    column = tl.arange(0, HALF)[None, :]
    turns = RMS or token >= text_tokens
    everywhere = tl.full((BLOCK_H, HALF), True, tl.int1)
    shared = tl.broadcast_to(column, (BLOCK_H, HALF))
    turned = everywhere & turns
    table = shared + (token - text_tokens) * D
    tables = (
        tl.load(cos_ptr + table, mask=turned, other=0.0),
        tl.load(sin_ptr + table + (0 if RMS else HALF), mask=turned, other=0.0),
    )
    if RMS:
        tables = tables + (tl.load(cos_ptr + table + HALF), tl.load(sin_ptr + table + HALF))
    for first_head in tl.static_range(0, H, BLOCK_H):
        row = first_head + head
        at = (batch * stride_b + token * stride_s + row * stride_h) * 8 + column
        out = ((batch * tl.num_programs(0) + token) * H + row) * D + column
        mask = everywhere & (row < H) if H % BLOCK_H != 0 else everywhere
        q_first = tl.load(q_ptr + at, mask=mask, other=0.0)
        q_second = tl.load(q_ptr + at + HALF, mask=mask, other=0.0)
        k_first = tl.load(k_ptr + at, mask=mask, other=0.0)
        k_second = tl.load(k_ptr + at + HALF, mask=mask, other=0.0)
        if RMS:
            weight = tl.load(q_weight_ptr + shared)
            weight_second = tl.load(q_weight_ptr + shared + HALF)
            q_first, q_second = _rms_norm(q_first, q_second, weight, weight_second, eps)
            weight = tl.load(k_weight_ptr + shared)
            weight_second = tl.load(k_weight_ptr + shared + HALF)
            k_first, k_second = _rms_norm(k_first, k_second, weight, weight_second, eps)
        else:
            q_first, q_second = _layer_norm(q_first, q_second, eps)
            k_first, k_second = _layer_norm(k_first, k_second, eps)
        _finish(q_out_ptr + out, q_first, q_second, tables, turns, mask, RMS)
        _finish(k_out_ptr + out, k_first, k_second, tables, turns, mask, RMS)
