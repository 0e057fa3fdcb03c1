"""What a load means: percentiles, goodput, errors, and whether anything was lost or wrong."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from serving_load import Answer
from tables import markdown

Row = dict[str, Any]
PERCENTILES = (50, 90, 99)
# An overloaded or restarting server may say so; every other error is the server's fault or ours.
ALLOWED_STATUSES = (200, 429, 503, 504)
FAULTS = ("wrong", "lost", "unexpected", "wrong_alone")


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The smallest value that at least `percent` of the values do not exceed; None of none."""
    ordered = sorted(values)
    rank = max(1, -(-len(ordered) * percent // 100))
    return ordered[int(rank) - 1] if ordered else None


def percentiles(values: Sequence[float | None]) -> dict[str, float | None]:
    """p50, p90, p99 of the values that are known."""
    known = [value for value in values if value is not None]
    return {f"p{percent}": percentile(known, percent) for percent in PERCENTILES}


def load_row(
    answers: Sequence[Answer], references: Sequence[str], seconds: float, slo_s: float | None
) -> Row:
    """One row of figures. `references`: the hash of each distinct request's files, made alone.

    `seconds`: of the whole load. `goodput`: right answers within `slo_s` a second.
    """
    right = [a for a in answers if a.status == 200 and a.picture == references[a.index]]
    wrong = [a for a in answers if a.status == 200 and a.picture != references[a.index]]
    in_time = [a for a in right if slo_s is None or a.wall_s <= slo_s]
    errors = Counter(f"{a.status} {a.code}" for a in answers if a.status not in (0, 200))
    return {
        "right": len(right),
        "wrong": len(wrong),
        "lost": sum(a.status == 0 for a in answers),
        "unexpected": sum(a.status not in (0, *ALLOWED_STATUSES) for a in answers),
        "errors": dict(sorted(errors.items())),
        "seconds": seconds,
        "throughput": len(right) / seconds,
        "goodput": len(in_time) / seconds,
        "latency_s": percentiles([a.wall_s for a in right]),
        "queue_s": percentiles([a.queue_s for a in right]),
        "engine_s": percentiles([a.engine_s for a in right]),
        "overhead_s": percentiles([a.overhead_s for a in right]),
        "late_s": percentiles([a.late_s for a in answers]),
    }


def faults(row: Row) -> list[str]:
    """Why the run has failed; empty for a good one."""
    found = [f"{row[name]} {name}" for name in FAULTS if row[name]]
    return found if row["right"] else [*found, "no right answer"]


def print_row(row: Row) -> None:
    """The figures as tables."""
    print(markdown(*_percentile_table(row)))
    print(
        f"{row['right']} right, {row['wrong']} wrong, {row['lost']} lost in {row['seconds']:.1f} s"
        f" ({row['throughput']:.3f} a second, goodput {row['goodput']:.3f})"
    )
    if row["recovery_s"] is not None:
        print(f"{row['recovery_s']:.1f} s from the worker's death to a ready server")
    for error, count in row["errors"].items():
        print(f"{count} answers {error}")


def _percentile_table(row: Row) -> tuple[list[str], list[list[str]]]:
    names = ("latency_s", "queue_s", "engine_s", "overhead_s", "late_s")
    columns = ["ms", *row["latency_s"]]
    return columns, [[name.removesuffix("_s"), *map(_ms, row[name].values())] for name in names]


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.1f}"
