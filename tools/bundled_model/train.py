"""Trains the bundled model on one GPU within a wall-clock budget, measures it and packs it.

    python train.py --out OUT --deadline-seconds 600

OUT receives bundled_model.tar.N (pieces of one tar file), results.json, contact_sheet.png,
vae_sheet.png, vae.safetensors and train.log. Every 90 s of the second stage the pieces are
refreshed, so that a run that is cut short still leaves a model.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import torch  # noqa: E402
from clock import Stage, write_log  # noqa: E402
from dit_stage import MAIN, PEAK_RATE, Batch, DitTrainer, Pool, train_dit  # noqa: E402
from export import export_folder, load_parts, pack, round_to_bf16  # noqa: E402
from images import IconStore, compose  # noqa: E402
from model_config import (  # noqa: E402
    DEFAULTS,
    LATENT_CHANNELS,
    TextEncoders,
    count,
    make_transformer,
    make_vae,
)  # fmt: skip
from pool import TEXT_LENGTH, build_scenes, load_items, load_tokenizers, token_ids  # noqa: E402
from quick_eval import draw_sheets, measure_text, misses, reconstruction_sheet  # noqa: E402
from sampling import Model  # noqa: E402
from vae_stage import (  # noqa: E402
    VaeTrainer,
    encode,
    finish,
    measure,
    train_vae,
)  # fmt: skip

WORK = HERE / "work"
EVALUATION_RESERVE = 45.0  # seconds of the deadline kept for measuring and packing
QUICK_RESERVE = 20.0  # the same with --quick-eval


def parse() -> argparse.Namespace:
    """The options; see README.md for the command of the full run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=WORK / "out")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--deadline-seconds", type=float, default=600.0)
    parser.add_argument("--vae-seconds", type=float, default=200.0)
    parser.add_argument("--dit-seconds", type=float, help="default: what the deadline leaves")
    parser.add_argument("--vae-batch", type=int, default=128)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--captions", type=int, default=1_500_000)
    parser.add_argument("--store-size", type=int, default=256, help="256 except in smoke tests")
    parser.add_argument("--scene-limit", type=int, default=0, help="smoke tests only")
    parser.add_argument("--eval-limit", type=int, default=0, help="smoke tests only")
    parser.add_argument("--vae-from", type=Path, help="weights of an earlier VAE; skips its stage")
    parser.add_argument("--resume", type=Path, help="an exported folder to train on from")
    parser.add_argument("--peak-rate", type=float, default=PEAK_RATE, help="learning rate")
    parser.add_argument("--quick-eval", action="store_true", help="measure the two lists once")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--compile-backend", default="inductor")
    parser.add_argument("--warm-compile", action="store_true", help="internal: fill the caches")
    return parser.parse_args()


@dataclass
class Run:
    """What all stages share."""

    options: argparse.Namespace
    start: float = field(default_factory=time.monotonic)
    children: list[subprocess.Popen] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.device = torch.device(self.options.device)
        self.amp = self.device.type == "cuda"
        self.options.out.mkdir(parents=True, exist_ok=True)
        self.log_path = self.options.out / "train.log"
        self.flags = WORK / "flags"

    def log(self, text: str) -> None:
        """A line with the time since the start."""
        write_log(self.log_path, f"{time.monotonic() - self.start:6.1f} s  {text}")

    def ready(self, name: str) -> Callable[[], bool]:
        """Whether the compile helper has filled the cache for a stage, or has ended without."""
        if self.options.no_compile:
            return lambda: False
        helper = self.children[1]
        return lambda: (self.flags / name).exists() or helper.poll() is not None


def set_up_torch() -> None:
    """Fast and safe settings of the GPU libraries."""
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    # cuDNN attention's backward fails under inductor with torch 2.11.
    torch.backends.cuda.enable_cudnn_sdp(False)


