"""bench_denoise.py on several GPUs: each arm in turns with the same arm on one of them."""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import TracebackType

import torch
from bench_denoise import (
    ArmLog,
    DenoiseRow,
    build_case,
    case_setup,
    latents_md5,
    make_rows,
    measured_floor_ms,
    psnr_db,
    run_arms,
)
from denoise_arms import ArmRun, CaseSetup, DenoiseCase
from long_runs import attempt, free_memory
from parallel_rank import RunArm, StartCase

from sglang.multimodal_gen.configs.model_specs import read_json
from sglang.multimodal_gen.configs.parallel_layout import (
    ModelTraits,
    ParallelLayout,
    legal_layouts,
)
from sglang.multimodal_gen.runtime.distributed.launch import RankProcesses

TIMEOUT_S = 240.0
SINGLE = str(ParallelLayout())


class LayoutArms:
    """The ranks of one layout, rank 0 being this process. A context manager."""

    def __init__(self, model: str, setup: CaseSetup, layout: ParallelLayout) -> None:
        self.layout = layout
        self._ranks = RankProcesses("parallel_rank", layout.world - 1, TIMEOUT_S)
        try:
            self._ranks.answers()
            self._ranks.send(list(self._starts(model, setup)))
            device = torch.device("cuda", 0) if setup.device.type == "cuda" else setup.device
            state = self._ranks.join(layout, device)
            self._case = build_case(model, replace(setup, device=device, parallel=state))
            self._answers()
        except BaseException:
            self._ranks.close()
            raise

    def __enter__(self) -> "LayoutArms":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ranks.close()

    def run(self, arm: str, steps: int | None) -> ArmRun:
        """One denoising by all ranks. Raises RuntimeError where one fails or has other latents."""
        self._ranks.send_all(RunArm(arm, steps))
        try:
            run = self._case.run(arm, steps)
        except Exception:
            self._ranks.wait_for_loss()
            self._ranks.give_up(f"rank 0 failed in arm {arm}")
            raise
        hashes = {latents_md5(run.latents), *self._answers()}
        if len(hashes) != 1:
            raise RuntimeError(f"{arm} on {self.layout}: the ranks' latents differ: {hashes}")
        return run

    def _starts(self, model: str, setup: CaseSetup) -> Iterator[StartCase]:
        for rank in range(1, self.layout.world):
            yield StartCase(
                rank=rank,
                layout=self.layout,
                model=model,
                setup=setup,
                store_file=self._ranks.store_file,
                timeout_s=TIMEOUT_S,
                threads=torch.get_num_threads(),
            )

    def _answers(self) -> list[str | None]:
        answers = self._ranks.answers()
        for answer in answers:
            if answer.failure:
                self._ranks.give_up(answer.failure)
        self._ranks.check()
        return [answer.md5 for answer in answers]


class InTurns:
    """One GPU's case beside a layout's; an arm is "lossless@single" or "lossless@cfg2"."""

    def __init__(self, one: DenoiseCase, several: LayoutArms) -> None:
        self.device = one.device
        self._cases = {SINGLE: one, str(several.layout): several}

    def run(self, arm: str, steps: int | None) -> ArmRun:
        """One denoising by the part of `arm` before the @ in the layout after it."""
        name, where = arm.split("@")
        return self._cases[where].run(name, steps)


def bench_layouts(
    model: str, case: DenoiseCase, args: argparse.Namespace, failed: list[str]
) -> list[DenoiseRow]:
    """The rows of one model on one GPU and on `args.num_gpus`; appends what raised to `failed`."""
    setup = case_setup(model, args)
    traits = ModelTraits.of(case.spec, read_json(setup.folder / "transformer" / "config.json"))
    layouts = legal_layouts(args.num_gpus, traits)[: None if args.layouts == "all" else 1]
    rows: dict[tuple[str, str], DenoiseRow] = {}
    for layout in layouts:
        measure = partial(rows_of, model, case, setup, layout, args, failed)
        found = attempt(f"{model} {layout}", failed, measure)
        rows |= {(row.arm, row.layout): row for row in found or ()}
        free_memory()
    return list(rows.values())


def rows_of(
    model: str,
    case: DenoiseCase,
    setup: CaseSetup,
    layout: ParallelLayout,
    args: argparse.Namespace,
    failed: list[str],
) -> list[DenoiseRow]:
    """The rows of one layout, after those of one GPU, measured in turns."""
    arms = [f"{arm}@{where}" for arm in args.arms for where in (SINGLE, str(layout))]
    with LayoutArms(model, setup, layout) as several:
        turns = InTurns(case, several)
        logs = run_arms(turns, arms, args.runs, model, failed, args.warm_steps)
    floor_ms = attempt(f"{model} floor", failed, lambda: measured_floor_ms(case))
    one = list(make_rows(model, case, _logs_of(logs, SINGLE), floor_ms))
    shared = floor_ms and floor_ms / layout.world
    found = make_rows(model, case, _logs_of(logs, str(layout)), shared)
    return one + [_compared(row, one, logs, layout) for row in found]


def _logs_of(logs: dict[str, ArmLog], where: str) -> dict[str, ArmLog]:
    return {arm.split("@")[0]: log for arm, log in logs.items() if arm.endswith(f"@{where}")}


def _compared(
    row: DenoiseRow, one: list[DenoiseRow], logs: dict[str, ArmLog], layout: ParallelLayout
) -> DenoiseRow:
    """The row of a layout beside the same arm's on one GPU, where that ran."""
    row = replace(row, num_gpus=layout.world, layout=str(layout))
    alone = next((other for other in one if other.arm == row.arm), None)
    if alone is None:
        return row
    latents, expected = (logs[f"{row.arm}@{where}"].last.latents for where in (layout, SINGLE))
    equal = latents_md5(latents) == latents_md5(expected)
    return replace(
        row,
        speedup_vs_one_gpu=alone.ms_per_step / row.ms_per_step,
        equal_to_one_gpu=equal,
        psnr_vs_one_gpu_db=None if equal else psnr_db(latents, expected),
    )
