"""Time of GLM-Image's prior at its published size, on random weights.

    python benchmark/bench_prior.py --json benchmark/results/h200/prior.json

Arms, in milliseconds a token: `graph` (fast paths on) and `eager` (off) name a whole picture's
tokens, `plain` the first ones in aten operations, `transformers` as many by the library's
`generate`. Then: whether graph and eager loop name the same tokens (md5), where greedy tokens
leave `generate`'s and by how much the logits differ up to there, and the kernels of one step.
"""

import argparse
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "benchmark")]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--height", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=32, help="tokens of the slow arms")
    parser.add_argument("--runs", type=int, default=3, help="timed runs of the graph arm")
    parser.add_argument("--json", type=Path, help="write rows, comparison and kernels to this file")
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    import torch

    if not torch.cuda.is_available():
        print("bench_prior: got no CUDA GPU, expected one; run it on a machine that has it")
        return 1
    from environment import check_result_file, write_result_file
    from prior_arms import PriorBench, print_families
    from results import print_table

    from sglang.multimodal_gen.runtime.managers.numeric_switches import numeric_switches

    if args.json:
        check_result_file(args.json)
    device = torch.device("cuda")
    with torch.inference_mode(), numeric_switches(device):
        bench = PriorBench.load(device, args.height, args.width, args.tokens)
        arms = {
            "graph": lambda: bench.graph(args.runs),
            "eager": bench.eager,
            "plain": bench.plain,
            "transformers": bench.transformers,
        }
        failed: list[str] = []
        rows = [row for name, arm in arms.items() if (row := attempt(name, arm, failed))]
        print_table(rows)
        comparison = attempt("comparison", lambda: bench.comparison(rows), failed) or {}
        for name, value in comparison.items():
            print(f"{name:44} {value}", flush=True)
        families = attempt("families", bench.families, failed) or []
        print_families(families)
    if args.json:
        body = {"rows": rows, "comparison": comparison, "families": families}
        write_result_file(args.json, body, num_gpus=1)
    print("failed:", ", ".join(failed) or "nothing")
    return 1 if failed or not comparison["graph and eager name the same tokens"] else 0


def attempt(name: str, part: Callable[[], Any], failed: list[str]) -> Any:
    """The part's answer, or None: what raises is printed and named, and the rest still runs."""
    try:
        return part()
    except Exception:  # shown here and by the exit code
        traceback.print_exc()
        failed.append(name)
        return None


if __name__ == "__main__":
    sys.exit(main())
