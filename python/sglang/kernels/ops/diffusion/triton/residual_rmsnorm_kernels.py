"""Triton kernel of `residual_rmsnorm.py`; the numerical contract is written there."""

import triton
import triton.language as tl

from sglang.kernels.ops.diffusion.triton.dependent_launch_kernels import begin, prefetch
from sglang.kernels.ops.diffusion.triton.ptx import (
    add_rn,
    div_rn,
    mul_rn,
    round_to,
    rsqrt_approx,
    widen,
)
from sglang.kernels.ops.diffusion.triton.rms_sum import add_squares_of_4, fold_halves


@triton.jit
def _rstd(acc: tl.tensor, eps: tl.tensor, D: tl.constexpr) -> tl.tensor:
    """Of the sums `[1, 128]` of aten's 4 warps of 32 threads: lanes first, then warps."""
    warps = fold_halves(tl.reshape(acc, (4, 32)))
    total = fold_halves(tl.reshape(warps, (1, 4)))
    return rsqrt_approx(add_rn(div_rn(total, D * 1.0), eps))


@triton.jit
def _read(ptr: tl.tensor, cols: tl.tensor, D: tl.constexpr) -> tl.tensor:
    return widen(tl.load(ptr + cols, mask=cols < D, other=0.0))


@triton.jit
def _normed(x: tl.tensor, rstd: tl.tensor, weight: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """fp32 round(weight * round(rstd * x))."""
    return round_to(mul_rn(weight, round_to(mul_rn(rstd[:, None], x), dtype)), dtype)


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
    LINES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program = one row. Not HAS_UPDATE: x is normed, and `update*`, `sum` are unused.

    A value is computed again in each pass rather than read back: its inputs are in L1.
    """
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    lines = tl.arange(0, LINES) * 64 % D  # the weights are cold: a step reads each once
    prefetch(weight_ptr + lines)
    if HAS_UPDATE:
        prefetch(update_weight_ptr + lines)
    begin(PDL)
    row = tl.program_id(0).to(tl.int64) * D
    x_ptr, update_ptr, sum_ptr, out_ptr = (
        x_ptr + row,
        update_ptr + row,
        sum_ptr + row,
        out_ptr + row,
    )
    chunk = tl.arange(0, 512)[None, :]
    update_rstd = tl.zeros((1,), tl.float32)
    if HAS_UPDATE:
        acc = tl.zeros((1, 128), tl.float32)
        for start in tl.static_range(0, D, 512):
            acc = add_squares_of_4(acc, _read(update_ptr, start + chunk, D))
        update_rstd = _rstd(acc, eps, D)
    acc = tl.zeros((1, 128), tl.float32)
    for start in tl.static_range(0, D, 512):
        cols = start + chunk
        x = _read(x_ptr, cols, D)
        if HAS_UPDATE:
            gain = _read(update_weight_ptr, cols, D)
            x = add_rn(x, _normed(_read(update_ptr, cols, D), update_rstd, gain, dtype))
            x = round_to(x, dtype)
            tl.store(sum_ptr + cols, x.to(dtype), mask=cols < D)
        acc = add_squares_of_4(acc, x)
    rstd = _rstd(acc, eps, D)
    for start in tl.static_range(0, D, 512):
        cols = start + chunk
        x = _read(x_ptr, cols, D)
        if HAS_UPDATE:
            gain = _read(update_weight_ptr, cols, D)
            x = add_rn(x, _normed(_read(update_ptr, cols, D), update_rstd, gain, dtype))
            x = round_to(x, dtype)
        y = _normed(x, rstd, _read(weight_ptr, cols, D), dtype)
        tl.store(out_ptr + cols, y.to(dtype), mask=cols < D)
