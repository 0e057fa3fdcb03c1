"""GPU time of the prior's products with a vector for each tile, beside cuBLAS.

python benchmark/kernels/gemv_sweep.py

A row is one launch out of a CUDA graph of many, each on weights of its own, as in a decode step:
so L2 is cold and neighbours overlap as they do there. The times choose `tile` in `gemv.py`. The
percentage is of the copy ceiling of this process.
"""

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "benchmark")]

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from timing import copy_ceiling_tbps  # noqa: E402

from sglang.kernels.ops.diffusion.triton.dependent_launch import dependent_launch  # noqa: E402
from sglang.kernels.ops.diffusion.triton.gemv import launch_gemv, launch_gemv_swiglu  # noqa: E402

SHAPES = {"qkv": (4608, 4096), "o": (4096, 4096), "down": (4096, 13696), "head": (16384, 4096)}
GATED = {"gate_up": (27392, 4096)}
CHAIN_BYTES = 2**30  # of weights in one graph: many times the L2
REPLAYS = 5
Tile = dict[str, int]
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def tiles(columns: int) -> Iterator[Tile]:
    """Candidates: whole rows at once, or a loop over them."""
    whole = [4096] if columns == 4096 else []
    for block_k, block_n, warps in itertools.product([1024, 2048, *whole], (1, 2, 4, 8), (4, 8)):
        values = block_n * block_k // (32 * warps)  # of weights a thread and step
        if not 16 <= values <= 128 or block_k < 256 * warps:
            continue
        for unroll in (1,) if block_k == 4096 else (1, 2, 4):
            if values * unroll <= 128:
                yield {"BLOCK_N": block_n, "BLOCK_K": block_k, "UNROLL": unroll, "num_warps": warps}


def chain_us(product: Product, weights: list[torch.Tensor], x: torch.Tensor) -> float:
    """Microseconds a launch, the best of some replays of a graph of all of them."""
    product(x, weights[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            product(x, weight)
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(weights))
    return min(times)


def report(name: str, shape: tuple[int, int], gated: bool) -> None:
    rows, columns = shape
    size = 2 * rows * columns
    weights = [
        torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(CHAIN_BYTES // size)
    ]
    x = torch.randn(1, 1, columns, device="cuda", dtype=torch.bfloat16)
    results = [("cuBLAS", chain_us(F.linear, weights, x))]
    for tile in tiles(columns):
        if gated:
            tile = tile | {"BLOCK_N": tile["BLOCK_N"] // 2}
            if not tile["BLOCK_N"]:
                continue
        label = " ".join(f"{key}={value}" for key, value in tile.items())

        def product(x: torch.Tensor, weight: torch.Tensor, tile: Tile = tile) -> torch.Tensor:
            if gated:
                return launch_gemv_swiglu(x, weight, tile)
            return launch_gemv(x, weight, None, tile)

        results.append((label, chain_us(product, weights, x)))
        with dependent_launch(False):
            results.append((label + " plain launch", chain_us(product, weights, x)))
    results.sort(key=lambda result: result[1])
    shown = results[:6] + [row for row in results[6:] if row[0] == "cuBLAS"]
    for label, us in shown:
        share = 100 * size / us / 1e6 / copy_ceiling_tbps()
        print(
            f"{name:8} {us:8.2f} us {size / us / 1e3:7.0f} GB/s {share:5.1f} %  {label}", flush=True
        )


@torch.inference_mode()
def main() -> None:
    print(f"{torch.cuda.get_device_name()}, copy {copy_ceiling_tbps():.2f} TB/s", flush=True)
    for table, gated in ((SHAPES, False), (GATED, True)):
        for name, shape in table.items():
            try:
                report(name, shape, gated)
            except Exception as error:  # one tile that does not run must not hide the others
                print(f"{name}: {type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main()
