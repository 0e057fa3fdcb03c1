"""Triton kernel of `rmsnorm_scale_shift_bitexact.py`; the numerical contract is written there."""

import triton
import triton.language as tl

from sglang.kernels.ops.diffusion.triton.ptx import (
    add_rn,
    div_rn,
    mul_rn,
    round_to,
    rsqrt_approx,
    widen,
)
from sglang.kernels.ops.diffusion.triton.rms_sum import (
    add_squares_of_4,
    add_squares_of_8,
    fold_adjacent,
    fold_halves,
)


@triton.jit
def _add_squares(acc: tl.tensor, x: tl.tensor, ATEN: tl.constexpr) -> tl.tensor:
    if ATEN:
        return add_squares_of_4(acc, x)
    else:
        return add_squares_of_8(acc, x)


@triton.jit
def _fold_threads(acc: tl.tensor, ATEN: tl.constexpr) -> tl.tensor:
    """`[ROWS, threads]` -> `[ROWS]`; aten folds by halves inside each warp, then over the warps."""
    rows: tl.constexpr = acc.shape[0]
    if ATEN:
        warps = fold_halves(tl.reshape(acc, (rows * 4, 32)))
        return fold_halves(tl.reshape(warps, (rows, 4)))
    else:
        return fold_adjacent(acc)


@triton.jit
def _rstd(total: tl.tensor, eps: tl.tensor, HIDDEN: tl.constexpr) -> tl.tensor:
    if HIDDEN & (HIDDEN - 1) == 0:
        mean = mul_rn(total, 1.0 / HIDDEN)  # exact, so the same as the division
    else:
        mean = div_rn(total, HIDDEN * 1.0)
    return rsqrt_approx(add_rn(mean, eps))[:, None]


@triton.jit
def _modulate(y: tl.tensor, scale: tl.tensor, shift: tl.tensor) -> tl.tensor:
    """`y * (1 + scale) + shift` with eager's bf16 boundary after every operation but the last."""
    scaled = mul_rn(y, round_to(add_rn(widen(scale), 1.0), tl.bfloat16))
    return add_rn(round_to(scaled, tl.bfloat16), widen(shift))


@triton.jit(do_not_specialize=["gate_stride", "scale_stride", "shift_stride", "tokens"])
def rmsnorm_scale_shift_kernel(
    x_ptr: tl.tensor,
    update_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    shift_ptr: tl.tensor,
    out_ptr: tl.tensor,
    residual_out_ptr: tl.tensor,
    gate_stride: tl.tensor,
    scale_stride: tl.tensor,
    shift_stride: tl.tensor,
    tokens: tl.tensor,
    eps: tl.tensor,
    RESIDUAL: tl.constexpr,
    ATEN: tl.constexpr,
    HIDDEN: tl.constexpr,
    THREADS: tl.constexpr,
    VECTOR: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """One program = ROWS rows of one batch entry, held in registers between the two passes.

    Grid (row blocks, batch). THREADS and VECTOR describe the kernel that is repeated: its thread t
    owns the vectors t, t + THREADS, ... of VECTOR elements. Batch strides are in units of 8
    elements, so that the compiler sees that 16-byte loads are aligned.
    """
    CHUNK: tl.constexpr = THREADS * VECTOR
    CHUNKS: tl.constexpr = (HIDDEN + CHUNK - 1) // CHUNK
    batch = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, CHUNK)[None, :]
    row_offset = (batch * tokens + token) * HIDDEN
    in_batch = token < tokens

    acc = tl.zeros((ROWS, THREADS), tl.float32)
    tiles = ()
    for chunk in tl.static_range(CHUNKS):
        place = cols + chunk * CHUNK
        in_row = place < HIDDEN if HIDDEN % CHUNK else tl.full((1, CHUNK), True, tl.int1)
        mask = in_batch & in_row
        x = tl.load(x_ptr + row_offset + place, mask=mask, other=0.0)
        if RESIDUAL:
            update = tl.load(update_ptr + row_offset + place, mask=mask, other=0.0)
            gate = tl.load(gate_ptr + batch * gate_stride * 8 + place, mask=in_row, other=0.0)
            gated = round_to(mul_rn(widen(gate), widen(update)), tl.bfloat16)
            x = add_rn(widen(x), gated).to(tl.bfloat16)
            tl.store(residual_out_ptr + row_offset + place, x, mask=mask)
        acc = _add_squares(acc, widen(x), ATEN)
        tiles = tiles + (x,)

    rstd = _rstd(_fold_threads(acc, ATEN), eps, HIDDEN)
    for chunk in tl.static_range(CHUNKS):
        place = cols + chunk * CHUNK
        in_row = place < HIDDEN if HIDDEN % CHUNK else tl.full((1, CHUNK), True, tl.int1)
        weight = widen(tl.load(weight_ptr + place, mask=in_row, other=0.0))
        scale = tl.load(scale_ptr + batch * scale_stride * 8 + place, mask=in_row, other=0.0)
        shift = tl.load(shift_ptr + batch * shift_stride * 8 + place, mask=in_row, other=0.0)
        y = round_to(mul_rn(mul_rn(widen(tiles[chunk]), rstd), weight), tl.bfloat16)
        out = _modulate(y, scale, shift).to(tl.bfloat16)
        tl.store(out_ptr + row_offset + place, out, mask=in_batch & in_row)
