"""Milliseconds a denoising step, arm beside arm, and the floor of the same shapes.

    python benchmark/bench_denoise.py --model flux1-dev,ernie-image,glm-image --arms all --profile \
        --json benchmark/results/h200/denoise.json

All arms of a model run in one process on the same random weights, in turns, so that clocks and
temperature are shared. The floor is the time of the model's GEMMs and attentions alone, op by op.
Each model's rows are written as soon as they are measured; an arm that raises is reported and left
out, and the exit code is 1.

`--without flux.linear_gelu` adds an arm: lossless with that site turned off, so that its eager
chain runs, or the smaller fused sites that it is made of. It shows what the site gains in the model
(at sizes that run as launches, not as a CUDA graph).

With `--num-gpus 2` each arm also runs on that many GPUs, in turns with one, in the layout that the
engine would pick (`--layouts all`: in every one that the model allows).
"""

import argparse
import hashlib
import math
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from denoise_arms import ArmRun, CaseSetup, DenoiseCase

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "benchmark")]

from long_runs import attempt, exit_code, free_memory, names_of  # noqa: E402

ARMS = ("eager", "lossless", "high", "diffusers", "diffusers-compile")
REFERENCE = "diffusers"
WITHOUT = "without"
MODELS = {
    "flux1-dev": "FLUX.1-dev",
    "flux1-schnell": "FLUX.1-schnell",
    "ernie-image": "ERNIE-Image",
    "glm-image": "GLM-Image",
}
KEY = ("model", "arm", "width", "height", "num_gpus", "layout")
LONG_FIELDS = ("md5", "families", "family_rates", "drift", "fallbacks")
ONLY_OF_SEVERAL = ("layout", "num_gpus", *(f"{x}_one_gpu" for x in ("speedup_vs", "equal_to")))


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
    ms_per_step: float  # a whole step: both forwards where there is true CFG
    floor_ms: float | None  # None on a machine without a GPU
    ratio_to_floor: float | None
    ratio_to_eager: float | None
    md5: list[str]  # of the final latents, one a run
    fallbacks: list[str]  # site: why it ran eager
    peak_memory_mb: float | None
    equal_to_diffusers: bool | None  # the bits of the final latents; None without that arm
    psnr_vs_diffusers_db: float | None  # of the final latents; None without that arm, or if equal
    families: dict[str, float] | None = None  # with --profile: kernel family -> ms a step
    family_rates: dict[str, dict[str, Any]] | None = None  # -> value, unit, pct_of_ceiling
    # with --drift, of the high arm: relative L2 distance from the lossless latents after each step
    drift: list[float] | None = None
    # of several GPUs, against the same arm on one of them in the same process
    speedup_vs_one_gpu: float | None = None
    equal_to_one_gpu: bool | None = None  # the bits of the final latents
    psnr_vs_one_gpu_db: float | None = None  # of the final latents; None if equal


@dataclass
class ArmLog:
    """What the runs of one arm gave so far."""

    step_seconds: list[float] = field(default_factory=list)  # of all runs but the first
    md5: list[str] = field(default_factory=list)
    last: "ArmRun | None" = None
    peak_memory_mb: float | None = None


