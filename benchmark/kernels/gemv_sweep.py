"""GPU time of the prior's products with a vector for each tile, beside cuBLAS.

python benchmark/kernels/gemv_sweep.py

A row is one launch out of a CUDA graph of many, each on weights of its own, as in a decode step:
so L2 is cold. The times choose `tile` in `gemv.py`. The percentage is of the copy ceiling of this
process.
"""

import itertools
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "benchmark")]

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from timing import copy_ceiling_tbps  # noqa: E402

from sglang.kernels.ops.diffusion.triton.gemv import launch_gemv, launch_gemv_swiglu  # noqa: E402

SHAPES = {"o": (4096, 4096), "down": (4096, 13696), "gate_up": (27392, 4096)}
CHAIN_BYTES = 2**30  # of weights in one graph: many times the L2
REPLAYS = 5
Tile = dict[str, int]
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def tiles(columns: int) -> Iterator[Tile]:
    """Candidates: whole rows at once, or a loop over them."""
    blocks = [2048, 4096] if columns == 4096 else [1024, 2048, 4096]
    for block_k, block_n, warps in itertools.product(blocks, (1, 2, 4, 8), (4, 8)):
        values = block_n * block_k // (32 * warps)  # of weights a thread and step
        if not 16 <= values <= 128 or block_k < 256 * warps:
            continue
        for unroll in (1, 2, 4) if columns > 2 * block_k else (1,):
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


def products(name: str, columns: int) -> Iterator[tuple[str, Product]]:
    """The kernel in each tile; the gated product counts pairs of rows."""
    for tile in tiles(columns):
        label = " ".join(f"{key}={value}" for key, value in tile.items())
        if name != "gate_up":
            yield label, lambda x, weight, tile=tile: launch_gemv(x, weight, None, tile)
        elif tile["BLOCK_N"] > 1:
            pairs = tile | {"BLOCK_N": tile["BLOCK_N"] // 2}
            yield label, lambda x, weight, pairs=pairs: launch_gemv_swiglu(x, weight, pairs)


def report(name: str, rows: int, columns: int) -> None:
    """The fastest tiles and cuBLAS (for gate_up: no activation)."""
    size = 2 * rows * columns
    weights = [
        torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
        for _ in range(CHAIN_BYTES // size)
    ]
    x = torch.randn(1, 1, columns, device="cuda", dtype=torch.bfloat16)
    candidates = dict(products(name, columns))
    times = {label: chain_us(product, weights, x) for label, product in candidates.items()}
    fastest = sorted(times, key=times.get)[:8]
    shown = [(label, times[label]) for label in fastest]
    shown.append(("cuBLAS", chain_us(F.linear, weights, x)))
    for label, us in shown:
        rate = size / us / 1e3
        print(f"{name:8} {us:8.2f} us {rate:7.0f} GB/s {rate / copy_ceiling_tbps() / 10:5.1f} %"
              f"  {label}", flush=True)  # fmt: skip


@torch.inference_mode()
def main() -> None:
    print(f"{torch.cuda.get_device_name()}, copy {copy_ceiling_tbps():.2f} TB/s", flush=True)
    for name, shape in SHAPES.items():
        try:
            report(name, *shape)
        except Exception:  # shown, and the other shapes still run
            traceback.print_exc()


if __name__ == "__main__":
    main()
