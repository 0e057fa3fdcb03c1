"""Print the result files as the tables of the documents: `make results`.

    python benchmark/print_results.py [--gpu h200] [--write README.md docs/performance.md]

`--write` replaces the text between `<!-- NAME:begin -->` and `<!-- NAME:end -->` of each file, for
each block NAME below that the file has. Every table names the command that measured it.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmark"))

from result_tables import BLOCKS  # noqa: E402


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", default="h200", help="folder of benchmark/results")
    parser.add_argument("--write", type=Path, nargs="+", help="files to update between markers")
    args = parser.parse_args(words)
    folder = ROOT / "benchmark" / "results" / args.gpu
    blocks = {name: "\n\n".join(render(folder)) for name, render in BLOCKS.items()}
    if args.write is None:
        print("\n\n".join(text for text in blocks.values() if text))
        return 0
    try:
        for path in args.write:
            path.write_text(filled(path.read_text(encoding="utf-8"), blocks), encoding="utf-8")
    except ValueError as error:
        parser.error(f"--write: {path}: {error}")
    return 0


def filled(text: str, blocks: dict[str, str]) -> str:
    """The text with each block that it has markers for. Raises ValueError where it has none, and
    where one of a pair is missing."""
    found = 0
    for name, block in blocks.items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        marks = (text.count(begin), text.count(end))
        if marks == (0, 0):
            continue
        if marks != (1, 1) or text.index(begin) > text.index(end):
            raise ValueError(f"got {marks} of {begin} and {end}, expected one of each, in order")
        head, tail = text.split(begin)[0], text.split(end)[1]
        text = f"{head}{begin}\n{block}\n{end}{tail}"
        found += 1
    if not found:
        raise ValueError(f"got no markers, expected <!-- NAME:begin --> of one of {list(blocks)}")
    return text


if __name__ == "__main__":
    sys.exit(main())
