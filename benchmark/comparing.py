"""What compare.py compares: the quantities of each kind of result row, and which measure judges.

A quantity (milliseconds a step, seconds of a request, one kernel's time) has several measures:
ratios to something of the same process, which another machine or another day's clocks leave alone,
and the time itself. The time judges only where the two files have no ratio in common. With several
ratios it is worse only where all of them are: alone, a ratio to eager also grows when eager gains.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
Measures = dict[str, float]  # measure -> value, smaller is better
Quantities = dict[str, Measures]
ABSOLUTE = "time"
EAGER = "eager"
# arms that are no promise of this engine: what others are compared with
YARDSTICKS = (EAGER, "diffusers", "diffusers-compile")


@dataclass(frozen=True)
class Comparison:
    """One quantity of one row in both files."""

    row: str
    quantity: str
    old: Measures  # the measures that judge; the same names in both
    new: Measures
    judged: bool  # False for a yardstick: shown, never a failure

    def change_pct(self, measure: str) -> float:
        """Positive is worse."""
        return 100 * (self.new[measure] / self.old[measure] - 1)

    def is_worse(self, tolerance_pct: float) -> bool:
        """Whether every measure has grown by more than the tolerance."""
        allowed = 1 + tolerance_pct / 100
        return self.judged and all(self.new[m] > allowed * old for m, old in self.old.items())


@dataclass(frozen=True)
class Layout:
    """One kind of result file: what names a row, and what is measured in it."""

    key: tuple[str, ...]
    optional_key: tuple[str, ...]  # names a row too, where both files have the field
    quantities: Callable[[Row, list[Row]], Quantities]


def compare_rows(
    old_rows: list[Row], new_rows: list[Row], layout: Layout
) -> tuple[list[Comparison], list[str]]:
    """(every quantity that both have, the names of the rows that NEW lacks)."""
    compared, missing, seen = [], [], Counter()
    for row in old_rows:
        name = " ".join(_text(row[k]) for k in (*layout.key, *layout.optional_key) if k in row)
        twins = [other for other in new_rows if is_twin(row, other, layout)]
        nth = seen[name]  # rows of one name pair up in their order
        seen[name] += 1
        if nth >= len(twins):
            missing.append(name)
            continue
        before = layout.quantities(row, old_rows)
        after = layout.quantities(twins[nth], new_rows)
        for quantity in before.keys() & after.keys():
            measures = judging(before[quantity], after[quantity])
            old, new = ({m: q[quantity][m] for m in measures} for q in (before, after))
            judged = row.get("arm") not in YARDSTICKS
            compared.append(Comparison(name, quantity, old, new, judged))
    return compared, missing


def is_twin(old: Row, new: Row, layout: Layout) -> bool:
    """Whether two rows are of the same thing."""
    same = all(old[k] == new.get(k) for k in layout.key)
    return same and all(
        old[k] == new[k] for k in layout.optional_key if k in old.keys() & new.keys()
    )


def judging(old: Measures, new: Measures) -> list[str]:
    """The ratios that both have; the time itself where there is none."""
    common = sorted(old.keys() & new.keys())
    return [name for name in common if name != ABSOLUTE] or common


def denoise_quantities(row: Row, rows: list[Row]) -> Quantities:
    """Milliseconds a step: over eager's and over the floor, both of the same process."""
    measures = {ABSOLUTE: row["ms_per_step"]}
    ratios = {"/ eager": row["ratio_to_eager"], "/ floor": row["ratio_to_floor"]}
    if row["arm"] == EAGER:
        ratios.pop("/ eager")
    return {"ms_per_step": measures | {name: r for name, r in ratios.items() if r is not None}}


def generate_quantities(row: Row, rows: list[Row]) -> Quantities:
    """Seconds of the request, of denoising and of the prior: over those of the eager arm."""
    eager = next((r for r in rows if r["arm"] == EAGER and _same_request(r, row)), None)
    quantities = {}
    for name in ("wall_s", "denoise_s", "ar_s"):
        if row.get(name) is not None:
            quantities[name] = {ABSOLUTE: row[name]}
            if eager is not None and eager is not row and eager.get(name):
                quantities[name]["/ eager"] = row[name] / eager[name]
    return quantities


def kernel_quantities(row: Row, rows: list[Row]) -> Quantities:
    """Microseconds of the fused op: over the eager chain's, and over the time of a copy."""
    measures = {ABSOLUTE: row["fused_us"], "/ eager": row["fused_us"] / row["eager_us"]}
    if row.get("pct_copy"):
        measures["/ copy"] = 100 / row["pct_copy"]
    return {"fused_us": measures}


def _same_request(a: Row, b: Row) -> bool:
    return all(a.get(name) == b.get(name) for name in ("model", "prompt", "width", "height"))


def _text(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, list) else str(value)


LAYOUTS = {
    "denoise": Layout(
        ("model", "arm", "width", "height"), ("num_gpus", "layout"), denoise_quantities
    ),
    "generate": Layout(("model", "arm", "prompt"), ("width", "height"), generate_quantities),
    "kernels": Layout(("op", "shape", "dtype"), (), kernel_quantities),
}
