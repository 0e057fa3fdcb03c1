"""Rows of result files: merged by key, so that arms measured apart stand in one file."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from environment import write_result_file
from tables import markdown

Row = dict[str, Any]


def merge_rows(path: Path, rows: Sequence[Row], key: Sequence[str], num_gpus: int = 1) -> None:
    """Write `rows` into a result file under a fresh header.

    Rows already there stay unless a new one has the same values under `key`; a row that an older
    version wrote without one of these fields is replaced by a new row with the others. A row that
    stays keeps the date and the commit of its own run, in fields of these names.
    """
    old = json.loads(path.read_text()) if path.exists() else {"rows": []}
    kept = [row for row in old["rows"] if not any(same_key(row, new, key) for new in rows)]
    kept = [dated(row, old.get("header", {})) for row in kept]
    write_result_file(path, {"rows": [*kept, *rows]}, num_gpus=num_gpus)


def dated(row: Row, header: Row) -> Row:
    """The row with the date and the commit of the run that `header` describes, if it has none."""
    return {name: header[name] for name in ("date", "package_commit") if name in header} | row


def same_key(old: Row, new: Row, key: Sequence[str]) -> bool:
    """Whether two rows agree in the fields `key`; one that `old` lacks fits anything."""
    return all(old.get(name, new[name]) == new[name] for name in key)


def print_table(rows: Sequence[Row], omit: Sequence[str] = ()) -> None:
    """Print rows, of which all have the fields of the first; floats with three digits."""
    if not rows:
        return
    columns = [name for name in rows[0] if name not in omit]
    print(markdown(columns, ([_cell(row[name]) for name in columns] for row in rows)), flush=True)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
