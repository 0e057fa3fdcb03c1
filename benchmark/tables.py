"""Result rows as Markdown tables, for the console and for the documents alike."""

from collections.abc import Iterable, Sequence
from typing import Any

Row = dict[str, Any]
GAPS = "gaps"  # a step less the time in which a kernel ran


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; every row has one text a column."""
    lines = [f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *rows)]
    return "\n".join(lines)


def number(value: float | None, digits: int, unit: str = "") -> str:
    """A number with its unit; nothing where there is none."""
    return "" if value is None else f"{value:.{digits}f}{unit}"


def family_table(rows: Sequence[Row]) -> str:
    """Milliseconds a step by kernel family, one column an arm, with the share of the ceiling.

    `rows`: rows of denoise.json of one model and size that have `families`.
    """
    spent: dict[str, float] = {}
    for row in rows:
        for family, ms in row["families"].items():
            spent[family] = max(ms, spent.get(family, 0.0))
    names = sorted(spent, key=lambda family: (family == GAPS, -spent[family]))
    body = [[name, *(_family_cell(row, name) for row in rows)] for name in names]
    busy = ["GPU busy", *(f"{busy_pct(row['families']):.1f} %" for row in rows)]
    total = ["**step**", *(f"**{row['ms_per_step']:.2f}**" for row in rows)]
    return markdown(["ms a step", *(row["arm"] for row in rows)], [*body, busy, total])


def busy_pct(families: dict[str, float]) -> float:
    """The share of a profiled step in which a kernel ran."""
    busy = sum(ms for name, ms in families.items() if name != GAPS)
    return 100 * busy / (busy + max(0.0, families.get(GAPS, 0.0)))


def drift_table(rows: Sequence[Row]) -> str:
    """Relative distance of the latents from the lossless ones after some of the steps.

    `rows`: rows of denoise.json with a `drift`.
    """
    shown = sorted({i for row in rows for i in _shown_steps(len(row["drift"]))})
    body = [[row["model"], *(_drift_cell(row["drift"], i) for i in shown)] for row in rows]
    return markdown(["after step", *(str(i + 1) for i in shown)], body)


def _shown_steps(steps: int) -> list[int]:
    return sorted({0, *range(9, steps, 10), steps - 1})


def _drift_cell(drift: Sequence[float], step: int) -> str:
    return f"{drift[step]:.1e}" if step < len(drift) else ""


def _family_cell(row: Row, family: str) -> str:
    ms = row["families"].get(family)
    if ms is None:
        return ""
    rate = (row.get("family_rates") or {}).get(family)
    if rate is None:
        return f"{ms:.2f}"
    return f"{ms:.2f} ({rate['value']:.0f} {rate['unit']}, {rate['pct_of_ceiling']:.0f} %)"
