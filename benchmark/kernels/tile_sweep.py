"""GPU time of the elementwise kernels for each tile.

python benchmark/kernels/tile_sweep.py

The times choose `VectorTile`'s defaults: cold L2, bfloat16, FLUX.1 shapes; microseconds, with the
percentage of the copy ceiling.
"""

import itertools
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "benchmark")]

import torch  # noqa: E402
from timing import copy_ceiling_tbps, time_us  # noqa: E402

from sglang.kernels.jit import CudaKernel  # noqa: E402
from sglang.kernels.ops.diffusion.gelu_tanh_concat import GeluTanhConcatKernels  # noqa: E402
from sglang.kernels.ops.diffusion.modulate_scale_shift import (  # noqa: E402
    ModulateScaleShiftKernels,
)
from sglang.kernels.ops.diffusion.residual_gate_add import ResidualGateAddKernels  # noqa: E402
from sglang.kernels.ops.diffusion.vector_tile import VectorTile  # noqa: E402

ROWS = (512, 4096, 4608)
HIDDEN = 3072
TILES = [VectorTile(*pair) for pair in itertools.product((128, 256, 512, 1024), (1, 2, 4))]
Case = tuple[Callable[[], object], int]  # the call and the bytes it moves


def _ready(kernel: CudaKernel) -> CudaKernel:
    assert kernel.ready(0), kernel.failure
    return kernel


def gate_case(tile: VectorTile, x: torch.Tensor, row: torch.Tensor) -> Case:
    kernels = ResidualGateAddKernels(tile)
    kernel, update = _ready(kernels.select(x, row)), x.clone()
    return lambda: kernels.launch(kernel, x, update, row), 6 * x.numel()


def modulate_case(tile: VectorTile, x: torch.Tensor, row: torch.Tensor) -> Case:
    kernels = ModulateScaleShiftKernels(tile)
    _ready(kernels.by_dtype[x.dtype])
    return lambda: kernels.launch(x, row, row), 4 * x.numel()


def gelu_case(tile: VectorTile, x: torch.Tensor, row: torch.Tensor) -> Case:
    kernels = GeluTanhConcatKernels(tile)
    _ready(kernels.by_dtype[x.dtype])
    mlp = torch.randn(*x.shape[:2], 4 * HIDDEN, device="cuda", dtype=x.dtype)
    return lambda: kernels.launch(x, mlp), 4 * (x.numel() + mlp.numel())


def main() -> None:
    row = torch.randn(1, HIDDEN, device="cuda", dtype=torch.bfloat16)
    print(f"{torch.cuda.get_device_name()}, copy {copy_ceiling_tbps():.2f} TB/s")
    for make_case in (gate_case, modulate_case, gelu_case):
        print(f"{make_case.__name__:24}" + "".join(f"{rows:>16} rows" for rows in ROWS))
        for tile in TILES:
            cells = []
            for rows in ROWS:
                x = torch.randn(1, rows, HIDDEN, device="cuda", dtype=torch.bfloat16)
                call, moved = make_case(tile, x, row)
                us = time_us(call, iterations=100)
                cells.append(f"{us:10.1f} us {moved / us / 1e4 / copy_ceiling_tbps():4.0f} %")
            print(f"{tile.block:6} x {tile.vectors_per_thread}{'':14}" + "  ".join(cells))


if __name__ == "__main__":
    main()
