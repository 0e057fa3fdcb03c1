"""Whole generations through the public API, by the measuring protocol of the README.

    python benchmark/bench_generate.py --model flux1-dev --arms eager,lossless,high \
        --json benchmark/results/h200/generate.json

One warm process; every arm makes `--runs` pictures one after another, the first is dropped, the
median of the rest counts. The first arm runs again at the end (A/B/A): the drift of the machine.
Denoise time is the DenoisingStage's own. PSNR and SSIM compare with the lossless arm's picture.
"""

import argparse
import hashlib
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from sglang.multimodal_gen import DiffGenerator, GenerationResult

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "benchmark")]

ARMS = ("eager", "lossless", "high")
MODELS = {"flux1-dev": "FLUX.1-dev", "flux1-schnell": "FLUX.1-schnell", "bundled": None}
PROMPT = "a lighthouse on a cliff at dusk, long exposure"
# op of kernels.json and shape prefix -> sites a FLUX.1 step has at that shape (1024x1024)
FLUX_SITES = {
    ("residual_gate_add", (1, 4096, 3072)): 38,
    ("residual_gate_add", (1, 512, 3072)): 38,
    ("residual_gate_add", (1, 4608, 3072)): 38,
    ("layernorm_modulate", (1, 4096, 3072)): 39,
    ("layernorm_modulate", (1, 512, 3072)): 38,
    ("layernorm_modulate", (1, 4608, 3072)): 38,
    ("qk_rmsnorm_rope", (1, 4608, 24, 128)): 38,
    ("joint_qk_rmsnorm_rope", (1, 4608, 24, 128)): 19,
    ("gelu_tanh_concat", (1, 4608, 3072, 12288)): 38,
}


@dataclass(frozen=True)
class GenerateRow:
    """One row of generate.json."""

    model: str
    arm: str
    prompt: str
    runs: int
    wall_s: float
    denoise_s: float
    stages: dict[str, float]
    md5: list[str]  # of the PNG's pixels, one a run
    psnr_db: float | None  # against the lossless arm; None means equal pixels
    ssim: float | None
    peak_memory_mb: float


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="flux1-dev", choices=list(MODELS))
    parser.add_argument("--arms", default="eager,lossless,high", help="comma list, in this order")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--prompt", action="append", help="repeat for several prompts")
    parser.add_argument("--captions", type=Path, help="JSON list of {caption: ...}: more prompts")
    parser.add_argument("--steps", type=int, help="default: the model's")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument(
        "--kernels", type=Path, default=ROOT / "benchmark/results/h200/kernels.json"
    )
    parser.add_argument("--json", type=Path, help="merge the rows into this result file")
    args = parser.parse_args()
    args.arms = args.arms.split(",")
    unknown = [arm for arm in args.arms if arm not in ARMS]
    if unknown:
        parser.error(f"--arms: got {unknown}, expected names of {list(ARMS)}")
    if args.runs < 2:
        parser.error(f"--runs: got {args.runs}, expected at least 2 (the first is dropped)")
    args.prompts = args.prompt or []
    if args.captions:
        args.prompts += [row["caption"] for row in json.loads(args.captions.read_text())]
    args.prompts = args.prompts or [PROMPT]
    return args


def main() -> int:
    args = parse_args()
    from results import merge_rows, print_table

    from sglang.multimodal_gen import DiffGenerator

    load_format = "auto" if args.model == "bundled" else "dummy"
    with DiffGenerator.from_pretrained(MODELS[args.model], load_format=load_format) as generator:
        rows = [row for prompt in args.prompts for row in bench_prompt(generator, prompt, args)]
    table = [asdict(row) for row in rows]
    print_table(table, omit=("stages", "prompt", "md5"))
    print_similarity(rows)
    print_attribution(rows, args)
    if args.json:
        merge_rows(args.json, table, key=("model", "arm", "prompt"))
    return 0


