"""The targets of one H200, each beside what the result files say."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tables import GAPS, busy_pct, markdown

Row = dict[str, Any]
Files = dict[str, list[Row]]  # result file -> its rows
BIG_BYTES = 2 * 2 * 4096 * 3072  # of [1, 4096, 3072] read and written: near a copy from here on
DENOISE = "bench_denoise.py --arms all"


@dataclass(frozen=True)
class Found:
    """What the result files say, and of which row where it is one of many."""

    value: float
    of: str = ""


Measured = Callable[[Files], Found | None]  # None where the files do not say


@dataclass(frozen=True)
class Target:
    """A promise, and how to read from the result files whether it is kept."""

    what: str
    unit: str
    must: float
    stretch: float | None
    measured: Measured
    command: str
    at_least: bool = False  # else at most

    def met(self, value: float) -> str:
        """How far the target is reached."""
        for name, bound in (("stretch", self.stretch), ("yes", self.must)):
            if bound is not None and (value >= bound if self.at_least else value <= bound):
                return name
        return "no"

    def cells(self, files: Files) -> list[str]:
        """Texts of what, target, stretch, measured, met, command."""
        sign, found = ">=" if self.at_least else "<=", self.measured(files)
        texts = ["", "not measured"]
        if found is not None:
            of = f" ({found.of})" if found.of else ""
            texts = [f"{found.value:.{1 if found.value >= 10 else 3}f}{of}", self.met(found.value)]
        stretch = "" if self.stretch is None else f"{self.stretch:g}"
        target = f"{sign} {self.must:g} {self.unit}"
        return [self.what, target, stretch, *texts, f"`{self.command}`"]


def target_table(files: Files) -> str:
    """Every target as a row of Markdown."""
    columns = ("what", "target", "stretch", "measured", "met", "command")
    return markdown(columns, (target.cells(files) for target in TARGETS))


def row_of(files: Files, name: str, model: str, arm: str) -> Row | None:
    """The 1024x1024 row of a model's arm; of one GPU where several were used."""
    for row in files.get(name, []):
        if (row["model"], row["arm"]) == (model, arm) and row.get("num_gpus", 1) == 1:
            if row.get("width", 1024) == row.get("height", 1024) == 1024:
                return row
    return None


def field(name: str, model: str, arm: str, read: str, divisor: float = 1) -> Measured:
    """Reads one field of one row."""

    def measured(files: Files) -> Found | None:
        value = (row_of(files, name, model, arm) or {}).get(read)
        return None if value is None else Found(value / divisor)

    return measured


def overhead_pct(files: Files) -> Found | None:
    """All of FLUX.1's wall time that is not denoising."""
    row = row_of(files, "generate", "flux1-dev", "lossless")
    return None if row is None else Found(100 * (1 - row["denoise_s"] / row["wall_s"]))


def flux_busy_pct(files: Files) -> Found | None:
    """The share of FLUX.1's denoising in which the GPU works."""
    families = (row_of(files, "denoise", "flux1-dev", "lossless") or {}).get("families") or {}
    return Found(busy_pct(families)) if GAPS in families else None


def least_of_copy(files: Files) -> Found | None:
    """The fused op that stays furthest below the speed of a copy, among the big shapes."""
    rows = [row for row in files.get("kernels", []) if row["pct_copy"] is not None]
    big = [row for row in rows if row["gbps"] * 1e3 * row["fused_us"] >= BIG_BYTES]
    return least(big, lambda row: row["pct_copy"])


def least_speedup(files: Files) -> Found | None:
    """The fused op that gains least over its eager chain, at any shape."""
    return least(files.get("kernels", []), lambda row: row["eager_us"] / row["fused_us"])


def least(rows: Sequence[Row], value: Callable[[Row], float]) -> Found | None:
    """The least value of kernel rows, with its op and shape; None where there are none."""
    row = min(rows, key=value, default=None)
    if row is None:
        return None
    return Found(value(row), f"{row['op']} {'x'.join(map(str, row['shape']))}")


def _denoise(what: str, model: str, arm: str, ms: tuple[float, float], forwards: int = 1) -> Target:
    unit = "ms/forward" if forwards > 1 else "ms/step"
    measured = field("denoise", model, arm, "ms_per_step", forwards)
    return Target(what, unit, *ms, measured, DENOISE)


def _floor(what: str, model: str, must: float) -> Target:
    measured = field("denoise", model, "lossless", "ratio_to_floor")
    return Target(what, "x floor", must, None, measured, DENOISE)


def _generate(what: str, unit: str, must: float, stretch: float | None, read: str) -> Target:
    measured = field("generate", "glm-image", "lossless", read)
    return Target(what, unit, must, stretch, measured, "bench_generate.py --model glm-image")


FLUX, GENERATE_FLUX = "flux1-dev", "bench_generate.py --model flux1-dev"
TARGETS = (
    _denoise("FLUX.1-dev lossless", FLUX, "lossless", (122, 118)),
    _floor("FLUX.1-dev lossless", FLUX, 1.08),
    _denoise("FLUX.1-dev high", FLUX, "high", (118, 114)),
    Target(
        "FLUX.1-dev high, PSNR against lossless",
        "dB",
        34,
        None,
        field("generate", FLUX, "high", "psnr_db"),
        GENERATE_FLUX,
        at_least=True,
    ),
    _denoise("ERNIE-Image lossless", "ernie-image", "lossless", (245, 236)),
    _floor("ERNIE-Image lossless", "ernie-image", 1.10),
    _denoise("GLM-Image DiT lossless", "glm-image", "lossless", (99, 95), forwards=2),
    _floor("GLM-Image DiT lossless", "glm-image", 1.05),
    _generate("GLM-Image prior", "s", 6.5, 5.6, "ar_s"),
    _generate("GLM-Image end to end", "s", 13, None, "wall_s"),
    Target(
        "every fused op from 1x4096x3072 on, of a copy's speed",
        "%",
        80,
        None,
        least_of_copy,
        "run_kernels.py",
        at_least=True,
    ),
    Target(
        "every fused op, over its eager chain",
        "x",
        1,
        None,
        least_speedup,
        "run_kernels.py",
        at_least=True,
    ),
    Target(
        "FLUX.1-dev denoising, GPU busy",
        "%",
        99,
        None,
        flux_busy_pct,
        f"{DENOISE} --profile",
        at_least=True,
    ),
    Target("FLUX.1-dev wall time beside denoising", "%", 3, None, overhead_pct, GENERATE_FLUX),
)
