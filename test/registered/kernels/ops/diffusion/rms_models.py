"""The summation orders of the two RMSNorms that kernels here repeat, in plain numpy.

Both add the squares of a row in fp32: a thread adds its own values one after the other, then the
threads' sums are folded in pairs. They differ in which values a thread owns and in which pairs.
"""

import numpy as np


def sum_of_squares(row, threads, vector, fold_warps, fold_lanes):
    """Thread t owns vectors t, t + threads, ... of `vector` neighbours; missing values are 0."""
    width = threads * vector
    padded = np.zeros(-(-len(row) // width) * width, np.float32)
    padded[: len(row)] = np.asarray(row, np.float32)
    sums = np.zeros(threads, np.float32)
    for chunk in padded.reshape(-1, threads, vector):
        for v in range(vector):
            sums = sums + chunk[:, v] * chunk[:, v]
    warps = [fold_lanes(lanes) for lanes in sums.reshape(-1, min(threads, 32))]
    return fold_warps(np.array(warps, np.float32))


def fold_halves(values):
    """SHFL.DOWN by half, a quarter, ... : value i takes value i + n / 2."""
    while len(values) > 1:
        half = len(values) // 2
        values = values[:half] + values[half:]
    return values[0]


def fold_adjacent(values):
    """Butterfly by 1, 2, 4, ...: neighbours first."""
    while len(values) > 1:
        values = values[0::2] + values[1::2]
    return values[0]


def aten_sum_of_squares(row):
    """aten's fused RMSNorm: 32 x 4 threads, vectors of 4, halves first in lanes and in warps."""
    return sum_of_squares(row, 128, 4, fold_halves, fold_halves)


def flashinfer_sum_of_squares(row, threads):
    """flashinfer's RMSNorm: vectors of 8, neighbours first in lanes and in warps."""
    return sum_of_squares(row, threads, 8, fold_adjacent, fold_adjacent)
