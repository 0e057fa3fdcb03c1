"""The two RMSNorms that kernels here repeat, spelled out in elementwise fp32 torch operations.

Both add the squares of a row in fp32: a thread adds its own values one after the other, then the
threads' sums are folded in pairs. They differ in which values a thread owns and in which pairs.
"""

import torch
import torch.nn.functional as F


def thread_sums(x, threads, vector):
    """[R, N] -> [R, threads]; thread t owns vectors t, t + threads, ... of `vector` neighbours."""
    padded = F.pad(x.float(), (0, -x.shape[1] % (threads * vector)))
    sums = torch.zeros(len(x), threads, device=x.device)
    for chunk in padded.view(len(x), -1, threads, vector).unbind(1):
        for v in range(vector):
            sums = sums + chunk[:, :, v] * chunk[:, :, v]
    return sums


def fold_halves(values):
    """SHFL.DOWN by half, a quarter, ...: value i takes value i + n / 2, along the last axis."""
    while values.shape[-1] > 1:
        low, high = values.chunk(2, dim=-1)
        values = low + high
    return values[..., 0]


def fold_adjacent(values):
    """Butterfly by 1, 2, 4, ...: neighbours first, along the last axis."""
    while values.shape[-1] > 1:
        values = values[..., 0::2] + values[..., 1::2]
    return values[..., 0]


def aten_sum_of_squares(x):
    """aten's fused RMSNorm: 32 x 4 threads, vectors of 4, halves first in lanes and in warps."""
    return fold_halves(fold_halves(thread_sums(x, 128, 4).unflatten(1, (4, 32))))


def flashinfer_sum_of_squares(x, threads):
    """flashinfer's RMSNorm: vectors of 8, neighbours first in lanes and in warps."""
    return fold_adjacent(thread_sums(x, threads, 8))


def rmsnorm_from_sum(x, weight, total, eps):
    """bf16 [R, N] and the fp32 sums [R] -> the norm, rounded once to x's dtype."""
    mean = total / torch.full_like(total, x.shape[1])
    rstd = torch.rsqrt(mean + eps)[:, None]
    return ((x.float() * rstd) * weight.float()).to(x.dtype)