def start_helpers(run: Run) -> Path:
    """Start the caption pool and, on a GPU, the process that fills the compiler's caches."""
    run.flags.mkdir(parents=True, exist_ok=True)
    for flag in run.flags.iterdir():
        flag.unlink()
    path = WORK / "pool.npz"
    path.unlink(missing_ok=True)
    workers = str(min(8, max(1, (os.cpu_count() or 2) - 6)))
    command = [sys.executable, HERE / "pool.py", "--out", path, "--workers", workers]
    command += ["--count", str(run.options.captions), "--scene-limit", str(run.options.scene_limit)]
    run.children.append(subprocess.Popen([str(c) for c in command]))
    if not run.options.no_compile:
        # The same arguments, so that the same graphs are compiled.
        again = [sys.executable, str(HERE / "train.py"), *sys.argv[1:], "--warm-compile"]
        run.children.append(subprocess.Popen(again))
    return path


def warm_compile(run: Run) -> None:
    """One compiled step of each stage on made-up data; the disk caches serve the main process."""
    for name, warm in (("vae", warm_vae), ("dit", warm_dit)):
        try:
            warm(run)
        except Exception as error:  # the main process then finds out by itself, and runs eagerly
            run.log(f"compile helper: {name} failed: {error!r:.600}")
            continue
        (run.flags / name).touch()
        run.log(f"compile helper: {name} kernels are cached")


def compiled_loss(run: Run, loss: torch.nn.Module) -> Callable:
    """The compiled form, the same in the helper and in the main process."""
    return torch.compile(loss, dynamic=False, backend=run.options.compile_backend)


def warm_vae(run: Run) -> None:
    """One compiled step of the first stage."""
    if run.options.vae_from:
        return
    vae = make_vae().to(run.device, memory_format=torch.channels_last)
    trainer = VaeTrainer(vae, run.options.vae_batch, run.amp)
    images = torch.rand(run.options.vae_batch, 3, 128, 128, device=run.device)
    trainer.step(images, compiled_loss(run, trainer.loss), 1e-6)


