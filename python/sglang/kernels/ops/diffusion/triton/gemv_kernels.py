"""Triton kernels of `gemv.py`; the numerical contract is written there."""

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

from sglang.kernels.ops.diffusion.triton.ptx import add_rn, div_rn, mul_rn, round_to, widen


@triton.jit
def _exp(x: tl.tensor) -> tl.tensor:
    return libdevice.exp(x)


@triton.jit
def _row_dots(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    rows: tl.tensor,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UNROLL: tl.constexpr,
) -> tl.tensor:
    """fp32 `[R]` dot products of x `[K]` and the rows `[R]` of weight `[., K]`."""
    cols = tl.arange(0, BLOCK_K)[None, :]
    tile = weight_ptr + rows.to(tl.int64)[:, None] * K + cols
    first = tl.load(tile, mask=cols < K, other=0.0, eviction_policy="evict_first")
    x = tl.load(x_ptr + cols, mask=cols < K, other=0.0)
    acc = widen(first) * widen(x)
    for k in tl.range(BLOCK_K, K, BLOCK_K, loop_unroll_factor=UNROLL):
        inside = cols < K - k
        w = tl.load(tile + k, mask=inside, other=0.0, eviction_policy="evict_first")
        x = tl.load(x_ptr + k + cols, mask=inside, other=0.0)
        acc += widen(w) * widen(x)
    return tl.sum(acc, axis=1)


@triton.jit
def gemv_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UNROLL: tl.constexpr,
) -> None:
    """One program = BLOCK_N rows. Past the end the last row is read again and not stored."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = rows < N
    rows = tl.minimum(rows, N - 1)
    bias = tl.zeros((BLOCK_N,), tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + rows).to(tl.float32)
    y = _row_dots(x_ptr, weight_ptr, rows, K, BLOCK_K, UNROLL) + bias
    tl.store(out_ptr + rows, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def gemv_qkv_kernel(
    x_ptr: tl.tensor,
    q_weight_ptr: tl.tensor,
    k_weight_ptr: tl.tensor,
    v_weight_ptr: tl.tensor,
    q_bias_ptr: tl.tensor,
    k_bias_ptr: tl.tensor,
    v_bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    NQ: tl.constexpr,
    NK: tl.constexpr,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UNROLL: tl.constexpr,
) -> None:
    """The rows of three matrices, one after the other; none shares a program with another."""
    first = tl.program_id(0) * BLOCK_N
    weight_ptr, bias_ptr, start = q_weight_ptr, q_bias_ptr, 0
    if first >= NQ + NK:
        weight_ptr, bias_ptr, start = v_weight_ptr, v_bias_ptr, NQ + NK
    elif first >= NQ:
        weight_ptr, bias_ptr, start = k_weight_ptr, k_bias_ptr, NQ
    rows = first - start + tl.arange(0, BLOCK_N)
    bias = tl.zeros((BLOCK_N,), tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + rows).to(tl.float32)
    y = _row_dots(x_ptr, weight_ptr, rows, K, BLOCK_K, UNROLL) + bias
    tl.store(out_ptr + start + rows, y.to(out_ptr.dtype.element_ty))


@triton.jit
def gemv_swiglu_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UNROLL: tl.constexpr,
) -> None:
    """One program = BLOCK_N values: the rows `n` (gate) and `N + n` (up) of each."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    pairs = tl.arange(0, 2 * BLOCK_N)
    values = tl.program_id(0) * BLOCK_N + pairs // 2
    rows = tl.minimum(values, N - 1) + pairs % 2 * N
    y = _row_dots(x_ptr, weight_ptr, rows, K, BLOCK_K, UNROLL)
    y = round_to(y, dtype)  # in pairs, so before gates and ups part
    silu = round_to(div_rn(y, add_rn(_exp(-y), 1.0)), dtype)
    silu, _ = tl.split(tl.reshape(silu, (BLOCK_N, 2)))
    _, up = tl.split(tl.reshape(y, (BLOCK_N, 2)))
    out = mul_rn(up, silu)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tl.store(out_ptr + rows, out.to(dtype), mask=rows < N)