def bench_prompt(
    generator: "DiffGenerator", prompt: str, args: argparse.Namespace
) -> Iterator[GenerateRow]:
    """The arms of one prompt, then the first arm again."""
    measured = {arm: run_arm(generator, arm, prompt, args, args.runs) for arm in args.arms}
    again = run_arm(generator, args.arms[0], prompt, args, max(2, args.runs // 3))
    first = statistics.median(r.generation_time for r in measured[args.arms[0]][1:])
    drift = statistics.median(r.generation_time for r in again[1:]) / first - 1
    print(f"A/B/A: {args.arms[0]} again is {100 * drift:+.2f} % off", flush=True)
    lossless = measured.get("lossless")
    for arm, results in measured.items():
        yield make_row(args.model, arm, prompt, results, lossless)


def run_arm(
    generator: "DiffGenerator", arm: str, prompt: str, args: argparse.Namespace, runs: int
) -> list["GenerationResult"]:
    """`runs` pictures of one arm, one after another."""
    from sglang.kernels.ops.diffusion.bitexact_gate import fast_paths

    quality = "high" if arm == "high" else "lossless"
    asked = dict(prompt=prompt, seed=args.seed, num_inference_steps=args.steps, quality=quality)
    with fast_paths(arm != "eager"):
        results = [generator.generate(**asked, return_frames=True) for _ in range(runs)]
    denoise = [f"{r.report['stage_seconds']['DenoisingStage']:.3f}" for r in results]
    print(f"{args.model} {arm}: denoise {', '.join(denoise)} s", flush=True)
    return results


def make_row(
    model: str,
    arm: str,
    prompt: str,
    results: list["GenerationResult"],
    lossless: list["GenerationResult"] | None,
) -> GenerateRow:
    """Medians over all runs but the first."""
    counted = [r.report["stage_seconds"] for r in results[1:]]
    stages = {name: statistics.median(s[name] for s in counted) for name in counted[0]}
    psnr, ssim = similarity(results[0].frames, lossless[0].frames) if lossless else (None, None)
    return GenerateRow(
        model=model,
        arm=arm,
        prompt=prompt,
        runs=len(results),
        wall_s=statistics.median(r.generation_time for r in results[1:]),
        denoise_s=stages["DenoisingStage"],
        stages=stages,
        md5=[hashlib.md5(r.frames.tobytes()).hexdigest() for r in results],
        psnr_db=psnr,
        ssim=ssim,
        peak_memory_mb=max(r.peak_memory_mb for r in results),
    )


def similarity(image: "np.ndarray", reference: "np.ndarray") -> tuple[float | None, float]:
    """PSNR in dB (None for equal pixels) and SSIM of two uint8 [H, W, 3] pictures."""
    import numpy as np
    from skimage.metrics import peak_signal_noise_ratio, structural_similarity

    ssim = float(structural_similarity(reference, image, channel_axis=2))
    if np.array_equal(image, reference):
        return None, ssim
    return float(peak_signal_noise_ratio(reference, image)), ssim


def print_similarity(rows: list[GenerateRow]) -> None:
    """Mean PSNR and SSIM of the high tier over all prompts; equal pictures have no PSNR."""
    high = [row for row in rows if row.arm == "high" and row.ssim is not None]
    finite = [row.psnr_db for row in high if row.psnr_db is not None]
    if high:
        ssim = statistics.mean(row.ssim for row in high)
        psnr = f"{statistics.mean(finite):.2f} dB" if finite else "-"
        equal = len(high) - len(finite)
        print(f"high vs lossless: PSNR {psnr} over {len(finite)}, {equal} equal, SSIM {ssim:.4f}")


def print_attribution(rows: list[GenerateRow], args: argparse.Namespace) -> None:
    """Microbenchmark savings times site counts, beside the measured end-to-end difference."""
    arms = {row.arm: row for row in rows}
    if not {"eager", "lossless"} <= arms.keys() or args.model != "flux1-dev":
        return
    if not args.kernels.exists():
        print(f"no attribution: {args.kernels} does not exist; run benchmark/run_kernels.py first")
        return
    steps = args.steps or 50
    saved = dict(attributed_seconds(json.loads(args.kernels.read_text())["rows"], steps))
    for name, seconds in saved.items():
        print(f"{name:55} {seconds:8.3f} s")
    measured = arms["eager"].denoise_s - arms["lossless"].denoise_s
    print(
        f"attributed {sum(saved.values()):.3f} s, measured {measured:.3f} s of denoise time saved"
    )


def attributed_seconds(kernels: list[dict[str, Any]], steps: int) -> Iterator[tuple[str, float]]:
    """(op and shape, seconds saved in all steps) of each site kind found in kernels.json."""
    for row in kernels:
        sites = FLUX_SITES.get((row["op"], tuple(row["shape"])))
        if sites and row["dtype"] == "bfloat16":
            saved_us = row["eager_us"] - row["fused_us"]
            yield f"{row['op']} {row['shape']} x {sites}", steps * sites * saved_us / 1e6


if __name__ == "__main__":
    sys.exit(main())
