"""Microseconds of what ranks exchange: around one attention, after one cut linear, after guidance.

    python benchmark/bench_collectives.py --num-gpus 2 \
        --json benchmark/results/h200-x2/collectives.json

Shapes are those of the three models at 1024x1024. `exchange` is all of Ulysses' work around one
attention, copies included; `add_up` the sum after one row-parallel linear; `guidance` the velocity
that the two branches swap once a step.
"""

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "benchmark")]

import torch  # noqa: E402
from collective_rank import TIMEOUT_S, CollectiveRow, Shapes, Start, measure  # noqa: E402

from sglang.multimodal_gen.configs.parallel_layout import ParallelLayout  # noqa: E402
from sglang.multimodal_gen.runtime.distributed.launch import RankProcesses  # noqa: E402

MODELS = {
    "flux1-dev": Shapes((512, 4096), 24, 128, (1, 4096, 64)),
    "ernie-image": Shapes((4216,), 32, 128, (1, 128, 64, 64)),
    "glm-image": Shapes((264, 4096), 32, 128, (1, 16, 128, 128)),
}


def run(ranks: int, models: dict[str, Shapes], on_gpu: bool) -> list[CollectiveRow]:
    """Start the ranks, measure, end them."""
    processes = RankProcesses("collective_rank", ranks - 1, TIMEOUT_S)
    devices = [f"cuda:{rank}" if on_gpu else "cpu" for rank in range(ranks)]
    try:
        processes.answers()
        starts = range(1, ranks)
        store = processes.store_file
        processes.send([Start(r, ranks, devices[r], store, models) for r in starts])
        device = torch.device(devices[0])
        state = processes.join(ParallelLayout(ulysses=ranks), device)
        rows = list(measure(state.ulysses, device, models))
        processes.answers()
    finally:
        processes.close()
    return rows


def command() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-gpus", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write this result file")
    args = parser.parse_args()
    if torch.cuda.device_count() < args.num_gpus:
        found = torch.cuda.device_count()
        print(f"bench_collectives: got {found} GPUs, expected {args.num_gpus}; use such a machine")
        return 1
    from environment import check_result_file, write_result_file
    from results import print_table

    if args.json:
        check_result_file(args.json)
    rows = [asdict(row) for row in run(args.num_gpus, MODELS, on_gpu=True)]
    print_table(rows)
    if args.json:
        write_result_file(args.json, {"rows": rows}, num_gpus=args.num_gpus)
    return 0


if __name__ == "__main__":
    sys.exit(command())