def warm_dit(run: Run) -> None:
    """One compiled step of the second stage."""
    options = run.options
    dit = DitTrainer(
        make_transformer().to(run.device), TextEncoders().to(run.device), options.batch, run.amp
    )
    tokens = torch.ones(options.batch, TEXT_LENGTH, dtype=torch.long, device=run.device)
    shape = (options.batch, MAIN[0] * MAIN[1] // 256, 4 * LATENT_CHANNELS)
    latents = torch.randn(shape, device=run.device).half()
    batch = Batch(latents, tokens, tokens.clone(), MAIN)
    dit.step(batch, compiled_loss(run, dit.loss), 1e-6)


def vae_part(run: Run, store: IconStore, scenes: torch.Tensor) -> tuple[torch.nn.Module, dict]:
    """Train (or load) the VAE, measure it, save it."""
    options = run.options
    vae = make_vae().to(run.device, memory_format=torch.channels_last)
    if options.vae_from:
        from safetensors.torch import load_file

        vae.load_state_dict(load_file(options.vae_from))
    else:
        trainer = VaeTrainer(vae, options.vae_batch, run.amp)
        stage = Stage("vae", options.vae_seconds, run.log_path)
        compiled = compiled_loss(run, trainer.loss)
        train_vae(trainer, store, stage, run.ready("vae"), compiled)
    vae.eval().requires_grad_(False)
    round_to_bf16(vae)
    figures = measure(vae, store, scenes[:1583], run.amp)
    finish(vae, figures, options.out / "vae.safetensors")
    run.log(f"VAE {count(vae) / 1e6:.2f} M parameters: {figures}")
    images = compose(store, scenes[:12], 128, 128)
    with torch.no_grad():
        reconstruction_sheet(images, vae.decoder(encode(vae, images)), options.out)
    return vae, figures


def wait_for(run: Run, path: Path) -> None:
    """Wait for the caption pool; raise when its process failed."""
    while not path.exists():
        code = run.children[0].poll()
        if code not in (None, 0):
            raise RuntimeError(f"pool.py ended with exit code {code}; see its output above")
        time.sleep(0.2)


def load_pool(run: Run, path: Path, tokenizers: tuple, vae: torch.nn.Module, store: IconStore,
              scenes: object) -> Pool:  # fmt: skip
    """Captions and latents on the device."""
    wait_for(run, path)
    empty = tuple(token_ids(t, [""])[0] for t in tokenizers)
    pool = Pool(str(path), empty, run.device)
    pool.encode(vae, store, scenes, run.amp)
    shapes = {size: tuple(table.shape) for size, table in pool.latents.items()}
    run.log(f"{len(pool.scene)} captions; latents {shapes}")
    return pool


def dit_part(run: Run, model: Model, pool: Pool) -> int:
    """Train the transformer and the text encoders; returns the steps done."""
    options = run.options
    trainer = DitTrainer(model.transformer, model.text, options.batch, run.amp)
    reserve = QUICK_RESERVE if options.quick_eval else EVALUATION_RESERVE
    left = options.deadline_seconds - reserve - (time.monotonic() - run.start)
    seconds = options.dit_seconds or max(10.0, left)
    parameters = {"transformer": count(model.transformer), "text": count(model.text)}
    run.log(f"transformer stage of {seconds:.0f} s, {parameters}")
    stage = Stage("dit", seconds, run.log_path)

    def checkpoint() -> None:
        size = export_folder(model, WORK / "bundled_model")
        pack(WORK / "bundled_model", options.out)
        stage.log(f"checkpoint, {size / 1e6:.2f} MB of weights")

    compiled = compiled_loss(run, trainer.loss)
    train_dit(trainer, pool, stage, options.peak_rate, run.ready("dit"), compiled, checkpoint)
    return stage.step


def main() -> None:
    """The whole run."""
    run = Run(parse())
    set_up_torch()
    if run.options.warm_compile:
        return warm_compile(run)
    pool_path = start_helpers(run)
    try:
        train(run, pool_path)
    finally:
        for child in run.children:
            if child.poll() is None:
                child.terminate()


def train(run: Run, pool_path: Path) -> None:
    """Both stages, then the measurements."""
    options = run.options
    scenes = build_scenes(load_items(), options.scene_limit)
    store = IconStore(WORK / "data.npz", run.device, options.store_size)
    table = torch.from_numpy(scenes.table).to(run.device)
    run.log(f"{len(store)} icons, {len(table)} scenes on {run.device}")
    vae, figures = vae_part(run, store, table)
    transformer, text = make_transformer(), TextEncoders()
    if options.resume:
        load_parts(options.resume, transformer, text)
    transformer, text = transformer.to(run.device), text.to(run.device)
    model = Model(vae, transformer, text, *load_tokenizers(), amp=run.amp)
    pool = load_pool(run, pool_path, (model.clip_tokenizer, model.t5_tokenizer), vae, store, scenes)
    steps = dit_part(run, model, pool)
    report(run, model, figures, steps)


def report(run: Run, model: Model, figures: dict, steps: int) -> None:
    """Round to bf16, export, pack, measure; each part is on disk before the next begins."""
    options = run.options
    for part in (model.transformer, model.text):
        part.eval()
        round_to_bf16(part)
    size = export_folder(model, WORK / "bundled_model")
    pieces = pack(WORK / "bundled_model", options.out)
    run.log(f"exported {size / 1e6:.3f} MB of weights in {len(pieces)} pieces")
    results = {"weights_bytes": size, "vae": figures, "steps": steps, "defaults": DEFAULTS}
    results |= {"parameters": {
        "transformer": count(model.transformer), "vae": count(model.vae),
        "text_encoder": count(model.text.clip), "text_encoder_2": count(model.text.t5),
    }}  # fmt: skip
    write_results(options.out, results)
    draw_sheets(model, options.out)
    run.log("contact sheet drawn")

    def save(figures: dict) -> None:
        results["top1"] = figures
        write_results(options.out, results)

    measure_text(model, options.eval_limit, save, quick=options.quick_eval)
    results["phrasing_misses"] = misses(model, options.eval_limit)
    results["seconds"] = round(time.monotonic() - run.start, 1)
    write_results(options.out, results)
    run.log(json.dumps(results, indent=1))


def write_results(out: Path, results: dict) -> None:
    """results.json."""
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
