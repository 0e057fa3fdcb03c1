"""Order-exact pieces of a sum of squares, for kernels that repeat another kernel's RMSNorm.

Triton's own `tl.sum` adds in an order that follows its layout. Here every step adds exactly two
numbers, so that the order is part of the program: a reduction over an axis of length 2 is `a + b`
whatever the layout, because floating-point addition commutes. On the GPU such a step is one
butterfly shuffle, or one plain addition where both numbers live in the same thread.
"""

import triton
import triton.language as tl

from sglang.kernels.ops.diffusion.triton.ptx import add_rn, div_rn, mul_rn, rsqrt_approx


@triton.jit
def _plus(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return a + b


@triton.jit
def add_squares_of_4(acc: tl.tensor, x: tl.tensor) -> tl.tensor:
    """`acc = fma(v, v, acc)` for the 4 neighbours v of each vector, in memory order.

    x fp32 `[ROWS, 4 * N]`, acc fp32 `[ROWS, N]`. A square of bf16 or fp16 is exact in fp32 (at most
    22 bits), so the FMA equals a multiplication and an addition unless the square is subnormal.
    """
    rows: tl.constexpr = x.shape[0]
    vectors: tl.constexpr = x.shape[1] // 4
    even, odd = tl.split(tl.reshape(x, (rows, vectors, 2, 2)))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    acc = tl.fma(x0, x0, acc)
    acc = tl.fma(x1, x1, acc)
    acc = tl.fma(x2, x2, acc)
    return tl.fma(x3, x3, acc)


@triton.jit
def add_squares_of_8(acc: tl.tensor, x: tl.tensor) -> tl.tensor:
    """`acc = round(acc + round(v * v))` for the 8 neighbours v of each vector, in memory order.

    x fp32 `[ROWS, 8 * N]`, acc fp32 `[ROWS, N]`.
    """
    rows: tl.constexpr = x.shape[0]
    vectors: tl.constexpr = x.shape[1] // 8
    squares = tl.reshape(mul_rn(x, x), (rows, vectors, 2, 2, 2))
    even, odd = tl.split(squares)
    even_low, even_high = tl.split(even)  # bit 1 of the place in the vector
    odd_low, odd_high = tl.split(odd)
    s0, s4 = tl.split(even_low)
    s1, s5 = tl.split(odd_low)
    s2, s6 = tl.split(even_high)
    s3, s7 = tl.split(odd_high)
    acc = add_rn(add_rn(add_rn(add_rn(acc, s0), s1), s2), s3)
    return add_rn(add_rn(add_rn(add_rn(acc, s4), s5), s6), s7)


@triton.jit
def fold_halves(x: tl.tensor) -> tl.tensor:
    """`[ROWS, N]` -> `[ROWS]`: lane i takes lane i + N/2, then i + N/4, ... (SHFL.DOWN 16..1)."""
    rows: tl.constexpr = x.shape[0]
    lanes: tl.constexpr = x.shape[1]
    for step in tl.static_range(16):
        if lanes >> step > 1:
            x = tl.reduce(tl.reshape(x, (rows, 2, lanes >> (step + 1))), 1, _plus)
    return tl.reshape(x, (rows,))


@triton.jit
def fold_adjacent(x: tl.tensor) -> tl.tensor:
    """`[ROWS, N]` -> `[ROWS]`: lane i takes lane i ^ 1, then i ^ 2, ... (butterfly from 1 up)."""
    rows: tl.constexpr = x.shape[0]
    lanes: tl.constexpr = x.shape[1]
    for step in tl.static_range(16):
        if lanes >> step > 1:
            x = tl.reduce(tl.reshape(x, (rows, lanes >> (step + 1), 2)), 2, _plus)
    return tl.reshape(x, (rows,))


@triton.jit
def rstd_of_sum(total: tl.tensor, eps: tl.tensor, D: tl.constexpr) -> tl.tensor:
    """`rsqrt.approx(total / D (div.rn) + eps)` of the sums of squares of rows of D values."""
    if D & (D - 1) == 0:
        mean = mul_rn(total, 1.0 / D)  # exact, so the same as the division
    else:
        mean = div_rn(total, D * 1.0)
    return rsqrt_approx(add_rn(mean, eps))
