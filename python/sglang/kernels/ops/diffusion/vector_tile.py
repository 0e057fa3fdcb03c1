"""What the elementwise CUDA kernels share: 16-byte vectors, rows and tiles of them, names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from sglang.kernels.jit import CudaKernel

VECTOR_BYTES = 16
MAX_VECTORS = 2**32 - 2**16  # the kernels index vectors with 32 bits; one tile of room
SOURCES = Path(__file__).parent / "csrc"


@dataclass(frozen=True)
class VectorTile:
    """How a block covers adjoining vectors: `block` threads, each with several loads in flight."""

    # best of 12 tiles for the three ops together on an H200: benchmark/kernels/tile_sweep.py
    block: int = 128
    vectors_per_thread: int = 2

    def blocks(self, vectors: int) -> int:
        """Blocks that cover `vectors` vectors."""
        return -(-vectors // (self.block * self.vectors_per_thread))

    def kernel(self, source: str, name: str, dtype: torch.dtype, signature: str) -> CudaKernel:
        """The kernel ``<name>_<dtype>`` of ``csrc/<source>`` for this tile."""
        return CudaKernel(
            SOURCES / source,
            f"{name}_{str(dtype).removeprefix('torch.')}",
            signature,
            (f"BLOCK={self.block}", f"VECTORS_PER_THREAD={self.vectors_per_thread}"),
        )


def row_distance(x: torch.Tensor) -> int:
    """Values from one row of x [B, S, D] to the next; 1 where rows have no common distance."""
    batch, rows, width = x.shape
    outer, row, inner = x.stride()
    if inner != 1:
        return 1
    if rows == 1:
        return outer if batch > 1 else width
    return row if batch == 1 or outer == rows * row else 1
