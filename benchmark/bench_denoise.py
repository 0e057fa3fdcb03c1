"""Milliseconds a denoising step, arm beside arm, and the floor of the same shapes.

    python benchmark/bench_denoise.py --model flux1-dev --arms eager,lossless,high,diffusers \
        --json benchmark/results/h200/denoise.json

All arms run in one process on the same random weights, in turns, so that clocks and temperature
are shared. The floor is the time of the model's GEMMs and attentions alone, op by op.
"""

import argparse
import hashlib
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from denoise_arms import DenoiseCase

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "benchmark")]

ARMS = ("eager", "lossless", "high", "diffusers", "diffusers-compile")
MODELS = {
    "flux1-dev": "FLUX.1-dev",
    "flux1-schnell": "FLUX.1-schnell",
    "glm-image": "GLM-Image",
}


@dataclass(frozen=True)
class DenoiseRow:
    """One row of denoise.json; times are medians of all steps after an arm's first run."""

    model: str
    arm: str
    width: int
    height: int
    steps: int
    num_gpus: int
    layout: str
    ms_per_step: float
    floor_ms: float
    ratio_to_floor: float
    ratio_to_eager: float | None
    md5: list[str]  # of the final latents, one a run
    fallbacks: list[str]  # gate: why it ran eager
    families: dict[str, float] | None = None  # kernel family -> ms a step, with --profile


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="flux1-dev", help=f"comma list of {', '.join(MODELS)}")
    parser.add_argument("--arms", default="eager,lossless", help=f"comma list of {', '.join(ARMS)}")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--height", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument(
        "--runs", type=int, default=3, help="runs of each arm; the first is dropped"
    )
    parser.add_argument("--profile", action="store_true", help="add kernel families (one more run)")
    parser.add_argument("--json", type=Path, help="merge the rows into this result file")
    args = parser.parse_args()
    args.models, args.arms = args.model.split(","), args.arms.split(",")
    for given, known in ((args.models, MODELS), (args.arms, ARMS)):
        unknown = [name for name in given if name not in known]
        if unknown:
            parser.error(f"got {unknown}, expected names of {list(known)}")
    if args.runs < 2:
        parser.error(f"--runs: got {args.runs}, expected at least 2 (the first is dropped)")
    return args


def main() -> int:
    args = parse_args()
    import torch

    if not torch.cuda.is_available():
        print("bench_denoise: got no CUDA GPU, expected one; run it on a machine that has it")
        return 1
    from denoise_arms import DenoiseCase
    from denoise_glm import GlmDenoiseCase
    from results import merge_rows, print_table

    cases = {"glm-image": GlmDenoiseCase}
    rows = []
    for model in args.models:
        make_case = cases.get(model, DenoiseCase)
        case = make_case(MODELS[model], args.width, args.height, args.steps)
        rows += bench_model(model, case, args)
        del case
        torch.cuda.empty_cache()
    print_table([asdict(row) for row in rows], omit=("md5", "families", "layout", "num_gpus"))
    for row in rows:
        print(row.arm, "md5", sorted(set(row.md5)), "fallbacks", row.fallbacks or "none")
    if args.json:
        merge_rows(
            args.json, [asdict(row) for row in rows], key=("model", "arm", "width", "height")
        )
    return 0


def bench_model(model: str, case: "DenoiseCase", args: argparse.Namespace) -> list[DenoiseRow]:
    """Run every arm `--runs` times in turns; the floor is measured last, on the same warm chip."""
    times: dict[str, list[float]] = {arm: [] for arm in args.arms}
    hashes: dict[str, list[str]] = {arm: [] for arm in args.arms}
    fallbacks: dict[str, list[str]] = {}
    for run in range(args.runs):
        for arm in args.arms:
            latents, seconds, fallbacks[arm] = case.run(arm)
            hashes[arm].append(latents_md5(latents))
            if run > 0:
                times[arm] += seconds
            print(
                f"{model} {arm} run {run}: {1e3 * statistics.median(seconds):.2f} ms/step",
                flush=True,
            )
    floor_ms = case.floor_ms()
    ms = {arm: 1e3 * statistics.median(times[arm]) for arm in args.arms}
    make = _row_maker(model, args, floor_ms, ms.get("eager"))
    rows = [make(arm, ms[arm], hashes[arm], fallbacks[arm]) for arm in args.arms]
    if args.profile:
        rows = [replace(row, families=case.families_ms(row.arm)) for row in rows]
    return rows


def _row_maker(
    model: str, args: argparse.Namespace, floor_ms: float, eager_ms: float | None
) -> Callable[..., DenoiseRow]:
    def make(arm: str, ms: float, md5: list[str], fallbacks: list[str]) -> DenoiseRow:
        return DenoiseRow(
            model=model,
            arm=arm,
            width=args.width,
            height=args.height,
            steps=args.steps,
            num_gpus=1,
            layout="single",
            ms_per_step=ms,
            floor_ms=floor_ms,
            ratio_to_floor=ms / floor_ms,
            ratio_to_eager=ms / eager_ms if eager_ms else None,
            md5=md5,
            fallbacks=fallbacks,
        )

    return make


def latents_md5(latents: "torch.Tensor") -> str:
    """md5 of the latents' bytes."""
    import torch

    return hashlib.md5(latents.contiguous().view(torch.uint8).cpu().numpy().tobytes()).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
