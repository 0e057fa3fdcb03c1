"""Time every fused op against its eager chain and torch.compile, on this machine's GPU.

python benchmark/run_kernels.py --json benchmark/results/h200/kernels.json

Each benchmark/kernels/bench_<op>.py gives its rows; one that raises is reported and the rest
still runs. The copy ceiling is measured in the same process.
"""

import argparse
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "python"))
# one small kernel a compile: Inductor's worker pool would cost more than it saves
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import torch  # noqa: E402
from environment import check_result_file, write_result_file  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from timing import BenchRow, copy_ceiling_tbps, skip_compile  # noqa: E402

BENCHES = Path(__file__).parent / "kernels"
COLUMNS = {
    "op": str,
    "shape": lambda shape: "x".join(map(str, shape)),
    "dtype": str,
    "equal": lambda equal: "yes" if equal else "no",
    "eager_us": "{:.1f}".format,
    "fused_us": "{:.1f}".format,
    "compile_us": "{:.1f}".format,
    "speedup": "{:.2f}x".format,
    "gbps": "{:.0f}".format,
    "pct_copy": "{:.0f} %".format,
}


def bench_files(filter_text: str) -> list[Path]:
    """The bench files whose op name has `filter_text`; raises ValueError when there is none."""
    files = sorted(BENCHES.glob("bench_*.py"))
    chosen = [path for path in files if filter_text in path.stem.removeprefix("bench_")]
    if not chosen:
        known = ", ".join(path.stem.removeprefix("bench_") for path in files)
        raise ValueError(f"no op is named like {filter_text!r}; there are: {known}")
    return chosen


def bench_rows(path: Path) -> Iterator[BenchRow]:
    """Import one bench file and run it."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with torch.inference_mode():
        yield from module.rows()


def run_all(
    files: list[Path], save: Callable[[list[BenchRow]], None]
) -> tuple[list[BenchRow], list[str]]:
    """The rows of every file, and the names of those that raised; what there is so far is saved
    after each."""
    rows, failed = [], []
    for path in files:
        print(f"{path.stem} …", file=sys.stderr, flush=True)
        try:
            for row in bench_rows(path):
                rows.append(row)
        except Exception:  # reported below and by the exit code; the other benches still run
            traceback.print_exc()
            failed.append(path.stem)
        save(rows)
        torch.cuda.empty_cache()
    return rows, failed


def print_rows(rows: list[BenchRow]) -> None:
    """The table; a dash where a column does not apply."""
    table = Table(title=f"{torch.cuda.get_device_name()}, copy {copy_ceiling_tbps():.2f} TB/s")
    for name in COLUMNS:
        table.add_column(name, no_wrap=True, justify="left" if name == "op" else "right")
    for row in rows:
        cells = asdict(row)
        table.add_row(
            *("-" if cells[name] is None else show(cells[name]) for name, show in COLUMNS.items())
        )
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def json_row(row: BenchRow) -> dict[str, Any]:
    """A row as it stands in kernels.json: nanosecond digits at most."""
    cells = asdict(row).items()
    return {name: round(cell, 3) if isinstance(cell, float) else cell for name, cell in cells}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--filter", default="", help="only ops whose name has this text")
    parser.add_argument("--skip-compile", action="store_true", help="no torch.compile column")
    arguments = parser.parse_args()
    if arguments.json and arguments.filter:
        parser.error("--json writes the whole table: leave --filter out")
    if not torch.cuda.is_available():
        parser.error("kernel benchmarks need an NVIDIA GPU, and torch sees none")
    if arguments.skip_compile:
        skip_compile()
    if arguments.json:
        check_result_file(arguments.json)

    def save(rows: list[BenchRow]) -> None:
        if arguments.json:
            content = {"rows": [json_row(row) for row in rows]}
            write_result_file(arguments.json, content, num_gpus=1)

    rows, failed = run_all(bench_files(arguments.filter), save)
    print_rows(rows)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
