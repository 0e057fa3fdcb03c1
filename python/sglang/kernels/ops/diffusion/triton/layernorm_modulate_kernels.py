"""Triton kernels of `layernorm_modulate` and `gated_layernorm_modulate`, whose docstrings are the
contract. Importing needs triton.

Axis names: `thread` is one of the 128 threads of aten's (32, 4) block, `4` the vector that such a
thread loads at a time. Its state is that of `welford.py`.
"""

import triton
import triton.language as tl

from sglang.kernels.ops.diffusion.triton.ptx import (
    add_gated,
    add_rn,
    affine,
    div_rn,
    modulate,
    mul_rn,
    one_plus,
    rsqrt_approx,
    sub_rn,
    widen,
)
from sglang.kernels.ops.diffusion.triton.welford import (
    merge,
    merge_empty,
    merge_even,
    welford_vector,
)


@triton.jit
def _shuffle_down(x: tl.tensor, OFFSET: tl.constexpr) -> tl.tensor:
    """Lane i of axis 1 (32 lanes) gets lane i + OFFSET; what wraps around is never used."""
    lane = (tl.arange(0, 32) + OFFSET) % 32
    return tl.gather(x, tl.broadcast_to(lane[None, :], x.shape), 1)


@triton.jit
def _first_lane(x: tl.tensor) -> tl.tensor:
    """[N, 32] -> lane 0 as [N, 1]."""
    warps: tl.constexpr = x.shape[0]
    return tl.gather(x, tl.full((warps, 1), 0, tl.int32), 1)


@triton.jit
def _halves(x: tl.tensor) -> tl.tensor:
    """[ROWS, N] -> the lower and the upper half of axis 1, each [ROWS, N / 2]."""
    rows: tl.constexpr = x.shape[0]
    half: tl.constexpr = x.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(x, (rows, 2, half)), (0, 2, 1)))


@triton.jit
def _fold_lanes_even(mean: tl.tensor, m2: tl.tensor, COUNT: tl.constexpr) -> tl.tensor:
    """[N, 32 lanes] -> the same, lane 0 merged, where every lane has seen COUNT values."""
    for step in tl.static_range(5):
        other_mean = _shuffle_down(mean, 16 >> step)
        other_m2 = _shuffle_down(m2, 16 >> step)
        mean, m2 = merge_even(mean, m2, other_mean, other_m2, COUNT * 2.0**step)
    return mean, m2


@triton.jit
def _fold_lanes(mean: tl.tensor, m2: tl.tensor, count: tl.tensor) -> tl.tensor:
    """[N, 32 lanes] -> the same, lane 0 merged: SHFL.DOWN 16, 8, 4, 2, 1."""
    for step in tl.static_range(5):
        other_mean = _shuffle_down(mean, 16 >> step)
        other_m2 = _shuffle_down(m2, 16 >> step)
        other_count = _shuffle_down(count, 16 >> step)
        mean, m2, count = merge(mean, m2, count, other_mean, other_m2, other_count)
    return mean, m2, count