def parse_args(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flag = parser.add_argument
    flag("--model", default="flux1-dev", help=f"comma list of {', '.join(MODELS)}")
    flag("--arms", default="eager,lossless", help=f"all, or a comma list of {', '.join(ARMS)}")
    flag("--width", type=int, default=1024)
    flag("--height", type=int, default=1024)
    flag("--steps", type=int, help="default: the model's")
    flag("--runs", type=int, default=3, help="runs of each arm; the first is dropped")
    flag("--warm-steps", type=int, help="steps of the first run; default: as many as the others")
    flag("--profile", action="store_true", help="add kernel families (one more run)")
    flag("--drift", action="store_true", help="add the high arm's distance from lossless by step")
    flag("--without", default="", help="comma list of sites; adds an arm that runs them eager")
    flag("--num-gpus", type=int, default=1, help="also run on that many GPUs")
    flag("--layouts", choices=("best", "all"), default="best", help="of the GPUs [best]")
    flag("--json", type=Path, help="merge the rows into this result file")
    args = parser.parse_args(words)
    try:
        args.models = names_of(args.model, list(MODELS))
        args.arms = list(ARMS) if args.arms == "all" else names_of(args.arms, ARMS)
    except ValueError as error:
        parser.error(str(error))
    args.without = tuple(filter(None, args.without.split(",")))
    if args.without and (args.json or args.num_gpus > 1):
        parser.error("--without: its arm is for comparing, on one GPU and without --json")
    args.arms += [WITHOUT] if args.without else []
    if args.runs < 2:
        parser.error(f"--runs: got {args.runs}, expected at least 2 (the first is dropped)")
    if args.warm_steps is not None and args.warm_steps < 1:
        parser.error(f"--warm-steps: got {args.warm_steps}, expected at least 1")
    if args.num_gpus > 1:
        only_one = [arm for arm in args.arms if arm.startswith(REFERENCE)]
        only_one += [f"--{name}" for name in ("profile", "drift") if getattr(args, name)]
        if only_one:
            parser.error(f"--num-gpus {args.num_gpus}: {', '.join(only_one)} run on one GPU only")
    return args


def main() -> int:
    args = parse_args()
    import torch

    try:
        check_sites(args.without)
    except ValueError as error:
        print(f"bench_denoise: {error}")
        return 1
    if not torch.cuda.is_available():
        print("bench_denoise: got no CUDA GPU, expected one; run it on a machine that has it")
        return 1
    from environment import check_result_file

    if args.json:
        check_result_file(args.json)
    failed: list[str] = []
    for model in args.models:
        rows = bench_model(model, args, failed)
        if rows:
            report(rows, args.json, args.num_gpus)
        free_memory()
    return exit_code(failed)


def check_sites(names: tuple[str, ...]) -> None:
    """Raises ValueError where a name is that of no site of any model."""
    import denoise_ernie  # noqa: F401 - a model's sites are known once it is imported
    import denoise_flux  # noqa: F401
    import denoise_glm  # noqa: F401
    from denoise_arms import gates_named

    gates_named(names)


def bench_model(model: str, args: argparse.Namespace, failed: list[str]) -> list[DenoiseRow]:
    """The rows of one model; appends what raised to `failed`."""
    case = attempt(model, failed, lambda: make_case(model, args))
    if case is None:
        return []
    case.without = args.without
    if args.num_gpus > 1:
        from parallel_arms import bench_layouts

        return bench_layouts(model, case, args, failed)
    logs = run_arms(case, args.arms, args.runs, model, failed, args.warm_steps)
    # the floor is measured now, on the chip that the arms have warmed
    floor_ms = attempt(f"{model} floor", failed, lambda: measured_floor_ms(case))
    rows = list(make_rows(model, case, logs, floor_ms))
    if args.profile:
        rows = [profiled(row, case, failed) for row in rows]
    if args.drift:
        rows = [drifted(row, case, failed) if row.arm == "high" else row for row in rows]
    return rows


def case_setup(model: str, args: argparse.Namespace) -> "CaseSetup":
    """What the flags ask for."""
    from denoise_arms import CaseSetup

    from sglang.multimodal_gen.configs.model_specs import DUMMY_CONFIGS

    return CaseSetup(DUMMY_CONFIGS / MODELS[model], args.width, args.height, args.steps)


def make_case(model: str, args: argparse.Namespace) -> "DenoiseCase":
    """The transformer of a model with random weights on the GPU."""
    return build_case(model, case_setup(model, args))


def build_case(model: str, setup: "CaseSetup") -> "DenoiseCase":
    """The transformer of a model with random weights, or a rank's part of it."""
    from denoise_ernie import ErnieDenoiseCase
    from denoise_flux import FluxDenoiseCase
    from denoise_glm import GlmDenoiseCase

    special = {"ernie-image": ErnieDenoiseCase, "glm-image": GlmDenoiseCase}
    return special.get(model, FluxDenoiseCase)(setup)


def run_arms(
    case: "DenoiseCase",
    arms: list[str],
    runs: int,
    model: str,
    failed: list[str],
    warm_steps: int | None = None,
) -> dict[str, ArmLog]:
    """Every arm `runs` times, in turns. An arm that raises is left out from then on.

    The first run, which only warms up, takes `warm_steps` steps; None is as many as the others.
    """
    logs = {arm: ArmLog() for arm in arms}
    for run in range(runs):
        for arm in list(logs):
            steps = warm_steps if run == 0 else None
            action = partial(run_once, case, arm, logs[arm], counted=run > 0, steps=steps)
            ms = attempt(f"{model} {arm}", failed, action)
            if ms is None:
                del logs[arm]
                continue
            print(f"{model} {arm} run {run}: {ms:.2f} ms/step", flush=True)
    return logs


def run_once(case: "DenoiseCase", arm: str, log: ArmLog, counted: bool, steps: int | None) -> float:
    """One run of one arm, into its log. Returns its milliseconds a step."""
    import torch

    on_gpu = case.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    log.last = case.run(arm, steps)
    if steps is None:
        log.md5.append(latents_md5(log.last.latents))
    if counted:
        log.step_seconds += log.last.step_seconds
    if on_gpu:
        log.peak_memory_mb = torch.cuda.max_memory_allocated() / 2**20
    return 1e3 * statistics.median(log.last.step_seconds)


def make_rows(
    model: str, case: "DenoiseCase", logs: dict[str, ArmLog], floor_ms: float | None
) -> Iterator[DenoiseRow]:
    """One row an arm that ran."""
    ms = {arm: 1e3 * statistics.median(log.step_seconds) for arm, log in logs.items()}
    reference = logs[REFERENCE].last.latents if REFERENCE in logs else None
    for arm, log in logs.items():
        yield DenoiseRow(
            model=model,
            arm=arm,
            width=case.params.width,
            height=case.params.height,
            steps=case.params.num_inference_steps,
            num_gpus=1,
            layout="single",
            ms_per_step=ms[arm],
            floor_ms=floor_ms,
            ratio_to_floor=ms[arm] / floor_ms if floor_ms else None,
            ratio_to_eager=ms[arm] / ms["eager"] if "eager" in ms else None,
            md5=log.md5,
            fallbacks=log.last.fallbacks,
            peak_memory_mb=log.peak_memory_mb,
            **against_reference(log.last.latents, reference),
        )


def measured_floor_ms(case: "DenoiseCase") -> float | None:
    """Milliseconds of all GEMMs and attentions of an eager step; None without a GPU."""
    from op_counts import floor_ms, per_step

    if case.device.type != "cuda":
        return None
    return floor_ms(per_step(case, "eager"), case.attention, case.dtype)


def against_reference(latents: "torch.Tensor", reference: "torch.Tensor | None") -> dict[str, Any]:
    """Whether the latents are diffusers' to the bit, and else how near."""
    if reference is None:
        return {"equal_to_diffusers": None, "psnr_vs_diffusers_db": None}
    equal = latents_md5(latents) == latents_md5(reference)
    psnr = None if equal else psnr_db(latents, reference)
    return {"equal_to_diffusers": equal, "psnr_vs_diffusers_db": psnr}


def psnr_db(values: "torch.Tensor", reference: "torch.Tensor") -> float | None:
    """Peak signal to noise ratio; the peak is the reference's range. None for equal values."""
    values, reference = values.double(), reference.double()
    error = (values - reference).square().mean().item()
    peak = (reference.max() - reference.min()).item()
    return 10 * math.log10(peak**2 / error) if error else None


def profiled(row: DenoiseRow, case: "DenoiseCase", failed: list[str]) -> DenoiseRow:
    """The row with its kernel families; without them where profiling raised."""
    from step_families import Ceilings, profile_arm
    from timing import bf16_matmul_ceiling_tflops, copy_ceiling_tbps, sdpa_ceiling

    ceilings = Ceilings(bf16_matmul_ceiling_tflops(), sdpa_ceiling(), copy_ceiling_tbps())
    what = f"{row.model} {row.arm} --profile"
    found = attempt(what, failed, lambda: profile_arm(case, row.arm, ceilings))
    return replace(row, families=found[0], family_rates=found[1]) if found else row


def drifted(row: DenoiseRow, case: "DenoiseCase", failed: list[str]) -> DenoiseRow:
    """The high arm's row with its drift."""
    from drift import drift_by_step

    return replace(row, drift=attempt(f"{row.model} drift", failed, lambda: drift_by_step(case)))


def report(rows: list[DenoiseRow], path: Path | None, num_gpus: int = 1) -> None:
    """Write the rows of one model, then print them."""
    from results import merge_rows, print_table
    from tables import drift_table, family_table

    table = [asdict(row) for row in rows]
    if path:
        merge_rows(path, table, KEY, num_gpus)
    print_table(table, omit=LONG_FIELDS + (ONLY_OF_SEVERAL if num_gpus == 1 else ()))
    for row in rows:
        print(
            row.arm, row.layout, "md5", sorted(set(row.md5)), "fallbacks", row.fallbacks or "none"
        )
    with_families = [row for row in table if row["families"]]
    if with_families:
        print(family_table(with_families), flush=True)
    with_drift = [row for row in table if row["drift"]]
    if with_drift:
        print(drift_table(with_drift), flush=True)


def latents_md5(latents: "torch.Tensor") -> str:
    """md5 of the latents' bytes."""
    import torch

    return hashlib.md5(latents.contiguous().view(torch.uint8).cpu().numpy().tobytes()).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
