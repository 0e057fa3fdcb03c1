"""Norm, residual and norm in one kernel, against the eager chain, at GLM-Image's prior.

python benchmark/kernels/bench_residual_rmsnorm.py

One row of 4096 is all latency; more rows show the rate at which the kernel moves bytes.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from timing import BenchRow, bench_row, compiled  # noqa: E402

from sglang.kernels.ops.diffusion.triton.residual_rmsnorm import (  # noqa: E402
    fused_residual_rmsnorm,
    residual_rmsnorm_reference,
)

HIDDEN, EPS = 4096, 1e-5
ROWS = (1, 64, 4096)


def row(count: int) -> BenchRow:
    x, update = torch.randn(2, count, HIDDEN, device="cuda", dtype=torch.bfloat16)
    weights = torch.randn(2, HIDDEN, device="cuda", dtype=torch.bfloat16)

    def eager() -> tuple[torch.Tensor, ...]:
        return residual_rmsnorm_reference(x, update, *weights, EPS)

    return bench_row(
        "residual_rmsnorm",
        (count, HIDDEN),
        torch.bfloat16,
        eager,
        lambda: fused_residual_rmsnorm(x, update, *weights, EPS),
        2 * (4 * count + 2) * HIDDEN,
        compiled(eager) if count == 1 else None,
    )


def rows() -> Iterator[BenchRow]:
    """One row a number of rows."""
    with torch.no_grad():
        yield from map(row, ROWS)


if __name__ == "__main__":
    for line in rows():
        print(line)
