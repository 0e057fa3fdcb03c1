"""GPU time of one step of GLM-Image's prior for other launch constants of its products.

python benchmark/kernels/prior_step_sweep.py

A row is a step out of the step's own graph, with a cache that is half full: what the kernels of a
step hide from each other, which `gemv_sweep.py` cannot see. The times choose `tile` in `gemv.py`.
A variant names what differs from there, a tile by the shape of its matrix.
"""

import contextlib
import sys
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "benchmark")]

import torch  # noqa: E402
from prior_arms import PriorBench  # noqa: E402

from sglang.kernels.ops.diffusion.triton import gemv  # noqa: E402
from sglang.multimodal_gen.runtime.managers.numeric_switches import numeric_switches  # noqa: E402
from sglang.multimodal_gen.runtime.models import glm_image_ar  # noqa: E402

REPLAYS = 200
HALF_FULL = 640  # tokens
O, DOWN, QKV, GATE_UP = (4096, 4096), (4096, 13696), (4608, 4096), (27392, 4096)
Tiles = dict[tuple[int, int], dict[str, int]]


def made(rows: int, columns: int, warps: int, unroll: int = 1) -> dict[str, int]:
    """A tile: whole rows, or unrolled steps over them."""
    return {"BLOCK_N": rows, "BLOCK_K": columns, "UNROLL": unroll, "num_warps": warps}


VARIANTS: dict[str, Tiles] = {
    "as it is": {},
    "down 4 x 2048 in a loop, 8 warps": {DOWN: made(4, 2048, 8, 2)},
    "down 2 x 4096 in a loop, 8 warps": {DOWN: made(2, 4096, 8, 2)},
    "down 2 x 16384, 8 warps": {DOWN: made(2, 16384, 8)},
    "down 2 x 16384, 16 warps": {DOWN: made(2, 16384, 16)},
    "o, qkv 2 x 4096, 4 warps": dict.fromkeys((O, QKV), made(2, 4096, 4)),
    "o, qkv 4 x 4096, 8 warps": dict.fromkeys((O, QKV), made(4, 4096, 8)),
    "gate_up 4 x 4096, 8 warps": {GATE_UP: made(4, 4096, 8)},
}


@contextlib.contextmanager
def constants(tiles: Tiles) -> Iterator[None]:
    """These launch constants in the block."""
    usual = gemv.tile

    def tile(rows: int, columns: int) -> dict[str, int]:
        return tiles.get((rows, columns)) or usual(rows, columns)

    with patch.object(gemv, "tile", tile):
        yield


def step_us(bench: PriorBench, state: glm_image_ar.DecodeState) -> float:
    """Microseconds of a step, the mean of `REPLAYS` of its graph."""
    bench.decoder.advance(state)
    graph = glm_image_ar._capture(partial(bench.decoder.advance, state))
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / REPLAYS


def sweep(bench: PriorBench) -> None:
    """Print a row for each variant; the state goes back before each."""
    ids = bench.inputs["input_ids"]
    with glm_image_ar.sdpa(ids.device):
        state = bench.decoder.start(ids, bench.grids, bench.noise)
        for name, tiles in VARIANTS.items():
            state.step.fill_(HALF_FULL)
            state.slot.fill_(ids.shape[1] + HALF_FULL)
            try:
                with constants(tiles):
                    print(f"{step_us(bench, state):9.1f} us  {name}", flush=True)
            except Exception:  # shown, and the other variants still run
                traceback.print_exc()


@torch.inference_mode()
def main() -> None:
    device = torch.device("cuda")
    with numeric_switches(device):
        sweep(PriorBench.load(device, 1024, 1024, 32))


if __name__ == "__main__":
    main()
