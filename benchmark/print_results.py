"""Print the result files as the README's tables: `make results`.

    python benchmark/print_results.py [--gpu h200] [--write README.md]

`--write` replaces the text between `<!-- results:begin -->` and `<!-- results:end -->`.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
Row = dict[str, Any]
# tokens at 1024x1024: FLUX.1 text, image, joint; ERNIE-Image joint; GLM-Image joint
MODEL_TOKENS = (512, 4096, 4608, 4216, 4360)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", default="h200", help="folder of benchmark/results")
    parser.add_argument("--write", type=Path, help="file to update between its result markers")
    args = parser.parse_args()
    text = "\n\n".join(sections(ROOT / "benchmark" / "results" / args.gpu))
    if args.write is None:
        print(text)
        return 0
    content = args.write.read_text(encoding="utf-8")
    if BEGIN not in content or END not in content:
        parser.error(f"--write: {args.write} has no {BEGIN} ... {END}, expected both markers")
    head, tail = content.split(BEGIN)[0], content.split(END)[1]
    args.write.write_text(f"{head}{BEGIN}\n{text}\n{END}{tail}", encoding="utf-8")
    return 0


def sections(folder: Path) -> Iterator[str]:
    """One Markdown section a result file that exists."""
    for name, render in SECTIONS.items():
        path = folder / f"{name}.json"
        if path.exists():
            yield render(json.loads(path.read_text(encoding="utf-8")))


def render_denoise(content: dict[str, Any]) -> str:
    rows = (
        (
            row["model"],
            row["arm"],
            f"{row['width']}x{row['height']}",
            f"{row['ms_per_step']:.1f}",
            f"{row['ratio_to_floor']:.3f}",
            "" if row["ratio_to_eager"] is None else f"{row['ratio_to_eager']:.3f}",
            str(len(set(row["md5"]))),
        )
        for row in content["rows"]
    )
    columns = ("model", "arm", "size", "ms/step", "x floor", "x eager", "distinct md5")
    return _section(content, "Denoising", "python benchmark/bench_denoise.py", columns, rows)


def render_generate(content: dict[str, Any]) -> str:
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in content["rows"]:
        groups.setdefault((row["model"], row["arm"]), []).append(row)
    rows = (
        (
            model,
            arm,
            str(len(group)),
            str(group[0]["runs"]),
            f"{statistics.median(row['wall_s'] for row in group):.3f}",
            f"{statistics.median(row['denoise_s'] for row in group):.3f}",
            str(max(len(set(row["md5"])) for row in group)),
            _similarity(group),
        )
        for (model, arm), group in groups.items()
    )
    columns = (
        "model",
        "arm",
        "prompts",
        "runs",
        "wall s",
        "denoise s",
        "distinct md5",
        "mean PSNR dB / SSIM vs lossless",
    )
    return _section(content, "Whole images", "python benchmark/bench_generate.py", columns, rows)


def _similarity(group: Sequence[Row]) -> str:
    psnr = [row["psnr_db"] for row in group if row["psnr_db"] is not None]
    if not psnr:
        return "equal"
    return f"{statistics.mean(psnr):.1f} / {statistics.mean(row['ssim'] for row in group):.4f}"


def render_kernels(content: dict[str, Any]) -> str:
    rows = (
        (
            row["op"],
            "x".join(map(str, row["shape"])),
            "yes" if row["equal"] else "no",
            f"{row['eager_us']:.1f}",
            f"{row['compile_us']:.1f}",
            f"{row['fused_us']:.1f}",
            f"{row['speedup']:.2f}x",
            "" if row["pct_copy"] is None else f"{row['pct_copy']:.0f} %",
        )
        for row in content["rows"]
        if row["compile_us"] is not None and row["shape"][1] in MODEL_TOKENS  # the file has all
    )
    columns = ("op", "shape", "equal", "eager us", "compile us", "fused us", "speedup", "of copy")
    return _section(content, "Kernels", "python benchmark/run_kernels.py", columns, rows)


def _section(
    content: dict[str, Any],
    title: str,
    command: str,
    columns: Sequence[str],
    rows: Iterator[Sequence[str]],
) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *rows)]
    header = content["header"]
    machine = f"{header['gpu']}, torch {header['torch']}, {header['date'][:10]}"
    return "\n".join([f"**{title}** ({machine}; `{command}`)", "", *lines])


SECTIONS: dict[str, Callable[[dict[str, Any]], str]] = {
    "denoise": render_denoise,
    "generate": render_generate,
    "kernels": render_kernels,
}

if __name__ == "__main__":
    sys.exit(main())
