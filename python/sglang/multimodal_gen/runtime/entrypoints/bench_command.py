"""`sglang bench`: seconds a picture takes on this machine, with this model and these settings."""

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sglang.multimodal_gen.configs.sampling_params import SamplingParams
from sglang.multimodal_gen.configs.server_args import ServerArgs
from sglang.multimodal_gen.configs.validation import InvalidParameter, rejected
from sglang.multimodal_gen.runtime.entrypoints.cli_flags import FlagParser
from sglang.multimodal_gen.runtime.entrypoints.console import configure_logging, print_error
from sglang.multimodal_gen.runtime.entrypoints.inspection import (
    add_json_flag,
    checked_settings,
    show_result,
)

if TYPE_CHECKING:
    from sglang.multimodal_gen.runtime.entrypoints.diff_generator import GenerationResult

PROG = "sglang bench"
REQUEST_DEFAULTS = {"prompt": "a red apple"}
DEFAULT_RUNS = 5


def run(words: Sequence[str]) -> int:
    """Generate the same picture `--runs` times and print medians without the first.

    Returns 0, 1 when the engine failed or the pictures differ; exits with 2 for refused flags.
    """
    parser = build_parser()
    given = parser.parse(words)
    try:
        if given.runs < 2:
            raise rejected("runs", given.runs, "at least 2: the first warms up and is dropped")
        args, request = checked_settings(given, REQUEST_DEFAULTS)
    except InvalidParameter as error:
        parser.error(str(error))
    configure_logging(args.log_level)
    try:
        summary = measure(args, request, given.runs)
    except (ValueError, RuntimeError, OSError, MemoryError) as error:
        print_error(PROG, error)
        return 2 if isinstance(error, ValueError) else 1
    show_result(given.json, summary, lambda: _print(summary))
    return int(summary["distinct_sha256"] != 1)


def build_parser() -> FlagParser:
    """The flags of `sglang bench`: those of process and picture, --runs and --json."""
    parser = FlagParser(PROG, "Measure how long one request takes, several times in one process.")
    parser.add_settings(SamplingParams, "picture", REQUEST_DEFAULTS)
    parser.add_settings(ServerArgs, "process")
    parser.add_argument(
        "--runs",
        type=int,
        default=DEFAULT_RUNS,
        metavar="N",
        help=f"requests in all; the first is dropped [{DEFAULT_RUNS}]",
    )
    add_json_flag(parser, "write the medians")
    return parser


def measure(args: ServerArgs, request: dict[str, Any], runs: int) -> dict[str, Any]:
    """Medians in seconds over all runs but the first, and the number of distinct outputs."""
    from sglang.multimodal_gen.runtime.entrypoints.diff_generator import DiffGenerator

    with DiffGenerator(args) as generator:
        results = [_first(generator.generate(sampling_params_kwargs=request)) for _ in range(runs)]
    stages = [result.report["stage_seconds"] for result in results[1:]]
    return {
        "runs": runs,
        "wall_s": statistics.median(result.generation_time for result in results[1:]),
        "stages_s": {name: statistics.median(s[name] for s in stages) for name in stages[0]},
        "distinct_sha256": len({result.report["sha256"] for result in results}),
        "quality": results[-1].report["quality"],
        "peak_memory_mb": max(result.peak_memory_mb for result in results),
        "versions": results[-1].report["versions"],
    }


def _first(results: "GenerationResult | list[GenerationResult]") -> "GenerationResult":
    return results[0] if isinstance(results, list) else results


def _print(summary: dict[str, Any]) -> None:
    print(f"wall {summary['wall_s']:.4f} s, median of {summary['runs'] - 1} after one warm-up")
    for name, seconds in summary["stages_s"].items():
        print(f"  {name:26} {seconds:9.4f} s")
    print(f"quality {summary['quality']}, {summary['peak_memory_mb']:.0f} MiB at the peak")
    print(f"{summary['distinct_sha256']} distinct picture(s)")
