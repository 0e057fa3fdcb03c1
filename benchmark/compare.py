"""Compare two sets of results: every row of OLD against the same row of NEW.

    python benchmark/compare.py OLD NEW        # result files, or folders of them

The table names the measure that judges each row: ratios to the eager arm, the floor or a copy of
the same process where both files have them, else the time itself (comparing.py says why). Exits 1
when a row of this engine's has become worse by more than --tolerance percent. Rows that NEW lacks
are listed, which is no failure: a result may be retired.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmark"))

from comparing import LAYOUTS, Comparison, Layout, compare_rows  # noqa: E402
from tables import markdown  # noqa: E402

TOLERANCE_PCT = 2.0
COLUMNS = ("row", "quantity", "measure", "old", "new", "change", "verdict")


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path, help="result file or folder")
    parser.add_argument("new", type=Path, help="result file or folder")
    parser.add_argument(
        "--tolerance", type=float, default=TOLERANCE_PCT, help=f"percent [{TOLERANCE_PCT:g}]"
    )
    args = parser.parse_args(words)
    compared, missing = [], []
    try:
        for old, new in file_pairs(args.old, args.new):
            layout = layout_of(old)
            found, lacking = compare_rows(read_rows(old), read_rows(new), layout)
            compared += found
            missing += [f"{old.name}: {name}" for name in lacking]
    except ValueError as error:
        parser.error(str(error))
    return report(compared, missing, args.tolerance)


def file_pairs(old: Path, new: Path) -> Iterator[tuple[Path, Path]]:
    """The files of OLD that can be compared, each with its counterpart, which may not exist.

    Raises ValueError for a path that does not exist, a file against a folder, and for a folder
    without any file that can be compared.
    """
    for path in (old, new):
        if not path.exists():
            raise ValueError(f"got {path}, expected a result file or folder that exists")
    if old.is_dir() != new.is_dir():
        raise ValueError(f"got {old} and {new}, expected two files or two folders")
    if not old.is_dir():
        yield old, new
        return
    names = [f"{name}.json" for name in LAYOUTS if (old / f"{name}.json").exists()]
    if not names:
        raise ValueError(f"got {old}, expected a folder with one of {', '.join(LAYOUTS)} (.json)")
    for name in names:
        yield old / name, new / name


def layout_of(path: Path) -> Layout:
    """The layout of a file, told by its name. Raises ValueError for another name."""
    for name, layout in LAYOUTS.items():
        if path.stem.startswith(name):
            return layout
    raise ValueError(f"got {path.name}, expected a name that begins with one of {list(LAYOUTS)}")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a result file; none where there is no such file. Raises ValueError for a file
    that is no result file."""
    if not path.exists():
        return []
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or not isinstance(content.get("rows"), list):
        raise ValueError(f"got {path}, expected a result file: a JSON object with rows")
    return content["rows"]


def report(compared: list[Comparison], missing: list[str], tolerance_pct: float) -> int:
    """Print the tables; 1 where something has become worse by more than the tolerance."""
    print(markdown(COLUMNS, (cells for c in compared for cells in _cells(c, tolerance_pct))))
    for row in missing:
        print(f"missing in NEW: {row}")
    worse = sum(c.is_worse(tolerance_pct) for c in compared)
    print(
        f"{len(compared)} quantities compared, {worse} worse by more than {tolerance_pct:g} %,"
        f" {len(missing)} rows missing"
    )
    return int(worse > 0)


def _cells(c: Comparison, tolerance_pct: float) -> Iterator[list[str]]:
    verdict = "WORSE" if c.is_worse(tolerance_pct) else "ok" if c.judged else "yardstick"
    for measure, old in c.old.items():
        values = (f"{old:.4f}", f"{c.new[measure]:.4f}", f"{c.change_pct(measure):+.2f} %")
        yield [c.row, c.quantity, measure, *values, verdict]


if __name__ == "__main__":
    sys.exit(main())
