"""Triton kernel of `rmsnorm_scale_shift_bitexact.py`; the numerical contract is written there."""

import triton
import triton.language as tl

from sglang.kernels.ops.diffusion.triton.ptx import (
    add_gated,
    add_rn,
    div_rn,
    modulate,
    mul_rn,
    one_plus,
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
def _load_chunks(
    start: tl.tensor, mask: tl.tensor, HIDDEN: tl.constexpr, CHUNK: tl.constexpr
) -> tl.tuple:
    """Tiles of CHUNK columns of the rows that begin at `start`, zeros where `mask` forbids."""
    columns = tl.arange(0, CHUNK)[None, :]
    chunks = ()
    for chunk in tl.static_range((HIDDEN + CHUNK - 1) // CHUNK):
        place = columns + chunk * CHUNK
        allowed = mask & (place < HIDDEN) if HIDDEN % CHUNK else mask
        chunks = chunks + (tl.load(start + place, mask=allowed, other=0.0),)
    return chunks


@triton.jit
def _store_chunk(
    start: tl.tensor,
    value: tl.tensor,
    chunk: tl.constexpr,
    mask: tl.tensor,
    HIDDEN: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    place = tl.arange(0, CHUNK)[None, :] + chunk * CHUNK
    tl.store(start + place, value, mask=mask & (place < HIDDEN) if HIDDEN % CHUNK else mask)


@triton.jit
def _load_inputs(
    x_ptr: tl.tensor,
    update_ptr: tl.tensor,
    entry: tl.tensor,
    token: tl.tensor,
    tokens: tl.tensor,
    RESIDUAL: tl.constexpr,
    HIDDEN: tl.constexpr,
    CHUNK: tl.constexpr,
) -> tl.tuple:
    """The chunks of x, then, with RESIDUAL, those of update."""
    mask = token < tokens
    start = entry + token * HIDDEN
    chunks = _load_chunks(x_ptr + start, mask, HIDDEN, CHUNK)
    if RESIDUAL:
        chunks = chunks + _load_chunks(update_ptr + start, mask, HIDDEN, CHUNK)
    return chunks


@triton.jit
def _load_broadcast(
    gate_row: tl.tensor,
    weight_ptr: tl.tensor,
    scale_row: tl.tensor,
    shift_row: tl.tensor,
    RESIDUAL: tl.constexpr,
    HIDDEN: tl.constexpr,
    CHUNK: tl.constexpr,
) -> tl.tuple:
    """The chunks of weight, scale and shift, then, with RESIDUAL, those of gate."""
    mask = tl.full((1, 1), True, tl.int1)
    chunks = _load_chunks(weight_ptr, mask, HIDDEN, CHUNK)
    chunks = chunks + _load_chunks(scale_row, mask, HIDDEN, CHUNK)
    chunks = chunks + _load_chunks(shift_row, mask, HIDDEN, CHUNK)
    if RESIDUAL:
        chunks = chunks + _load_chunks(gate_row, mask, HIDDEN, CHUNK)
    return chunks


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
    AHEAD: tl.constexpr,
    HOLD: tl.constexpr,
) -> None:
    """A program takes every num_programs-th block of ROWS rows of one batch entry.

    Grid (programs, batch). THREADS and VECTOR describe the kernel that is repeated: its thread t
    owns the vectors t, t + THREADS, ... of VECTOR elements. Batch strides are in units of 8
    elements, so that the compiler sees that 16-byte loads are aligned. A row stays in registers
    between the two passes. Loads come before stores, which none may overtake; AHEAD and HOLD as in
    `RowLaunch`.
    """
    CHUNK: tl.constexpr = THREADS * VECTOR
    CHUNKS: tl.constexpr = (HIDDEN + CHUNK - 1) // CHUNK
    batch = tl.program_id(1).to(tl.int64)
    gate_row = gate_ptr + batch * gate_stride * 8
    scale_row = scale_ptr + batch * scale_stride * 8
    shift_row = shift_ptr + batch * shift_stride * 8
    entry = batch * tokens * HIDDEN
    begin = tl.program_id(0) * ROWS
    step = tl.num_programs(0) * ROWS
    offsets = tl.arange(0, ROWS)[:, None].to(tl.int64)

    pending = ()
    held = ()
    if AHEAD:
        pending = _load_inputs(
            x_ptr, update_ptr, entry, begin + offsets, tokens, RESIDUAL, HIDDEN, CHUNK
        )
    if HOLD:
        held = _load_broadcast(gate_row, weight_ptr, scale_row, shift_row, RESIDUAL, HIDDEN, CHUNK)
    for first in range(begin, tokens, step):
        token = first + offsets
        if AHEAD:
            inputs = pending
            pending = _load_inputs(
                x_ptr, update_ptr, entry, token + step, tokens, RESIDUAL, HIDDEN, CHUNK
            )
        else:
            inputs = _load_inputs(x_ptr, update_ptr, entry, token, tokens, RESIDUAL, HIDDEN, CHUNK)
        if HOLD:
            rows = held
        else:
            rows = _load_broadcast(
                gate_row, weight_ptr, scale_row, shift_row, RESIDUAL, HIDDEN, CHUNK
            )
        acc = tl.zeros((ROWS, THREADS), tl.float32)
        normed = ()
        for chunk in tl.static_range(CHUNKS):
            x = inputs[chunk]
            if RESIDUAL:
                x = add_gated(x, rows[3 * CHUNKS + chunk], inputs[CHUNKS + chunk])
            acc = _add_squares(acc, widen(x), ATEN)
            normed = normed + (x,)
        rstd = _rstd(_fold_threads(acc, ATEN), eps, HIDDEN)
        mask = token < tokens
        start = entry + token * HIDDEN
        for chunk in tl.static_range(CHUNKS):
            x = normed[chunk]
            if RESIDUAL:
                _store_chunk(residual_out_ptr + start, x, chunk, mask, HIDDEN, CHUNK)
            value = mul_rn(mul_rn(widen(x), rstd), widen(rows[chunk]))
            factor = one_plus(rows[CHUNKS + chunk])
            out = modulate(value, factor, rows[2 * CHUNKS + chunk])
            _store_chunk(out_ptr + start, out, chunk, mask, HIDDEN, CHUNK)
