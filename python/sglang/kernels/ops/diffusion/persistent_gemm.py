"""What the GEMMs with an epilogue of their own share: tiles, tensor maps, launches.

``csrc/persistent_gemm.cuh`` says how they work. They are for Hopper (sm_90a), take K in steps of 64
and N in whole tiles; any number of rows. Their sums have the bits of cuBLAS's kernels that do not
cut K; which kernel cuBLAS picks depends on the shapes, so that a site proves it for each.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from sglang.kernels.jit import CudaKernel
from sglang.kernels.ops.diffusion.vector_tile import SOURCES

DTYPES = (torch.bfloat16, torch.float16)
ARCHITECTURE = "sm_90a"
ROWS, DEPTH, CLUSTER, THREADS = 128, 64, 2, 384  # as in the .cuh
MIN_DEPTH = 16 * DEPTH  # a piece of the epilogue for every block of K, at least
MIN_ROWS = 1024
MIN_FILLED = 0.85  # of the multiprocessors' time in whole waves of tiles
ALIGNMENT_BYTES = 16
ROW_PAIRS_TOGETHER = 6  # fastest of 5, 6, 9, 12 and 18 at FLUX.1's shapes on an H200


@dataclass(frozen=True)
class GemmTile:
    """A block's tile: `columns` wide, with as many stages of K as shared memory has room for."""

    columns: int
    stages: int

    @property
    def shared_bytes(self) -> int:
        """Stages of x and weight, two barriers each, and room to align them to 1024 bytes."""
        return self.stages * ((ROWS + self.columns) * DEPTH * 2 + 16) + 1024

    def kernel(self, op: str, source: str, signature: str, dtype: torch.dtype) -> CudaKernel:
        """The kernel ``<op>_<dtype>`` of ``csrc/<source>`` for this tile."""
        sizes = (f"TILE_COLUMNS={self.columns}", f"STAGES={self.stages}")
        return CudaKernel(
            SOURCES / source,
            f"{op}_{str(dtype).removeprefix('torch.')}",
            signature,
            sizes + (("FLOAT16",) if dtype == torch.float16 else ()),
            only_on=ARCHITECTURE,
            shared_bytes=self.shared_bytes,
        )

    def pairs(self, rows: int, columns: int) -> int:
        """Pairs of tiles, one a cluster, that cover an output."""
        return -(-rows // (CLUSTER * ROWS)) * (columns // self.columns)

    def blocks(self, rows: int, columns: int, device: int) -> int:
        """Blocks to launch: one for each multiprocessor, or fewer where tiles are few."""
        return CLUSTER * min(self.pairs(rows, columns), multiprocessors(device) // CLUSTER)

    def time(self, rows: int, columns: int, device: int) -> int:
        """Columns that the busiest cluster computes, one after the other."""
        clusters = multiprocessors(device) // CLUSTER
        return -(-self.pairs(rows, columns) // clusters) * self.columns


TILES = (GemmTile(256, 4), GemmTile(192, 5))


def best_tile(rows: int, columns: int, device: int) -> GemmTile | None:
    """The tile that is done first with an output [rows, columns], or None where none fits it."""
    fitting = [tile for tile in TILES if columns % tile.columns == 0]
    return min(fitting, key=lambda tile: tile.time(rows, columns, device), default=None)


def fills_device(rows: int, columns: int, device: int) -> bool:
    """Whether whole tiles keep the GPU about as busy as cuBLAS's choice of many sizes does."""
    tile = best_tile(rows, columns, device)
    if tile is None or rows < MIN_ROWS or not columns:
        return False
    clusters = multiprocessors(device) // CLUSTER
    ideal = rows * columns / (CLUSTER * ROWS * clusters)
    return ideal >= MIN_FILLED * tile.time(rows, columns, device)


def is_matrix(x: Tensor, dtype: torch.dtype, device: int) -> bool:
    """Whether TMA reads x: contiguous, aligned, K as the kernels take it."""
    if x.dtype != dtype or x.get_device() != device or not x.is_contiguous():
        return False
    depth = x.shape[-1]
    return depth % DEPTH == 0 and depth >= MIN_DEPTH and x.data_ptr() % ALIGNMENT_BYTES == 0


def matrix_map(x: Tensor, rows: int) -> bytes:
    """The tensor map by which TMA reads `rows` x DEPTH values of x [..., K], swizzled."""
    depth = x.shape[-1]
    return _encode_map(x.data_ptr(), x.numel() // depth, depth, rows, x.dtype)


@functools.lru_cache(maxsize=4096)
def _encode_map(address: int, rows: int, depth: int, box_rows: int, dtype: torch.dtype) -> bytes:
    """A map holds nothing but these, so that it is good for any later tensor at the address."""
    from cuda.bindings import driver

    types, name = driver.CUtensorMapDataType, str(dtype).removeprefix("torch.").upper()
    status, encoded = driver.cuTensorMapEncodeTiled(
        getattr(types, f"CU_TENSOR_MAP_DATA_TYPE_{name}"),
        2,
        address,
        [driver.cuuint64_t(depth), driver.cuuint64_t(rows)],
        [driver.cuuint64_t(2 * depth)],
        [driver.cuuint32_t(DEPTH), driver.cuuint32_t(box_rows)],
        [driver.cuuint32_t(1)] * 2,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if int(status) != 0:
        raise RuntimeError(f"no tensor map of {rows} x {depth} {name} at {address:#x}: {status}")
    return ctypes.string_at(int(encoded.getPtr()), 128)


@functools.cache
def multiprocessors(device: int) -> int:
    """Of CUDA device `device`."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def is_hopper(device: int) -> bool:
    """Whether CUDA device `device` has the instructions."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability(device) == (9, 0)
