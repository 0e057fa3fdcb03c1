"""Whole generations through the public API, by the measuring protocol of the README.

    python benchmark/bench_generate.py --model flux1-dev,glm-image,bundled \
        --json benchmark/results/h200/generate.json

One warm process; every arm makes `--runs` pictures one after another, the first is dropped, the
median of the rest counts. The first arm runs again at the end (A/B/A): the drift of the machine.
Denoise time is the DenoisingStage's own. PSNR and SSIM compare with the lossless arm's picture.
An arm stops early when it has used `--arm-seconds`. Rows are written after every arm; what raises
is reported, the rest still runs, and the exit code is 1.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.multimodal_gen import DiffGenerator, GenerationResult

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "benchmark")]

from generate_rows import GenerateRow, drift_pct, make_rows, print_rows  # noqa: E402
from long_runs import attempt, exit_code, free_memory, names_of  # noqa: E402

ARMS = ("eager", "lossless", "high")
MODELS = {
    "flux1-dev": "FLUX.1-dev",
    "flux1-schnell": "FLUX.1-schnell",
    "ernie-image": "ERNIE-Image",
    "glm-image": "GLM-Image",
    "bundled": None,
}
BUNDLED = "bundled"
PROMPT = "a lighthouse on a cliff at dusk, long exposure"
COMPOSITIONS = ROOT / "tools" / "bundled_model" / "compositions_12.json"
KEY = ("model", "arm", "prompt", "width", "height")


def parse_args(words: list[str] | None = None) -> argparse.Namespace:
    parser = build_parser()
    args = parser.parse_args(words)
    try:
        check(args)
    except ValueError as error:
        parser.error(str(error))
    return args


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flag = parser.add_argument
    flag("--model", default="flux1-dev", help=f"comma list of {', '.join(MODELS)}")
    flag("--load-format", choices=("dummy", "auto"), help="dummy for all but the bundled model")
    flag("--arms", default=",".join(ARMS), help="comma list, in this order")
    flag("--runs", type=int, default=10, help="of each arm; the first is dropped")
    flag("--eager-runs", type=int, help="of the eager arm; default: --runs")
    flag("--arm-seconds", type=float, help="an arm starts no further run after so long")
    flag("--prompt", action="append", help="repeat for several prompts")
    flag("--captions", type=Path, help="JSON list of {caption: ...}: more prompts")
    flag("--width", type=int, help="default: the model's, as for the next two")
    flag("--height", type=int)
    flag("--steps", type=int)
    flag("--seed", type=int, default=42)
    flag("--no-attribution", action="store_true", help="leave its table out")
    flag("--json", type=Path, help="merge the rows into this result file")
    return parser


def check(args: argparse.Namespace) -> None:
    """Fill in what follows from other flags. Raises ValueError for what cannot be measured."""
    args.models, args.arms = names_of(args.model, list(MODELS)), names_of(args.arms, ARMS)
    args.eager_runs = args.runs if args.eager_runs is None else args.eager_runs
    for name, runs in (("--runs", args.runs), ("--eager-runs", args.eager_runs)):
        if runs < 2:
            raise ValueError(f"{name}: got {runs}, expected at least 2 (the first is dropped)")
    for model in args.models:
        if args.load_format not in (None, load_format(model)):
            expected = f"{load_format(model)} for {model}"
            raise ValueError(f"--load-format: got {args.load_format}, expected {expected}")
    args.prompts = (args.prompt or []) + (captions(args.captions) if args.captions else [])


def load_format(model: str) -> str:
    """Random weights for the published models, of which only configs are here."""
    return "auto" if model == BUNDLED else "dummy"


def captions(path: Path) -> list[str]:
    """The prompts of a JSON list of {caption: ...}."""
    return [row["caption"] for row in json.loads(path.read_text())]


def main() -> int:
    args = parse_args()
    from environment import check_result_file

    if args.json:
        check_result_file(args.json)
    failed: list[str] = []
    for model in args.models:
        bench_model(model, args, failed)
        free_memory()
    return exit_code(failed)


def bench_model(model: str, args: argparse.Namespace, failed: list[str]) -> None:
    """Load a model, measure its arms on every prompt, print its tables."""
    start = time.perf_counter()
    generator = attempt(model, failed, lambda: load(model))
    if generator is None:
        return
    load_s = time.perf_counter() - start
    print(f"{model}: loaded in {load_s:.2f} s", flush=True)
    prompts = args.prompts or (captions(COMPOSITIONS) if model == BUNDLED else [PROMPT])
    with generator:
        rows = []
        for prompt in prompts:
            bench = PromptBench(generator, model, prompt, load_s, args)
            rows += bench.measure(failed)
        if rows:
            print_rows(rows)
        if {"eager", "lossless"} <= {row.arm for row in rows} and not args.no_attribution:
            attempt(f"{model} attribution", failed, lambda: print_attribution(generator, rows))


def load(model: str) -> "DiffGenerator":
    from sglang.multimodal_gen import DiffGenerator

    return DiffGenerator.from_pretrained(MODELS[model], load_format=load_format(model))


@dataclass
class PromptBench:
    """The arms of one prompt, one after another, then the first again."""

    generator: "DiffGenerator"
    model: str
    prompt: str
    load_s: float
    args: argparse.Namespace

    def measure(self, failed: list[str]) -> list[GenerateRow]:
        """The rows of all arms that ran; written after every arm where a file is asked for."""
        args, measured, rows = self.args, {}, []
        for arm in args.arms:
            runs = args.eager_runs if arm == "eager" else args.runs
            results = attempt(f"{self.model} {arm}", failed, partial(self.run_arm, arm, runs))
            if results is not None:
                measured[arm] = results
                rows = self.write(measured, None)
        first = next(iter(measured), None)
        if first is not None and len(measured) > 1:
            again = attempt(f"{self.model} {first} again", failed, lambda: self.run_again(first))
            if again is not None:
                rows = self.write(measured, drift_pct(measured[first], again))
        return rows

    def write(
        self, measured: dict[str, list["GenerationResult"]], drift: float | None
    ) -> list[GenerateRow]:
        """The rows of what was measured so far, merged into the result file."""
        rows = make_rows(self.model, self.prompt, self.load_s, measured, drift)
        if self.args.json:
            from results import merge_rows

            merge_rows(self.args.json, [asdict(row) for row in rows], key=KEY)
        return rows

    def run_again(self, arm: str) -> list["GenerationResult"]:
        """A third of the runs of the first arm."""
        runs = self.args.eager_runs if arm == "eager" else self.args.runs
        return self.run_arm(arm, max(2, runs // 3))

    def run_arm(self, arm: str, runs: int) -> list["GenerationResult"]:
        """`runs` pictures of one arm, one after another; two at least, fewer when time is up."""
        from sglang.kernels.ops.diffusion.bitexact_gate import fast_paths

        quality = "high" if arm == "high" else "lossless"
        start, results = time.perf_counter(), []
        with fast_paths(arm != "eager"):
            while len(results) < runs and (len(results) < 2 or not self._time_is_up(start)):
                results.append(self.generate(quality, self.args.steps))
        denoise = [f"{r.report['stage_seconds']['DenoisingStage']:.3f}" for r in results]
        print(f"{self.model} {arm}: denoise {', '.join(denoise)} s", flush=True)
        return results

    def generate(self, quality: str, steps: int | None) -> "GenerationResult":
        """One picture of the prompt."""
        args = self.args
        return self.generator.generate(
            prompt=self.prompt,
            seed=args.seed,
            width=args.width,
            height=args.height,
            num_inference_steps=steps,
            quality=quality,
            return_frames=True,
        )

    def _time_is_up(self, start: float) -> bool:
        limit = self.args.arm_seconds
        return limit is not None and time.perf_counter() - start > limit


def print_attribution(generator: "DiffGenerator", rows: list[GenerateRow]) -> None:
    """Microbenchmark savings times calls, beside the measured end-to-end difference."""
    from attribution import site_savings, table_rows
    from tables import markdown

    if generator.device.type != "cuda":
        print(f"no attribution: it times kernels, and the model runs on {generator.device}")
        return
    arms = {row.arm: row for row in rows if row.prompt == rows[0].prompt}
    row = arms["lossless"]
    asked = dict(prompt=row.prompt, width=row.width, height=row.height)
    savings = site_savings(
        lambda steps: generator.generate(**asked, num_inference_steps=steps), row.steps
    )
    columns = ["site", "shape", "calls", "eager us", "fused us", "saves s"]
    print(markdown(columns, table_rows(savings)))
    attributed = sum(saving.seconds for saving in savings)
    measured = arms["eager"].denoise_s - row.denoise_s
    print(f"attributed {attributed:.3f} s, measured {measured:.3f} s of denoise time saved")


if __name__ == "__main__":
    sys.exit(main())
