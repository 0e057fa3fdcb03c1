"""Products of one vector with the matrices of GLM-Image's prior, against cuBLAS.

python benchmark/kernels/bench_gemv.py

`equal` says no by design: the kernel adds in another order than cuBLAS, and is the definition of
the product where it is used.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from timing import BenchRow, bench_row, compiled  # noqa: E402

from sglang.kernels.ops.diffusion.triton.gemv import (  # noqa: E402
    gemv,
    gemv_qkv,
    gemv_qkv_reference,
    gemv_reference,
    gemv_swiglu,
    gemv_swiglu_reference,
)

HIDDEN, WIDE, KEYS, VOCABULARY = 4096, 13696, 256, 16384


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def row(
    op: str,
    rows: int,
    columns: int,
    eager: Callable[[], torch.Tensor],
    fused: Callable[[], torch.Tensor],
) -> BenchRow:
    """rows, columns: of the matrix, or of the joined ones."""
    bytes_moved = 2 * (rows * columns + columns + rows)
    compile_fn = compiled(eager) if rows == columns else None
    return bench_row(op, (rows, columns), torch.bfloat16, eager, fused, bytes_moved, compile_fn)


def plain_row(rows: int, columns: int) -> BenchRow:
    x, weight = normal(1, 1, columns), normal(rows, columns)
    return row("gemv", rows, columns, lambda: gemv_reference(x, weight), lambda: gemv(x, weight))


def qkv_row() -> BenchRow:
    x, biases = normal(1, 1, HIDDEN), [normal(n) for n in (HIDDEN, KEYS, KEYS)]
    weights = [normal(n, HIDDEN) for n in (HIDDEN, KEYS, KEYS)]
    return row(
        "gemv_qkv",
        HIDDEN + 2 * KEYS,
        HIDDEN,
        lambda: gemv_qkv_reference(x, *weights, biases),
        lambda: gemv_qkv(x, *weights, biases),
    )


def swiglu_row() -> BenchRow:
    x, weight = normal(1, 1, HIDDEN), normal(2 * WIDE, HIDDEN)
    return row(
        "gemv_swiglu",
        2 * WIDE,
        HIDDEN,
        lambda: gemv_swiglu_reference(x, weight),
        lambda: gemv_swiglu(x, weight),
    )


def rows() -> Iterator[BenchRow]:
    """One row a matrix of a layer, and the head."""
    with torch.no_grad():
        yield qkv_row()
        yield plain_row(HIDDEN, HIDDEN)
        yield swiglu_row()
        yield plain_row(HIDDEN, WIDE)
        yield plain_row(VOCABULARY, HIDDEN)


if __name__ == "__main__":
    for line in rows():
        print(line)
