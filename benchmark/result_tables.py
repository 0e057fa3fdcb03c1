"""The blocks of tables that print_results.py writes into the documents, from the result files."""

import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import scaling_model
from tables import drift_table, family_table, markdown, number
from targets import target_table

Row = dict[str, Any]
Content = dict[str, Any]
MODELS = ("flux1-dev", "flux1-schnell", "ernie-image", "glm-image", "bundled")
# tokens at 1024x1024: FLUX.1 text, image, joint; ERNIE-Image joint; GLM-Image joint
SHOWN_TOKENS = ([512], [4096], [4608], [4216], [4360])


def results(folder: Path) -> Iterator[str]:
    """The README's tables: one a result file that exists."""
    for name, render in RESULTS.items():
        content = read(folder, name)
        if content is not None:
            yield render(content)


def targets(folder: Path) -> Iterator[str]:
    """The targets, each beside what was measured."""
    contents = {name: read(folder, name) for name in ("denoise", "generate", "kernels")}
    files = {name: content["rows"] for name, content in contents.items() if content is not None}
    if files:
        yield target_table(files)


def families(folder: Path) -> Iterator[str]:
    """Where a step's milliseconds go: one table a model and size that was profiled."""
    content = read(folder, "denoise")
    if content is None:
        return
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in by_model(content["rows"]):
        if row.get("family_rates"):
            groups.setdefault((row["model"], _size(row)), []).append(row)
    for (model, size), rows in groups.items():
        command = f"{denoise_command(rows)} --profile"
        yield f"{_title(content, f'{model}, {size}', command, rows)}\n\n{family_table(rows)}"


def drift(folder: Path) -> Iterator[str]:
    """How the high tier leaves the lossless one step by step, at the published sizes."""
    content = read(folder, "denoise")
    rows = [row for row in by_model((content or {"rows": []})["rows"]) if row.get("drift")]
    if rows:
        command = f"{denoise_command(rows)} --drift"
        yield f"{_title(content, 'Drift of the latents', command, rows)}\n\n{drift_table(rows)}"


def several(folder: Path) -> Iterator[str]:
    """Steps on several GPUs beside one, of every folder like h200-x2: a table a number of GPUs."""
    for other in sorted(folder.parent.glob(f"{folder.name}-x*")):
        content = read(other, "denoise")
        if content is not None:
            yield _render_several(content)


def _render_several(content: Content) -> str:
    rows = by_model(content["rows"])
    cells = [
        (
            row["model"],
            row["arm"],
            row["layout"],
            f"{row['ms_per_step']:.1f}",
            number(row["speedup_vs_one_gpu"], 2, "x"),
            _against_one_gpu(row),
            _gib(row),
        )
        for row in rows
    ]
    columns = ("model", "arm", "layout", "ms/step", "speedup", "latents vs one GPU", "peak GiB")
    gpus = content["header"]["num_gpus"]
    command = f"{denoise_command(rows)} --num-gpus {gpus}"
    return f"{_title(content, f'{gpus} GPUs', command)}\n\n{markdown(columns, cells)}"


def scaling(folder: Path) -> Iterator[str]:
    """Latency computed for more GPUs, beside what was measured."""
    yield scaling_model.table()


def throughput(folder: Path) -> Iterator[str]:
    """Pictures a minute of replicas, computed."""
    yield scaling_model.throughput_table()


def quality(folder: Path) -> Iterator[str]:
    """The high tier against the lossless one on the bundled model, prompt by prompt."""
    content = read(folder, "generate")
    rows = [r for r in (content or {"rows": []})["rows"] if r["model"] == "bundled"]
    rows = [row for row in rows if row["arm"] == "high" and row["ssim"] is not None]
    if not rows:
        return
    cells = [[row["prompt"], _psnr(row), number(row["ssim"], 4)] for row in rows]
    finite = [row["psnr_db"] for row in rows if row["psnr_db"] is not None]
    if finite:
        ssim = statistics.mean(row["ssim"] for row in rows)
        cells.append(["**mean**", f"**{statistics.mean(finite):.1f}**", f"**{ssim:.4f}**"])
    title = _title(content, "High against lossless", generate_command(rows), rows)
    yield f"{title}\n\n{markdown(('prompt', 'PSNR dB', 'SSIM'), cells)}"


def render_denoise(content: Content) -> str:
    rows = by_model(content["rows"])
    cells = [
        (
            row["model"],
            row["arm"],
            _size(row),
            str(row["steps"]),
            f"{row['ms_per_step']:.1f}",
            number(row["ratio_to_floor"], 3),
            number(row["ratio_to_eager"], 3),
            _against_diffusers(row),
            _gib(row),
            str(len(set(row["md5"]))),
        )
        for row in rows
    ]
    columns = ("model", "arm", "size", "steps", "ms/step", "x floor", "x eager")
    columns += ("latents vs diffusers", "peak GiB", "distinct md5")
    return f"{_title(content, 'Denoising', denoise_command(rows))}\n\n{markdown(columns, cells)}"


def render_generate(content: Content) -> str:
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in by_model(content["rows"]):
        groups.setdefault((row["model"], row["arm"], _size(row)), []).append(row)
    cells = [(*names, *_generate_cells(rows)) for names, rows in groups.items()]
    columns = (
        "model",
        "arm",
        "size",
        "prompts",
        "runs",
        "wall s",
        "denoise s",
        "prior s (tokens/s)",
    )
    columns += ("first request s", "load s", "peak GiB", "distinct md5")
    columns += ("PSNR dB / SSIM vs lossless",)
    command = generate_command([rows[0] for rows in groups.values()])
    return f"{_title(content, 'Whole images', command)}\n\n{markdown(columns, cells)}"


