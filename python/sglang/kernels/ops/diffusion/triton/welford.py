"""Welford's running mean and squared deviation, as aten's LayerNorm kernel forms and merges them.

The contract is in `layernorm_modulate.py`. A state is (mean, m2, count), m2 being the sum of
squared deviations; each of the 128 threads of aten's (32, 4) block has one. Importing needs triton.
"""

import triton
import triton.language as tl

from sglang.kernels.ops.diffusion.triton.ptx import (
    add_rn,
    fma_rn,
    mul_rn,
    rcp_rn,
    sub_rn,
    widen,
)


@triton.jit
def _welford_step(
    value: tl.tensor, mean: tl.tensor, m2: tl.tensor, reciprocal: tl.constexpr
) -> tl.tensor:
    delta = sub_rn(value, mean)
    new_mean = fma_rn(delta, reciprocal, mean)
    return new_mean, fma_rn(delta, sub_rn(value, new_mean), m2)


@triton.jit
def welford_vector(
    vectors: tl.tensor, mean: tl.tensor, m2: tl.tensor, SEEN: tl.constexpr
) -> tl.tensor:
    """Four serial steps of each thread, which has seen SEEN values; vectors [*, *, 4].

    A correctly rounded 1/n is what aten's guarded reciprocal gives; it is a constant here.
    """
    outer: tl.constexpr = vectors.shape[0]
    inner: tl.constexpr = vectors.shape[1]
    even, odd = tl.split(tl.reshape(widen(vectors), (outer, inner, 2, 2)))
    value_0, value_2 = tl.split(even)
    value_1, value_3 = tl.split(odd)
    mean, m2 = _welford_step(value_0, mean, m2, 1.0 / (SEEN + 1))
    mean, m2 = _welford_step(value_1, mean, m2, 1.0 / (SEEN + 2))
    mean, m2 = _welford_step(value_2, mean, m2, 1.0 / (SEEN + 3))
    return _welford_step(value_3, mean, m2, 1.0 / (SEEN + 4))


@triton.jit
def merge(
    mean: tl.tensor,
    m2: tl.tensor,
    count: tl.tensor,
    other_mean: tl.tensor,
    other_m2: tl.tensor,
    other_count: tl.tensor,
) -> tl.tensor:
    """Merge a thread's state with the one that reaches it; two empty ones give an empty one.

    Not symmetric: the weighted mean of the thread itself is rounded, the other's is fused.
    """
    delta = sub_rn(mean, other_mean)
    total = add_rn(count, other_count)
    reciprocal = rcp_rn(total)
    weight = mul_rn(count, reciprocal)
    other_weight = mul_rn(other_count, reciprocal)
    merged_mean = fma_rn(other_mean, other_weight, mul_rn(mean, weight))
    spread = mul_rn(other_count, mul_rn(delta, delta))
    merged_m2 = fma_rn(spread, weight, add_rn(other_m2, m2))
    filled = total > 0
    return tl.where(filled, merged_mean, 0.0), tl.where(filled, merged_m2, 0.0), total


@triton.jit
def merge_even(
    mean: tl.tensor, m2: tl.tensor, other_mean: tl.tensor, other_m2: tl.tensor, COUNT: tl.constexpr
) -> tl.tensor:
    """`merge` where both have COUNT values and COUNT * rcp(2 * COUNT) is exactly 0.5."""
    delta = sub_rn(mean, other_mean)
    merged_mean = fma_rn(other_mean, 0.5, mul_rn(mean, 0.5))
    return merged_mean, fma_rn(mul_rn(COUNT, mul_rn(delta, delta)), 0.5, add_rn(other_m2, m2))


@triton.jit
def merge_empty(mean: tl.tensor, m2: tl.tensor) -> tl.tensor:
    """`merge` with an empty state where count * rcp(count) is exactly 1: zeros are still added.

    (A squared mean that overflows makes the sum NaN here, as it does in aten.)
    """
    spread = mul_rn(0.0, mul_rn(mean, mean))
    return add_rn(mean, 0.0), add_rn(spread, add_rn(0.0, m2))


@triton.jit
def _xor(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return a ^ b


@triton.jit
def _or(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return a | b


@triton.jit
def _partner(x: tl.tensor) -> tl.tensor:
    """[ROWS, 2, N] -> the same with both halves of axis 1 exchanged; one shuffle, or none."""
    bits = x.to(tl.int32, bitcast=True)
    both = tl.reduce(bits, 1, _xor)
    return (bits ^ both[:, None, :]).to(tl.float32, bitcast=True)


@triton.jit
def _first(x: tl.tensor) -> tl.tensor:
    """[ROWS, N] -> entry 0 of each row as [ROWS], bit for bit."""
    rows: tl.constexpr = x.shape[0]
    lanes: tl.constexpr = x.shape[1]
    bits = tl.where(tl.arange(0, lanes)[None, :] == 0, x.to(tl.int32, bitcast=True), 0)
    for step in tl.static_range(16):
        if lanes >> step > 1:
            bits = tl.reduce(tl.reshape(bits, (rows, lanes >> (step + 1), 2)), 2, _or)
    return tl.reshape(bits, (rows,)).to(tl.float32, bitcast=True)


@triton.jit
def fold_even(mean: tl.tensor, m2: tl.tensor, COUNT: tl.constexpr) -> tl.tensor:
    """[ROWS, N lanes] -> merged [ROWS], by halves, where every lane has seen COUNT values.

    Each lane merges with the one N/2, N/4, ... away. The upper ones get what is never used.
    """
    rows: tl.constexpr = mean.shape[0]
    lanes: tl.constexpr = mean.shape[1]
    for step in tl.static_range(16):
        if lanes >> step > 1:
            mean = tl.reshape(mean, (rows << step, 2, lanes >> (step + 1)))
            m2 = tl.reshape(m2, (rows << step, 2, lanes >> (step + 1)))
            mean, m2 = merge_even(mean, m2, _partner(mean), _partner(m2), COUNT * 2.0**step)
    return _first(tl.reshape(mean, (rows, lanes))), _first(tl.reshape(m2, (rows, lanes)))
