"""Triton kernel of `qk_rmsnorm_rope.py`; the numerical contract is written there."""

import triton
import triton.language as tl

from sglang.kernels.ops.diffusion.triton.ptx import add_rn, mul_rn, round_to, sub_rn, widen
from sglang.kernels.ops.diffusion.triton.rms_sum import (
    add_squares_of_4,
    fold_halves,
    rstd_of_sum,
)


@triton.jit
def _rstd(x: tl.tensor, eps: tl.tensor, D: tl.constexpr) -> tl.tensor:
    acc = tl.zeros((x.shape[0], x.shape[1] // 4), tl.float32)
    return rstd_of_sum(fold_halves(add_squares_of_4(acc, x)), eps, D)


@triton.jit
def _pairs(x: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """`[ROWS, N]` -> its even and its odd columns, as `[ROWS, N // 2]`."""
    return tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))


@triton.jit
def _norm_rope_tile(
    x: tl.tensor,
    weight: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    eps: tl.tensor,
    D: tl.constexpr,
) -> tl.tensor:
    """RMSNorm and RoPE of BLOCK_H heads of one token; all tiles are `[BLOCK_H, BLOCK_D]`."""
    dtype: tl.constexpr = x.dtype
    x = widen(x)
    y = mul_rn(widen(weight), mul_rn(_rstd(x, eps, D)[:, None], x))
    real, imag = _pairs(round_to(y, dtype))
    cos_even, cos_odd = _pairs(cos)
    sin_even, sin_odd = _pairs(sin)
    out_even = sub_rn(mul_rn(real, cos_even), mul_rn(imag, sin_even))
    out_odd = add_rn(mul_rn(imag, cos_odd), mul_rn(real, sin_odd))
    return tl.reshape(tl.join(out_even, out_odd), (x.shape[0], x.shape[1])).to(dtype)


# Alignment is in the address arithmetic, so a new length or stride need not compile a new kernel.
_INTEGERS = ["txt_rows"] + [f"{s}_stride_{axis}" for s in ("txt", "img") for axis in "bsh"]


@triton.jit(do_not_specialize=_INTEGERS)
def qk_rmsnorm_rope_kernel(
    txt_q_ptr: tl.tensor,
    txt_k_ptr: tl.tensor,
    img_q_ptr: tl.tensor,
    img_k_ptr: tl.tensor,
    txt_q_weight_ptr: tl.tensor,
    txt_k_weight_ptr: tl.tensor,
    img_q_weight_ptr: tl.tensor,
    img_k_weight_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    out_q_ptr: tl.tensor,
    out_k_ptr: tl.tensor,
    txt_stride_b: tl.tensor,
    txt_stride_s: tl.tensor,
    txt_stride_h: tl.tensor,
    img_stride_b: tl.tensor,
    img_stride_s: tl.tensor,
    img_stride_h: tl.tensor,
    txt_rows: tl.tensor,
    eps: tl.tensor,
    JOINT: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """One program = all heads of q and k of one token, so that cos and sin are read once.

    Grid (joint tokens, batch). Not JOINT: every token is an image token and `txt_*` is unused.
    Strides come in units of 8 elements, so that the compiler sees that 16-byte loads are aligned.
    Weights and tables are loaded in the shape of a tile, so that they come in its layout.
    """
    token = tl.program_id(0).to(tl.int64)
    batch = tl.program_id(1).to(tl.int64)
    cols = tl.arange(0, BLOCK_D)[None, :]
    in_row = tl.full((BLOCK_H, BLOCK_D), True, tl.int1) & (cols < D)
    q_ptr, k_ptr = img_q_ptr, img_k_ptr
    q_weight_ptr, k_weight_ptr = img_q_weight_ptr, img_k_weight_ptr
    row = token
    stride_b, stride_s, stride_h = img_stride_b, img_stride_s, img_stride_h
    if JOINT:
        is_txt = token < txt_rows
        row = token if is_txt else token - txt_rows
        q_ptr = txt_q_ptr if is_txt else img_q_ptr
        k_ptr = txt_k_ptr if is_txt else img_k_ptr
        q_weight_ptr = txt_q_weight_ptr if is_txt else img_q_weight_ptr
        k_weight_ptr = txt_k_weight_ptr if is_txt else img_k_weight_ptr
        stride_b = txt_stride_b.to(tl.int64) if is_txt else img_stride_b.to(tl.int64)
        stride_s = txt_stride_s.to(tl.int64) if is_txt else img_stride_s.to(tl.int64)
        stride_h = txt_stride_h.to(tl.int64) if is_txt else img_stride_h.to(tl.int64)
    in_offset = batch * stride_b + row * stride_s
    out_offset = (batch * tl.num_programs(0) + token) * (H * D)
    # Stores hold back the loads that follow them: all loads come first.
    q = ()
    k = ()
    for first_head in tl.static_range(0, H, BLOCK_H):
        heads = first_head + tl.arange(0, BLOCK_H)[:, None].to(tl.int64)
        x_offsets = (in_offset + heads * stride_h) * 8 + cols
        mask = in_row & (heads < H) if H % BLOCK_H != 0 else in_row
        q = q + (tl.load(q_ptr + x_offsets, mask=mask, other=0.0),)
        k = k + (tl.load(k_ptr + x_offsets, mask=mask, other=0.0),)
    shared = tl.broadcast_to(cols, (BLOCK_H, BLOCK_D))
    cos = tl.load(cos_ptr + token * D + shared, mask=in_row, other=0.0)
    sin = tl.load(sin_ptr + token * D + shared, mask=in_row, other=0.0)
    q_weight = tl.load(q_weight_ptr + shared, mask=in_row, other=0.0)
    k_weight = tl.load(k_weight_ptr + shared, mask=in_row, other=0.0)
    for block in tl.static_range((H + BLOCK_H - 1) // BLOCK_H):
        heads = block * BLOCK_H + tl.arange(0, BLOCK_H)[:, None].to(tl.int64)
        out_offsets = out_offset + heads * D + cols
        mask = in_row & (heads < H) if H % BLOCK_H != 0 else in_row
        out_q = _norm_rope_tile(q[block], q_weight, cos, sin, eps, D)
        tl.store(out_q_ptr + out_offsets, out_q, mask=mask)
        out_k = _norm_rope_tile(k[block], k_weight, cos, sin, eps, D)
        tl.store(out_k_ptr + out_offsets, out_k, mask=mask)