@triton.jit
def _fold_block_even(mean: tl.tensor, m2: tl.tensor, COUNT: tl.constexpr) -> tl.tensor:
    """[ROWS, 128 threads] -> [ROWS, 1] where every thread has seen COUNT values."""
    warps: tl.constexpr = mean.shape[0] * 4
    mean = tl.reshape(mean, (warps, 32))
    m2 = tl.reshape(m2, (warps, 32))
    mean, m2 = _fold_lanes_even(mean, m2, COUNT)
    mean = tl.reshape(_first_lane(mean), (warps // 4, 4))
    m2 = tl.reshape(_first_lane(m2), (warps // 4, 4))
    for step in tl.static_range(2):
        mean, other_mean = _halves(mean)
        m2, other_m2 = _halves(m2)
        mean, m2 = merge_even(mean, m2, other_mean, other_m2, COUNT * 32.0 * 2.0**step)
    return mean, m2


@triton.jit
def _fold_block(mean: tl.tensor, m2: tl.tensor, count: tl.tensor) -> tl.tensor:
    """[ROWS, 128 threads] -> [ROWS, 1]: the lanes of each warp, then warps 2 and 1 apart."""
    warps: tl.constexpr = mean.shape[0] * 4
    mean = tl.reshape(mean, (warps, 32))
    m2 = tl.reshape(m2, (warps, 32))
    count = tl.reshape(count, (warps, 32))
    mean, m2, count = _fold_lanes(mean, m2, count)
    mean = tl.reshape(_first_lane(mean), (warps // 4, 4))
    m2 = tl.reshape(_first_lane(m2), (warps // 4, 4))
    count = tl.reshape(_first_lane(count), (warps // 4, 4))
    for _ in tl.static_range(2):
        mean, other_mean = _halves(mean)
        m2, other_m2 = _halves(m2)
        count, other_count = _halves(count)
        mean, m2, count = merge(mean, m2, count, other_mean, other_m2, other_count)
    return mean, m2


@triton.jit
def _block_moments(
    vectors: tl.tuple, ROWS: tl.constexpr, HIDDEN: tl.constexpr, EVEN: tl.constexpr
) -> tl.tensor:
    """Tuple of chunks [128 threads, ROWS, 4] -> mean and m2, each [ROWS, 1].

    EVEN says that every thread has the same number of vectors, HIDDEN % 512 == 0.
    """
    FULL: tl.constexpr = HIDDEN // 512
    mean = tl.zeros((128, ROWS), tl.float32)
    m2 = tl.zeros((128, ROWS), tl.float32)
    for chunk in tl.static_range(FULL):
        mean, m2 = welford_vector(vectors[chunk], mean, m2, chunk * 4)
    if EVEN:
        mean, m2 = _fold_block_even(tl.trans(mean), tl.trans(m2), FULL * 4.0)
    else:
        owns = (FULL * 512 + tl.arange(0, 128) * 4 < HIDDEN)[:, None]
        last_mean, last_m2 = welford_vector(vectors[FULL], mean, m2, FULL * 4)
        mean = tl.where(owns, last_mean, mean)
        m2 = tl.where(owns, last_m2, m2)
        count = tl.broadcast_to(tl.where(owns, FULL * 4.0 + 4.0, FULL * 4.0), (128, ROWS))
        mean, m2 = _fold_block(tl.trans(mean), tl.trans(m2), tl.trans(count))
    return mean, m2


@triton.jit
def _load_chunks(start: tl.tensor, mask: tl.tensor, HIDDEN: tl.constexpr) -> tl.tuple:
    """The chunks [128 threads, ROWS, 4] of the rows at `start` [1, ROWS, 1], zeros outside."""
    column = tl.arange(0, 128)[:, None, None] * 4 + tl.arange(0, 4)[None, None, :]
    chunks = ()
    for chunk in tl.static_range((HIDDEN + 511) // 512):
        at = chunk * 512 + column
        allowed = mask if chunk < HIDDEN // 512 else mask & (at < HIDDEN)
        chunks = chunks + (tl.load(start + at, mask=allowed, other=0.0),)
    return chunks


@triton.jit
def _load_inputs(
    x_start: tl.tensor,
    update_start: tl.tensor,
    mask: tl.tensor,
    HIDDEN: tl.constexpr,
    GATED: tl.constexpr,
) -> tl.tuple:
    """The chunks of x, then, with GATED, those of update."""
    chunks = _load_chunks(x_start, mask, HIDDEN)
    if GATED:
        chunks = chunks + _load_chunks(update_start, mask, HIDDEN)
    return chunks


@triton.jit
def _gated_sums(inputs: tl.tuple, gates: tl.tuple, CHUNKS: tl.constexpr) -> tl.tuple:
    """The chunks of the new residual, of inputs as `_load_inputs` gives them."""
    sums = ()
    for chunk in tl.static_range(CHUNKS):
        sums = sums + (add_gated(inputs[chunk], gates[chunk], inputs[CHUNKS + chunk]),)
    return sums


@triton.jit(
    do_not_specialize=[
        "sequence",
        "x_batch_vectors",
        "x_row_vectors",
        "update_batch_vectors",
        "update_row_vectors",
        "gate_vectors",
        "scale_vectors",
        "shift_vectors",
    ]
)
def layernorm_modulate_kernel(
    x_ptr: tl.tensor,
    update_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    shift_ptr: tl.tensor,
    out_ptr: tl.tensor,
    residual_out_ptr: tl.tensor,
    sequence: tl.int64,
    x_batch_vectors: tl.int64,
    x_row_vectors: tl.int64,
    update_batch_vectors: tl.int64,
    update_row_vectors: tl.int64,
    gate_vectors: tl.int64,
    scale_vectors: tl.int64,
    shift_vectors: tl.int64,
    eps: tl.float32,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    EVEN: tl.constexpr,
    AHEAD: tl.constexpr,
    HOLD: tl.constexpr,
    FOLDED: tl.constexpr,
    GATED: tl.constexpr,
) -> None:
    """A program takes every num_programs-th block of ROWS rows of one batch entry.

    Grid (programs, batch). Strides are in vectors of four elements. A row stays in registers
    between the statistics and the output. Loads come before stores, which none may overtake;
    AHEAD and HOLD as in `RowLaunch`. FOLDED rounds once, at the end, as aten's affine does. With
    GATED x is the residual, to which gate * update is added first; the sum is stored as well. The
    pointers of update, gate and residual_out are used with GATED only.
    """
    CHUNKS: tl.constexpr = (HIDDEN + 511) // 512
    batch = tl.program_id(1).to(tl.int64)
    x_entry = x_ptr + batch * x_batch_vectors * 4
    update_entry = update_ptr + batch * update_batch_vectors * 4
    gate_row = gate_ptr + batch * gate_vectors * 4
    scale_row = scale_ptr + batch * scale_vectors * 4
    shift_row = shift_ptr + batch * shift_vectors * 4
    out_entry = out_ptr + batch * sequence * HIDDEN
    residual_entry = residual_out_ptr + batch * sequence * HIDDEN
    column = tl.arange(0, 128)[:, None, None] * 4 + tl.arange(0, 4)[None, None, :]
    offsets = tl.arange(0, ROWS)[None, :, None].to(tl.int64)
    begin = tl.program_id(0).to(tl.int64) * ROWS
    step = tl.num_programs(0) * ROWS
    always = tl.full((1, 1, 1), True, tl.int1)

    pending = ()
    held = ()
    if AHEAD:
        row = begin + offsets
        pending = _load_inputs(
            x_entry + row * x_row_vectors * 4, update_entry + row * update_row_vectors * 4,
            row < sequence, HIDDEN, GATED,
        )  # fmt: skip
    if HOLD:
        held = _load_chunks(scale_row, always, HIDDEN) + _load_chunks(shift_row, always, HIDDEN)
    gates = ()
    if GATED and HOLD:
        gates = _load_chunks(gate_row, always, HIDDEN)
    for first in range(begin, sequence, step):
        row = first + offsets
        in_row = row < sequence
        if AHEAD:
            inputs = pending
            later = row + step
            pending = _load_inputs(
                x_entry + later * x_row_vectors * 4, update_entry + later * update_row_vectors * 4,
                later < sequence, HIDDEN, GATED,
            )  # fmt: skip
        else:
            inputs = _load_inputs(
                x_entry + row * x_row_vectors * 4, update_entry + row * update_row_vectors * 4,
                in_row, HIDDEN, GATED,
            )  # fmt: skip
        if not GATED:
            vectors = inputs
        elif HOLD:
            vectors = _gated_sums(inputs, gates, CHUNKS)
        else:
            vectors = _gated_sums(inputs, _load_chunks(gate_row, always, HIDDEN), CHUNKS)

        mean, m2 = _block_moments(vectors, ROWS, HIDDEN, EVEN)
        rstd = rsqrt_approx(add_rn(div_rn(m2, HIDDEN * 1.0), eps))
        mean = tl.reshape(mean, (1, ROWS, 1))
        rstd = tl.reshape(rstd, (1, ROWS, 1))
        if HOLD:
            rows = held
        else:
            rows = _load_chunks(scale_row, always, HIDDEN)
            rows = rows + _load_chunks(shift_row, always, HIDDEN)
        out_row = out_entry + row * HIDDEN
        for chunk in tl.static_range(CHUNKS):
            at = chunk * 512 + column
            value = mul_rn(rstd, sub_rn(widen(vectors[chunk]), mean))
            factor, addend = one_plus(rows[chunk]), rows[CHUNKS + chunk]
            if FOLDED:
                out = affine(value, factor, addend)
            else:
                out = modulate(value, factor, addend)
            mask = in_row if chunk < HIDDEN // 512 else in_row & (at < HIDDEN)
            if GATED:
                tl.store(residual_entry + row * HIDDEN + at, vectors[chunk], mask=mask)
            tl.store(out_row + at, out, mask=mask)


@triton.jit
def _head_layernorm(
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows: tl.tensor,
    token_vectors: tl.tensor,
    head_vectors: tl.tensor,
    eps: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, 128)[None, :]
    mask = (row < rows) & (column < HEAD_DIM)
    start = (row // HEADS * token_vectors + row % HEADS * head_vectors) * 4
    x = tl.load(x_ptr + start + column, mask=mask, other=0.0)

    empty = tl.zeros((ROWS, 32), tl.float32)
    mean, m2 = welford_vector(tl.reshape(x, (ROWS, 32, 4)), empty, empty, 0)
    if HEAD_DIM == 128:
        mean, m2 = _fold_lanes_even(mean, m2, 4.0)
    else:
        owns = tl.broadcast_to((tl.arange(0, 32) * 4 < HEAD_DIM)[None, :], (ROWS, 32))
        mean = tl.where(owns, mean, 0.0)
        m2 = tl.where(owns, m2, 0.0)
        mean, m2, _ = _fold_lanes(mean, m2, tl.where(owns, 4.0, 0.0))
    mean = _first_lane(mean)
    m2 = _first_lane(m2)
    mean, m2 = merge_empty(mean, m2)  # warp 2
    mean, m2 = merge_empty(mean, m2)  # warps 1 and 3
    mean = tl.reshape(mean, (ROWS,))
    rstd = rsqrt_approx(add_rn(div_rn(tl.reshape(m2, (ROWS,)), HEAD_DIM * 1.0), eps))

    value = mul_rn(rstd[:, None], sub_rn(widen(x), mean[:, None]))
    tl.store(out_ptr + row * HEAD_DIM + column, value.to(x.dtype), mask=mask)


@triton.jit(
    do_not_specialize=[
        "rows",
        "q_token_vectors",
        "q_head_vectors",
        "k_token_vectors",
        "k_head_vectors",
    ]
)
def qk_head_layernorm_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    q_out_ptr: tl.tensor,
    k_out_ptr: tl.tensor,
    rows: tl.int64,
    q_token_vectors: tl.int64,
    q_head_vectors: tl.int64,
    k_token_vectors: tl.int64,
    k_head_vectors: tl.int64,
    eps: tl.float32,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Programs (i, 0) norm ROWS rows of q, (i, 1) of k; a row is one head of a token."""
    if tl.program_id(1) == 0:
        _head_layernorm(
            q_ptr, q_out_ptr, rows, q_token_vectors, q_head_vectors, eps, HEADS, HEAD_DIM, ROWS
        )
    else:
        _head_layernorm(
            k_ptr, k_out_ptr, rows, k_token_vectors, k_head_vectors, eps, HEADS, HEAD_DIM, ROWS
        )
