"""Milliseconds a step on 1 to 8 GPUs and pictures a minute of replicas, computed from measurements.

    python benchmark/scaling_model.py            # the tables of docs/scaling.md

A step on N ranks is taken as its time on one, shared out, plus what the ranks exchange:

    cfg:      the longer of the two forwards + one swap of velocities
    ulysses:  forward / N + attention layers x exchange(N)
    both:     the longer forward / (N / 2) + attention layers x exchange(N / 2) + swap

An exchange moves 4 J D 2 (N - 1) / N^2 bytes a rank (q, k, v there, the output back, bf16) and
copies 16 J D / N elements; LINK_GBPS and LATENCY_US stand in until collectives.json has the
measured times. A forward whose tokens are cut is launched kernel by kernel, as graphs take no
collectives: it is never faster than the host's HOST_MS a layer. That a GEMM of fewer rows runs
less efficiently is left out, so that what is measured falls short of the computed by just that.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmark"))

from tables import markdown  # noqa: E402

RESULTS = ROOT / "benchmark" / "results"
LINK_GBPS = 350.0  # assumed: NVLink of an H200, one way, 450 at most
COPY_TBPS = 2.5  # assumed: strided copies; plain ones reach 4.2
LATENCY_US = 25.0  # assumed: of one collective, twice a layer
HOST_MS = 78 / 57  # a layer's launches where no graph replays them: FLUX.1's steps on 2 and 4 GPUs
SWAP_US = 60.0  # assumed: of two velocities of 0.5 MB
COUNTS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Model:
    """What the formula needs of a model at 1024x1024."""

    layers: int  # of attention
    tokens: int  # of the longer forward's joint sequence
    hidden: int
    longer: float  # share of the longer forward in a step
    target_ms: float  # a step on one GPU: performance.md's goal, until it is measured


MODELS = {
    "flux1-dev": Model(57, 4608, 3072, 1.0, 122.0),
    "ernie-image": Model(36, 4216, 4096, 4216 / (4216 + 4097), 245.0),
    "glm-image": Model(30, 4360, 4096, 4360 / (4360 + 4097), 198.0),
}


@dataclass(frozen=True)
class Exchanges:
    """Measured microseconds of collectives.json: (model, op, ranks) -> us; may be empty."""

    us: dict[tuple[str, str, int], float]

    def around_attention(self, name: str, ranks: int) -> float:
        """Of one attention over `ranks` parts, in microseconds; 0 for one."""
        if ranks == 1:
            return 0.0
        return self.us.get((name, "exchange", ranks)) or assumed_exchange_us(MODELS[name], ranks)

    def swap(self, name: str) -> float:
        """Of the two velocities of a guided step, in microseconds."""
        return self.us.get((name, "guidance", 2), SWAP_US)


def assumed_exchange_us(model: Model, ranks: int) -> float:
    """An exchange by the assumed rates."""
    elements = model.tokens * model.hidden / ranks
    sent = 4 * 2 * elements * (ranks - 1) / ranks
    copied = 16 * 2 * elements
    return sent / (LINK_GBPS * 1e3) + copied / (COPY_TBPS * 1e6) + 2 * LATENCY_US


def step_ms(name: str, one_ms: float, ranks: int, exchanges: Exchanges) -> tuple[str, float]:
    """(layout, milliseconds) of the layout that the engine picks for `ranks`."""
    model = MODELS[name]
    guided = model.longer < 1
    if ranks == 1:
        return "single", one_ms
    parts = ranks // 2 if guided else ranks
    forward = one_ms * model.longer / parts
    exchanged = model.layers * exchanges.around_attention(name, parts) / 1e3
    if parts > 1:
        forward = max(forward, model.layers * HOST_MS - exchanged)
    swap = exchanges.swap(name) / 1e3 if guided else 0.0
    names = (["cfg2"] if guided else []) + ([f"ulysses{parts}"] if parts > 1 else [])
    return "+".join(names), forward + exchanged + swap


@dataclass(frozen=True)
class Measured:
    """A step of the lossless arm; `speedup` over one GPU of the same machine, in one process."""

    ms: float
    speedup: float | None


def measured_steps() -> dict[tuple[str, int], Measured]:
    """(model, GPUs) -> the fastest layout's step, from every denoise.json; of one GPU, h200's."""
    found: dict[tuple[str, int], Measured] = {}
    for path in sorted(RESULTS.glob("h200*/denoise.json")):
        for row in json.loads(path.read_text())["rows"]:
            key = (row["model"], row["num_gpus"])
            if (row["arm"], row["width"], row["height"]) != ("lossless", 1024, 1024):
                continue
            if row["num_gpus"] == 1 and path.parent.name != "h200":
                continue  # there to compare with
            if key not in found or row["ms_per_step"] < found[key].ms:
                found[key] = Measured(row["ms_per_step"], row["speedup_vs_one_gpu"])
    return found


def one_gpu_ms(name: str, steps: dict[tuple[str, int], Measured]) -> float:
    """A step on one GPU: measured, or the target until it is."""
    return steps[name, 1].ms if (name, 1) in steps else MODELS[name].target_ms


def measured_exchanges() -> Exchanges:
    """Of every collectives.json."""
    us = {}
    for path in sorted(RESULTS.glob("h200*/collectives.json")):
        for row in json.loads(path.read_text())["rows"]:
            us[row["model"], row["op"], row["ranks"]] = row["us"]
    return Exchanges(us)


def table() -> str:
    """Latency of one picture's step, computed and where there is one measured."""
    steps, exchanges = measured_steps(), measured_exchanges()
    rows = []
    for name in MODELS:
        one_ms = one_gpu_ms(name, steps)
        for ranks in COUNTS:
            layout, ms = step_ms(name, one_ms, ranks, exchanges)
            row = [name, str(ranks), layout, f"{ms:.1f}", f"{one_ms / ms:.2f}x"]
            rows.append(row + seen(steps.get((name, ranks))))
    columns = ["model", "GPUs", "layout", "ms/step computed", "speedup", "measured", "speedup"]
    return markdown(columns, rows)


def seen(measured: Measured | None) -> list[str]:
    """The cells of what was measured; a dash where nothing was."""
    if measured is None:
        return ["-", "-"]
    return [f"{measured.ms:.1f}", f"{measured.speedup or 1:.2f}x"]


def throughput_table() -> str:
    """Pictures a minute of 8 GPUs, shared out as replicas of 1, 2, 4 or 8; denoising alone."""
    steps, exchanges = measured_steps(), measured_exchanges()
    count = {"flux1-dev": 50, "ernie-image": 50, "glm-image": 30}
    rows = []
    for name in MODELS:
        one_ms = one_gpu_ms(name, steps)
        for ranks in COUNTS:
            _, ms = step_ms(name, one_ms, ranks, exchanges)
            seconds = ms * count[name] / 1e3
            pictures = 60 / seconds * (8 // ranks)
            rows.append([name, f"{8 // ranks} x {ranks}", f"{seconds:.2f}", f"{pictures:.1f}"])
    return markdown(["model", "replicas x GPUs", "s a picture", "pictures a minute"], rows)


if __name__ == "__main__":
    print(table(), throughput_table(), sep="\n\n")
