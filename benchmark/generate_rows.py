"""The rows of generate.json, made of an arm's results, and their tables."""

import hashlib
import math
import statistics
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from image_quality import similarity
from results import print_table
from tables import markdown, number

if TYPE_CHECKING:
    import numpy as np

    from sglang.multimodal_gen import GenerationResult

PRIOR_STAGE = "GlmImageAR"
LONG_FIELDS = ("stages", "prompt", "md5")


@dataclass(frozen=True)
class GenerateRow:
    """One row of generate.json; times in seconds, medians over all runs but the first."""

    model: str
    arm: str
    prompt: str
    width: int
    height: int
    steps: int
    runs: int
    wall_s: float
    denoise_s: float
    stages: dict[str, float]
    md5: list[str]  # of the pixels, one a run
    peak_memory_mb: float
    load_s: float  # of the model, with the imports in a process's first
    first_request_s: float  # of the arm's first run: kernels compile and sites verify in it
    equal_to_lossless: bool | None = None  # None where that arm has not run
    psnr_db: float | None = None  # against the lossless arm; None also for equal pixels
    ssim: float | None = None
    ar_s: float | None = None  # of the autoregressive prior, where the model has one
    ar_tokens_per_s: float | None = None
    drift_pct: float | None = None  # of the first arm's wall time when it ran again


def drift_pct(first: list["GenerationResult"], again: list["GenerationResult"]) -> float:
    """By how many percent the wall time of the first arm had changed at the end."""
    before, after = (statistics.median(r.generation_time for r in rs[1:]) for rs in (first, again))
    drift = 100 * (after / before - 1)
    print(f"A/B/A: the first arm again is {drift:+.2f} % off", flush=True)
    return drift


def make_rows(
    model: str,
    prompt: str,
    load_s: float,
    measured: dict[str, list["GenerationResult"]],
    drift: float | None,
) -> list[GenerateRow]:
    """One row an arm; the drift stands in the first."""
    rows = [make_row(model, arm, prompt, load_s, results) for arm, results in measured.items()]
    if "lossless" in measured:
        reference = measured["lossless"][-1].frames
        rows = [
            replace(row, **against_lossless(measured[row.arm][-1].frames, reference))
            for row in rows
        ]
    return [replace(rows[0], drift_pct=drift), *rows[1:]]


def make_row(
    model: str, arm: str, prompt: str, load_s: float, results: list["GenerationResult"]
) -> GenerateRow:
    """The row of one arm, before it is compared with another."""
    stages, last = median_stages(results), results[-1]
    ar_s = stages.get(PRIOR_STAGE)
    return GenerateRow(
        model=model,
        arm=arm,
        prompt=prompt,
        width=last.size[0],
        height=last.size[1],
        steps=last.report["num_inference_steps"],
        runs=len(results),
        wall_s=statistics.median(r.generation_time for r in results[1:]),
        denoise_s=stages["DenoisingStage"],
        stages=stages,
        md5=[hashlib.md5(r.frames.tobytes()).hexdigest() for r in results],
        peak_memory_mb=max(r.peak_memory_mb for r in results),
        load_s=load_s,
        first_request_s=results[0].generation_time,
        ar_s=ar_s,
        ar_tokens_per_s=prior_tokens(*last.size) / ar_s if ar_s else None,
    )


def against_lossless(image: "np.ndarray", reference: "np.ndarray") -> dict[str, Any]:
    """Whether a picture is the lossless arm's to the pixel, and how near it is."""
    psnr, ssim = similarity(image, reference)
    return {"equal_to_lossless": psnr is None, "psnr_db": psnr, "ssim": ssim}


def median_stages(results: list["GenerationResult"]) -> dict[str, float]:
    """Stage -> seconds, over all runs but the first."""
    counted = [r.report["stage_seconds"] for r in results[1:]]
    return {name: statistics.median(s[name] for s in counted) for name in counted[0]}


def prior_tokens(width: int, height: int) -> int:
    """Tokens that GLM-Image's prior names for a picture made from text alone: one for each 32x32
    pixels, after those of a preview of about 16x16."""
    rows, columns = height // 32, width // 32
    longer = math.sqrt(rows / columns)
    return rows * columns + int(16 * longer) * int(16 / longer)


def print_rows(rows: list[GenerateRow]) -> None:
    """The rows, the seconds of every stage, and how near the high tier is."""
    print_table([asdict(row) for row in rows], omit=LONG_FIELDS)
    shown = rows[: len({row.arm for row in rows})]  # the arms of the first prompt
    names = list(shown[0].stages)
    body = [[name, *(f"{row.stages[name]:.4f}" for row in shown)] for name in names]
    rest = ["rest", *(f"{row.wall_s - sum(row.stages.values()):.4f}" for row in shown)]
    print(markdown(["stage s", *(row.arm for row in shown)], [*body, rest]))
    print_quality([row for row in rows if row.arm == "high"])


def print_quality(high: list[GenerateRow]) -> None:
    """PSNR and SSIM of the high tier prompt by prompt; equal pictures have no PSNR."""
    if not high:
        return
    body = [
        [row.prompt, number(row.psnr_db, 2) or "equal", number(row.ssim, 4) or "-"] for row in high
    ]
    print(markdown(["high vs lossless", "PSNR dB", "SSIM"], body))
    finite = [row.psnr_db for row in high if row.psnr_db is not None]
    if finite:
        mean, least = statistics.mean(finite), min(finite)
        print(f"mean PSNR {mean:.2f} dB, least {least:.2f} dB", flush=True)
