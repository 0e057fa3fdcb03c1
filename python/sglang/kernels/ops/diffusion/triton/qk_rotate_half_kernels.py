"""Triton kernel of the ops that norm and rotate heads by halves; their files hold the contracts.

A head is loaded in PARTS equal parts. Channel i turns with channel i + D / 2, so that a thread that
holds one channel holds its partner too. Parts are also what aten folds first: vectors of 4 channels
D / 2 apart, then D / 4. Here that costs no shuffle. The RMSNorm, bound by memory, takes two parts,
for loads of 16 bytes; the LayerNorm, whose merges are costly, takes four.
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
def _load_parts(ptrs: tl.tensor, mask: tl.tensor, PARTS: tl.constexpr) -> tl.tuple:
    """Tile pointers of the first part of a row -> tiles of all its parts, one after the other."""
    parts = ()
    for part in tl.static_range(PARTS):
        parts = parts + (tl.load(ptrs + part * ptrs.shape[1], mask=mask, other=0.0),)
    return parts


@triton.jit
def _rms_norm(parts: tl.tuple, weights: tl.tuple, eps: tl.tensor) -> tl.tuple:
    """fp32 weight * (rstd * x) of the two 16-bit halves."""
    first = widen(parts[0])
    second = widen(parts[1])
    none = tl.zeros((first.shape[0], first.shape[1] // 4), tl.float32)
    sums = add_rn(add_squares_of_4(none, first), add_squares_of_4(none, second))
    rstd = rstd_of_sum(fold_halves(sums), eps, 2 * first.shape[1])[:, None]
    first = mul_rn(widen(weights[0]), mul_rn(rstd, first))
    return first, mul_rn(widen(weights[1]), mul_rn(rstd, second))


@triton.jit
def _part_moments(part: tl.tensor) -> tl.tensor:
    """[ROWS, D / 4] -> mean, m2 of each vector of 4, merged with the lanes that D leaves empty."""
    rows: tl.constexpr = part.shape[0]
    vectors: tl.constexpr = part.shape[1] // 4
    none = tl.zeros((rows, vectors), tl.float32)
    mean, m2 = welford_vector(tl.reshape(part, (rows, vectors, 4)), none, none, 0)
    for step in tl.static_range(5):
        if 32 >> step > 4 * vectors:
            mean, m2 = merge_empty(mean, m2)
    return mean, m2


@triton.jit
def _layer_norm(parts: tl.tuple, eps: tl.tensor) -> tl.tuple:
    """fp32 rstd * (x - mean) of the four 16-bit quarters."""
    mean, m2 = _part_moments(parts[0])
    mean_1, m2_1 = _part_moments(parts[1])
    mean_2, m2_2 = _part_moments(parts[2])
    mean_3, m2_3 = _part_moments(parts[3])
    mean, m2 = merge_even(mean, m2, mean_2, m2_2, 4.0)
    mean_1, m2_1 = merge_even(mean_1, m2_1, mean_3, m2_3, 4.0)
    mean, m2 = merge_even(mean, m2, mean_1, m2_1, 8.0)
    mean, m2 = fold_even(mean, m2, 16.0)
    mean, m2 = merge_empty(mean, m2)  # warp 2
    mean, m2 = merge_empty(mean, m2)  # warps 1 and 3
    rstd = rsqrt_approx(add_rn(div_rn(m2, parts[0].shape[1] * 4.0), eps))[:, None]
    mean = mean[:, None]
    normed = ()
    for part in tl.static_range(4):
        normed = normed + (mul_rn(rstd, sub_rn(widen(parts[part]), mean)),)
    return normed


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
    parts: tl.tuple,
    cos: tl.tuple,
    sin: tl.tuple,
    turns: tl.tensor,
    mask: tl.tensor,
    PARTS: tl.constexpr,
    ROTATES: tl.constexpr,
) -> None:
    """Rotate normed parts where the token `turns`, and store them."""
    dtype: tl.constexpr = out_ptrs.dtype.element_ty
    for part in tl.static_range(PARTS // 2):
        first, second = parts[part], parts[part + PARTS // 2]
        if PARTS == 2:
            first, second = rotate_rounded(first, second, cos[0], sin[0], cos[1], sin[1])
        elif ROTATES:
            if turns:
                first, second = _rotate_once(first, second, cos[part], sin[part], dtype)
        ptrs = out_ptrs + part * out_ptrs.shape[1]
        tl.store(ptrs, first.to(dtype), mask=mask)
        tl.store(ptrs + PARTS // 2 * out_ptrs.shape[1], second.to(dtype), mask=mask)


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
    ROTATES: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_H: tl.constexpr,
) -> None:
    """One program = all heads of q and k of one token. Grid (tokens, batch).

    RMS: RMSNorm with weights, then `rotate_rounded`; else LayerNorm, then `_rotate_once` of the
    tokens from `text_tokens` on, by the first half of cos and the second of sin, or, where nothing
    ROTATES, no more. Strides are in units of 8 elements. Weights and tables are loaded in the shape
    of a tile, so that they come in its layout; all but the first load hit L1.
    """
    PARTS: tl.constexpr = 2 if RMS else 4
    WIDTH: tl.constexpr = D // PARTS
    token = tl.program_id(0).to(tl.int64)
    batch = tl.program_id(1).to(tl.int64)
    head = tl.arange(0, BLOCK_H)[:, None].to(tl.int64)
    column = tl.arange(0, WIDTH)[None, :]
    turns = RMS or token >= text_tokens
    everywhere = tl.full((BLOCK_H, WIDTH), True, tl.int1)
    shared = tl.broadcast_to(column, (BLOCK_H, WIDTH))
    table = shared + (token - text_tokens) * D
    sin_start: tl.constexpr = 0 if RMS else D // 2
    cos = ()
    sin = ()
    if ROTATES:
        cos = _load_parts(cos_ptr + table, everywhere & turns, 2)
        sin = _load_parts(sin_ptr + table + sin_start, everywhere & turns, 2)
    for first_head in tl.static_range(0, H, BLOCK_H):
        row = first_head + head
        at = (batch * stride_b + token * stride_s + row * stride_h) * 8 + column
        out = ((batch * tl.num_programs(0) + token) * H + row) * D + column
        mask = everywhere & (row < H) if H % BLOCK_H != 0 else everywhere
        q = _load_parts(q_ptr + at, mask, PARTS)
        k = _load_parts(k_ptr + at, mask, PARTS)
        if RMS:
            q = _rms_norm(q, _load_parts(q_weight_ptr + shared, everywhere, 2), eps)
            k = _rms_norm(k, _load_parts(k_weight_ptr + shared, everywhere, 2), eps)
        else:
            q = _layer_norm(q, eps)
            k = _layer_norm(k, eps)
        _finish(q_out_ptr + out, q, cos, sin, turns, mask, PARTS, ROTATES)
        _finish(k_out_ptr + out, k, cos, sin, turns, mask, PARTS, ROTATES)