def _generate_cells(rows: Sequence[Row]) -> tuple[str, ...]:
    """Of one model, arm and size: medians over its prompts."""
    first = rows[0]
    return (
        str(len(rows)),
        str(first["runs"]),
        f"{_median(rows, 'wall_s'):.3f}",
        f"{_median(rows, 'denoise_s'):.3f}",
        _prior(first),
        number(first.get("first_request_s"), 1),
        number(first.get("load_s"), 1),
        _gib(first),
        str(max(len(set(row["md5"])) for row in rows)),
        _similarity(rows),
    )


def render_prior(content: Content) -> str:
    cells = [
        (row["arm"], str(row["tokens"]), f"{row['ms_per_token']:.3f}") for row in content["rows"]
    ]
    title = _title(content, "GLM-Image's prior", "python benchmark/bench_prior.py")
    return f"{title}\n\n{markdown(('arm', 'tokens', 'ms/token'), cells)}"


def render_kernels(content: Content) -> str:
    cells = [
        (
            row["op"],
            "x".join(map(str, row["shape"])),
            "yes" if row["equal"] else "no",
            f"{row['eager_us']:.1f}",
            f"{row['compile_us']:.1f}",
            f"{row['fused_us']:.1f}",
            f"{row['speedup']:.2f}x",
            number(row["pct_copy"], 0, " %"),
        )
        for row in content["rows"]
        if row["compile_us"] is not None and row["shape"][1:2] in SHOWN_TOKENS  # the file has all
    ]
    columns = ("op", "shape", "equal", "eager us", "compile us", "fused us", "speedup", "of copy")
    title = _title(content, "Kernels", "python benchmark/run_kernels.py")
    return f"{title}\n\n{markdown(columns, cells)}"


def read(folder: Path, name: str) -> Content | None:
    """A result file, where there is one."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def by_model(rows: Sequence[Row]) -> list[Row]:
    """Rows in the order of MODELS, then of size; otherwise as they stand."""
    rank = {name: i for i, name in enumerate(MODELS)}
    return sorted(rows, key=lambda r: (rank.get(r["model"], len(rank)), -r.get("width", 0)))


def denoise_command(rows: Sequence[Row]) -> str:
    """What measures these rows; with the number of steps where it is one."""
    models, arms = _names(rows, "model"), _names(rows, "arm")
    counts = {row["steps"] for row in rows}
    steps = f" --steps {counts.pop()}" if len(counts) == 1 else ""
    return f"python benchmark/bench_denoise.py --model {models} --arms {arms}{steps}"


def generate_command(rows: Sequence[Row]) -> str:
    """What measures these rows."""
    return f"python benchmark/bench_generate.py --model {_names(rows, 'model')}"


def _names(rows: Sequence[Row], field: str) -> str:
    return ",".join(dict.fromkeys(row[field] for row in rows))


def _title(content: Content, title: str, command: str, rows: Sequence[Row] | None = None) -> str:
    """`rows` are those of the table; all of the file's where it is left out."""
    header, rows = content["header"], content["rows"] if rows is None else rows
    days = sorted({row.get("date", header["date"])[:10] for row in rows})
    machine = f"{header['gpu']}, torch {header['torch']}, {' and '.join(days)}"
    return f"**{title}** ({machine}; `{command}`)"


def _size(row: Row) -> str:
    return f"{row['width']}x{row['height']}" if "width" in row else ""


def _gib(row: Row) -> str:
    peak = row.get("peak_memory_mb")
    return "" if peak is None else f"{peak / 1024:.1f}"


def _against_diffusers(row: Row) -> str:
    if row["arm"].startswith("diffusers") or row.get("equal_to_diffusers") is None:
        return ""
    return "equal" if row["equal_to_diffusers"] else f"{row['psnr_vs_diffusers_db']:.1f} dB"


def _against_one_gpu(row: Row) -> str:
    if row["equal_to_one_gpu"] is None:
        return ""
    return "equal" if row["equal_to_one_gpu"] else f"{row['psnr_vs_one_gpu_db']:.1f} dB"


def _prior(row: Row) -> str:
    if row.get("ar_s") is None:
        return ""
    return f"{row['ar_s']:.2f} ({row['ar_tokens_per_s']:.0f})"


def _median(rows: Sequence[Row], field: str) -> float:
    return statistics.median(row[field] for row in rows)


def _psnr(row: Row) -> str:
    return number(row["psnr_db"], 1) or "equal"


def _similarity(rows: Sequence[Row]) -> str:
    """Means over the prompts whose pictures differ from the lossless arm's."""
    differing = [row for row in rows if row["psnr_db"] is not None]
    if differing:
        psnr = statistics.mean(row["psnr_db"] for row in differing)
        ssim = [row["ssim"] for row in rows if row["ssim"] is not None]
        return f"{psnr:.1f} / {statistics.mean(ssim):.4f}" if ssim else f"{psnr:.1f}"
    compared = all(row.get("equal_to_lossless", row["ssim"] is not None) for row in rows)
    return "equal" if compared else ""


RESULTS: dict[str, Callable[[Content], str]] = {
    "denoise": render_denoise,
    "generate": render_generate,
    "prior": render_prior,
    "kernels": render_kernels,
}
BLOCKS: dict[str, Callable[[Path], Iterator[str]]] = {
    "results": results,
    "targets": targets,
    "families": families,
    "quality": quality,
    "drift": drift,
    "several": several,
    "scaling": scaling,
    "throughput": throughput,
}
