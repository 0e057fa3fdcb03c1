"""Triton kernel of `residual_rmsnorm.py`; the numerical contract is written there."""

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
from sglang.kernels.ops.diffusion.triton.rms_sum import add_squares_of_4, fold_halves

CHUNK = tl.constexpr(512)  # of a row: a vector of 4 for each of aten's 128 threads


@triton.jit
def _rstd(acc: tl.tensor, eps: tl.tensor, D: tl.constexpr) -> tl.tensor:
    """Of the sums `[1, 128]` of aten's 4 warps of 32 threads: lanes first, then warps.

    The warps fold in registers, (0 + 2) + (1 + 3), which spares two exchanges between warps.
    """
    warps = fold_halves(tl.reshape(acc, (4, 32)))
    first, second = tl.split(tl.trans(tl.reshape(warps, (2, 2))))
    even, odd = tl.split(first + second)
    return rsqrt_approx(add_rn(div_rn(even + odd, D * 1.0), eps))


@triton.jit
def _read(ptr: tl.tensor, D: tl.constexpr) -> tl.tuple:
    """A row of D values in chunks `[1, CHUNK]`, zero past its end; all loads fly at once."""
    chunks = ()
    for start in tl.static_range(0, D, CHUNK):
        cols = start + tl.arange(0, CHUNK)[None, :]
        chunks = chunks + (tl.load(ptr + cols, mask=cols < D, other=0.0),)
    return chunks


@triton.jit
def _write(ptr: tl.tensor, chunks: tl.tuple, D: tl.constexpr) -> None:
    for i in tl.static_range(len(chunks)):
        cols = i * CHUNK + tl.arange(0, CHUNK)[None, :]
        tl.store(ptr + cols, chunks[i].to(ptr.dtype.element_ty), mask=cols < D)


@triton.jit
def _normed(
    chunks: tl.tuple, weights: tl.tuple, eps: tl.tensor, dtype: tl.constexpr, D: tl.constexpr
) -> tl.tuple:
    """fp32 round(weight * round(rstd * x)) of every chunk."""
    acc = tl.zeros((1, CHUNK // 4), tl.float32)
    for i in tl.static_range(len(chunks)):
        acc = add_squares_of_4(acc, widen(chunks[i]))
    rstd = _rstd(acc, eps, D)
    normed = ()
    for i in tl.static_range(len(chunks)):
        scaled = round_to(mul_rn(rstd, widen(chunks[i])), dtype)
        normed = normed + (round_to(mul_rn(widen(weights[i]), scaled), dtype),)
    return normed


@triton.jit
def residual_rmsnorm_kernel(
    x_ptr: tl.tensor,
    update_ptr: tl.tensor,
    update_weight_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    out_ptr: tl.tensor,
    eps: tl.tensor,
    D: tl.constexpr,
    HAS_UPDATE: tl.constexpr,
) -> None:
    """One program = one row, in registers from its first load to its last store.

    Not HAS_UPDATE: x is normed, and `update*`, `sum` are unused. A store between two loads would
    make the second wait, so everything is read first.
    """
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * D
    weights = _read(weight_ptr, D)
    if HAS_UPDATE:
        update_weights = _read(update_weight_ptr, D)
    x = _read(x_ptr + row, D)
    if HAS_UPDATE:
        update = _normed(_read(update_ptr + row, D), update_weights, eps, dtype, D)
        total = ()
        for i in tl.static_range(len(x)):
            total = total + (add_rn(widen(x[i]), update[i]).to(dtype),)
        _write(sum_ptr + row, total, D)
        x = total
    _write(out_ptr + row, _normed(x, weights, eps, dtype, D), D)
