"""Fused RMSNorm + modulation, with and without the gated residual, at ERNIE-Image's shapes.

    python benchmark/kernels/bench_rmsnorm_scale_shift_bitexact.py

One row per norm that this machine has: aten's always, flashinfer's where the package is installed.
"""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from timing import BenchRow, bench_row, compiled  # noqa: E402

from sglang.kernels.ops.diffusion.triton.rmsnorm_scale_shift_bitexact import (  # noqa: E402
    fused_rmsnorm_scale_shift_bitexact,
    fused_scale_residual_rmsnorm_scale_shift_bitexact,
    rmsnorm_scale_shift_reference,
    scale_residual_rmsnorm_scale_shift_reference,
)

EPS = 1e-6
SHAPES = (
    (1, 4216, 4096), (1, 4096, 4096), (2, 1140, 4096), (2, 4216, 4096),
    (1, 128, 2048), (1, 1144, 4096), (1, 16504, 4096), (1, 1000, 4096),
)  # fmt: skip
NORMS = ("aten", "flashinfer") if importlib.util.find_spec("flashinfer") else ("aten",)


def inputs(shape: tuple[int, int, int]) -> tuple[torch.Tensor, ...]:
    """residual, update, gate, weight, scale, shift; rows are chunks of one adaLN projection."""
    batch, _, hidden = shape
    residual, update = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    adaln = torch.randn(batch, 6 * hidden, device="cuda", dtype=torch.bfloat16)
    gate, scale, shift = adaln.chunk(6, dim=-1)[:3]
    weight = torch.randn(hidden, device="cuda", dtype=torch.bfloat16)
    return residual, update, gate, weight, scale, shift


def norm_row(shape: tuple[int, int, int], norm: str) -> BenchRow:
    residual, _, _, *rows = inputs(shape)

    def eager() -> torch.Tensor:
        return rmsnorm_scale_shift_reference(residual, *rows, EPS, norm)

    return bench_row(
        f"rmsnorm_scale_shift_bitexact[{norm}]",
        shape,
        torch.bfloat16,
        eager,
        lambda: fused_rmsnorm_scale_shift_bitexact(residual, *rows, EPS, norm),
        2 * residual.nbytes,
        compiled(eager) if norm == "aten" else None,
    )


def residual_row(shape: tuple[int, int, int], norm: str) -> BenchRow:
    args = (*inputs(shape), EPS, norm)

    def eager() -> tuple[torch.Tensor, ...]:
        return scale_residual_rmsnorm_scale_shift_reference(*args)

    return bench_row(
        f"scale_residual_rmsnorm_scale_shift_bitexact[{norm}]",
        shape,
        torch.bfloat16,
        eager,
        lambda: fused_scale_residual_rmsnorm_scale_shift_bitexact(*args),
        4 * args[0].nbytes,
        compiled(eager) if norm == "aten" else None,
    )


def rows() -> Iterator[BenchRow]:
    """One row per norm, shape and op; inputs of one row are freed before the next."""
    with torch.no_grad():
        for norm in NORMS:
            yield from (norm_row(shape, norm) for shape in SHAPES)
            yield from (residual_row(shape, norm) for shape in SHAPES)


if __name__ == "__main__":
    for row in rows():
        print(row)
