"""Numpy models of the reductions that the bit-exact kernels repeat: the order, spelled out.

Every operation is fp32 with one rounding to nearest even, as in the machine code of the kernel that
is named: aten's `vectorized_layer_norm_kernel` (torch 2.11, sm_90) and flashinfer's RMSNorm. Rows
are fp32 arrays `[R, N]` of values that a 16-bit dtype can hold. The models stop before the
reciprocal square root, which the hardware approximates.
"""

from typing import NamedTuple

import numpy as np

THREADS, LANES, VECTOR = 128, 32, 4  # aten's block of 32 x 4 threads, and a thread's vector


class Moments(NamedTuple):
    """Mean, sum of squared deviations and number of values seen, fp32 arrays of one shape."""

    mean: np.ndarray
    m2: np.ndarray
    count: np.ndarray


def fma32(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """`a * b + c` of fp32 arrays with a single rounding.

    The product of two fp32 numbers is exact in fp64. Its sum with `c` is rounded to odd there, so
    that the rounding to fp32 (53 >= 24 + 2 bits) sees on which side of a tie the exact sum lies.
    """
    with np.errstate(all="ignore"):
        product, addend = np.asarray(a, np.float64) * b, np.asarray(c, np.float64)
        total = product + addend
        part = total - product
        error = (product - (total - part)) + (addend - part)
        even = total.view(np.int64) & 1 == 0
        inexact = np.isfinite(total) & (error != 0) & even
        odd = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
        return np.where(inexact, odd, total).astype(np.float32)


def layer_norm_moments(rows: np.ndarray) -> Moments:
    """Aten's LayerNorm: `[R, N]` (N % 4 == 0) -> moments `[R]`; the variance is m2 / N."""
    state = _thread_moments(rows)
    warps = Moments(*(x.reshape(len(rows), THREADS // LANES, LANES) for x in state))
    return fold_moments(fold_moments(warps))


def _thread_moments(rows: np.ndarray) -> Moments:
    """Thread t runs serially over vectors t, t + 128, ...: moments `[R, 128]`."""
    vectors = rows.reshape(len(rows), -1, VECTOR)
    state = Moments(*(np.zeros((len(rows), THREADS), np.float32) for _ in range(3)))
    for start in range(0, vectors.shape[1], THREADS):
        chunk = vectors[:, start : start + THREADS]
        for element in range(VECTOR):
            values = chunk[:, :, element]
            busy = Moments(*(x[:, : values.shape[1]] for x in state))
            for target, new in zip(busy, welford_step(values, busy), strict=True):
                target[...] = new
    return state


def welford_step(values: np.ndarray, state: Moments) -> Moments:
    """One value more: both products are fused with the sum that follows them."""
    with np.errstate(all="ignore"):
        delta = values - state.mean
        count = state.count + np.float32(1)
        mean = fma32(delta, np.float32(1) / count, state.mean)
        return Moments(mean, fma32(delta, values - mean, state.m2), count)


def merge_moments(own: Moments, other: Moments) -> Moments:
    """A thread takes in the state that another hands to it; empty with empty stays zero.

    Not symmetric: the own weighted mean is rounded, the other's is fused.
    """
    with np.errstate(all="ignore"):
        delta = own.mean - other.mean
        count = own.count + other.count
        reciprocal = np.float32(1) / count
        weight, other_weight = own.count * reciprocal, other.count * reciprocal
        mean = fma32(other.mean, other_weight, own.mean * weight)
        m2 = fma32(other.count * (delta * delta), weight, other.m2 + own.m2)
    zero = np.float32(0)
    return Moments(np.where(count > 0, mean, zero), np.where(count > 0, m2, zero), count)


def fold_moments(state: Moments) -> Moments:
    """Entry i takes entry i + n/2, then i + n/4, ... along the last axis, which goes away."""
    while state.mean.shape[-1] > 1:
        half = state.mean.shape[-1] // 2
        own = Moments(*(x[..., :half] for x in state))
        state = merge_moments(own, Moments(*(x[..., half:] for x in state)))
    return Moments(*(x[..., 0] for x in state))


def aten_sum_of_squares(rows: np.ndarray) -> np.ndarray:
    """Aten's fused RMSNorm: `[R, N]` (N % 4 == 0) -> fp32 `[R]`; squares are fused with the sum."""
    padded = np.pad(rows, ((0, 0), (0, -rows.shape[1] % (THREADS * VECTOR))))
    sums = np.zeros((len(rows), THREADS), np.float32)
    for chunk in padded.reshape(len(rows), -1, THREADS, VECTOR).swapaxes(0, 1):
        for element in range(VECTOR):
            sums = fma32(chunk[:, :, element], chunk[:, :, element], sums)
    return fold_halves(fold_halves(sums.reshape(len(rows), THREADS // LANES, LANES)))


def flashinfer_sum_of_squares(rows: np.ndarray, threads: int) -> np.ndarray:
    """Flashinfer's RMSNorm: `[R, 8 * threads * b]` -> fp32 `[R]`; squares are rounded.

    Thread t owns the vectors of eight t, t + threads, ...; the threads' sums are added as a
    butterfly adds them: neighbours first.
    """
    sums = np.zeros((len(rows), threads), np.float32)
    for chunk in rows.reshape(len(rows), -1, threads, 8).swapaxes(0, 1):
        for element in range(8):
            sums = sums + chunk[:, :, element] * chunk[:, :, element]
    return fold_neighbours(sums)


def fold_halves(values: np.ndarray) -> np.ndarray:
    """Entry i adds entry i + n/2, then i + n/4, ... along the last axis, which goes away."""
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        values = values[..., half:] + values[..., :half]
    return values[..., 0]


def fold_neighbours(values: np.ndarray) -> np.ndarray:
    """A butterfly with offsets 1, 2, 4, ... along the last axis, which goes away."""
    while values.shape[-1] > 1:
        values = values[..., 0::2] + values[..., 1::2]
    return values[..., 0]
