"""Rows of result files: merged by key, so that arms measured apart stand in one file."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from environment import write_result_file

Row = dict[str, Any]


def merge_rows(path: Path, rows: Sequence[Row], key: Sequence[str]) -> None:
    """Write `rows` into a result file under a fresh header.

    Rows already there stay unless a new one has the same values under `key`.
    """
    old = json.loads(path.read_text())["rows"] if path.exists() else []
    merged = {tuple(row[k] for k in key): row for row in [*old, *rows]}
    write_result_file(path, {"rows": list(merged.values())}, num_gpus=1)


def print_table(rows: Sequence[Row], omit: Sequence[str] = ()) -> None:
    """Print rows as a table of their common columns; floats with three digits."""
    from rich.console import Console
    from rich.table import Table

    columns = [name for name in rows[0] if name not in omit]
    table = Table(*columns)
    for row in rows:
        table.add_row(*(_cell(row[name]) for name in columns))
    Console(width=160).print(table)


def _cell(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)
