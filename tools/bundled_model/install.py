"""Turns the training output into the shipped folder: joins the pieces, checks, writes the card.

    python tools/bundled_model/install.py FOLDER

FOLDER holds bundled_model.tar.0, .1, ... and results.json as train.py wrote them.
"""

import argparse
import io
import json
import shutil
import tarfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
TARGET = HERE.parents[1] / "python/sglang/multimodal_gen/bundled_model"
LICENCE = "LICENSE-fluent-emoji.txt"
LIMIT_BYTES = 24_000_000
CFG_CHOICES = (2.5, 2.0, 3.0, 1.0, 4.0)  # the first of equals wins
EXPECTED = [
    "model_index.json", "scheduler/scheduler_config.json", "transformer/config.json",
    "vae/config.json", "text_encoder/config.json", "text_encoder_2/config.json",
    "tokenizer/tokenizer.json", "tokenizer_2/tokenizer.json",
]  # fmt: skip


def main() -> None:
    """Install and describe the model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--target", type=Path, default=TARGET)
    parser.add_argument("--true-cfg-scale", type=float, help="default: the best measured one")
    options = parser.parse_args()
    results = json.loads((options.folder / "results.json").read_text())
    extract(options.folder, options.target)
    check(options.target)
    cfg = options.true_cfg_scale or best_cfg(results.get("top1", {}))
    set_default_cfg(options.target, cfg)
    (options.target / "README.md").write_text(card(results, cfg))
    shutil.copy(HERE / LICENCE, options.target / LICENCE)
    total = sum(f.stat().st_size for f in options.target.rglob("*") if f.is_file())
    print(f"{options.target}: {total / 1e6:.2f} MB, true_cfg_scale {cfg:g}")


def extract(folder: Path, target: Path) -> None:
    """Join the pieces in order and unpack them in place of `target`."""
    pieces = sorted(folder.glob("bundled_model.tar.*"), key=lambda p: int(p.suffix[1:]))
    if not pieces:
        raise SystemExit(f"{folder} has no bundled_model.tar.N; copy train.py's output there")
    data = b"".join(piece.read_bytes() for piece in pieces)
    unpacked = target.with_name(target.name + ".unpacked")
    shutil.rmtree(unpacked, ignore_errors=True)
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        tar.extractall(unpacked, filter="data")
    shutil.rmtree(target, ignore_errors=True)
    (unpacked / "bundled_model").rename(target)
    unpacked.rmdir()


def check(target: Path) -> None:
    """All files present, weights within the limit and finite."""
    missing = [name for name in EXPECTED if not (target / name).is_file()]
    if missing:
        raise SystemExit(f"{target} lacks {', '.join(missing)}")
    weights = list(target.rglob("*.safetensors"))
    size = sum(path.stat().st_size for path in weights)
    if len(weights) < 4 or size > LIMIT_BYTES:
        raise SystemExit(
            f"{len(weights)} weight files of {size} bytes, expected >= 4 files and "
            f"<= {LIMIT_BYTES} bytes"
        )
    from safetensors.torch import load_file

    for path in weights:
        bad = [name for name, tensor in load_file(path).items() if not tensor.isfinite().all()]
        if bad:
            raise SystemExit(f"{path}: values that are not finite in {', '.join(bad)}")
    for path in target.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)


def best_cfg(top1: dict[str, float]) -> float:
    """The guidance with the highest sum over both lists."""

    def score(cfg: float) -> float:
        return sum(v for k, v in top1.items() if k.endswith(f" cfg {cfg:g}"))

    return max(CFG_CHOICES, key=score)


def set_default_cfg(target: Path, cfg: float) -> None:
    """Record the default in model_index.json."""
    path = target / "model_index.json"
    index = json.loads(path.read_text())
    index["_sglang_defaults"]["true_cfg_scale"] = cfg
    path.write_text(json.dumps(index, indent=2) + "\n")


def card(results: dict, cfg: float) -> str:
    """The model card, with the measured figures."""
    megabytes = results["weights_bytes"] / 1e6
    parts = results["parameters"]
    top1 = results.get("top1", {})
    rows = "\n".join(f"| {name} | {value:.1%} |" for name, value in top1.items())
    sizes = "\n".join(f"| {name} | {value / 1e6:.2f} M |" for name, value in parts.items())
    return f"""---
license: mit
pipeline_tag: text-to-image
---
# Bundled model: flat icons from a few words

A tiny text-to-image model in the architecture of FLUX.1 (`FluxTransformer2DModel`,
`AutoencoderKL`, CLIP and T5 text encoders, flow-match Euler), {megabytes:.1f} MB of weights in
bf16.
It is the default when no model path is given, and the end-to-end test fixture.

| part | parameters |
| --- | --- |
{sizes}

Defaults: 128x128, 20 steps, true CFG {cfg:g} against the empty prompt, 48 text tokens (the key
`_sglang_defaults` of `model_index.json`). With diffusers, pass them to `FluxPipeline` yourself.

## Data and licence
Trained from scratch on Microsoft's Fluent Emoji, flat style (MIT licence, (c) Microsoft
Corporation), as packaged by Iconify: 1583 of its 1586 base icons, about 340 everyday objects
recoloured into ten named colours, coloured backgrounds, and pairs of objects side by side. The
captions are generated from the icons' names, a hand-written table of synonyms and templates. No
other images or texts were used. The weights are under the MIT licence too. How it is made:
`tools/bundled_model/`.

## What it can do
The things that the emoji set knows, by their names or common synonyms, in ordinary wording; a
named colour on an everyday object ("a purple apple"); a background colour. Pictures are made for
128x128; other sizes from 64x64 to 256x256 keep the object but distort its shape.

## What it cannot do
Two objects in one picture (both come out small and blurred), anything outside the set,
photographs, scenes, counting, spatial relations, readable text, fine detail, languages other than
English. Unknown words give a random or blended icon. More than 48 text tokens are cut.

## Measured
VAE reconstruction {results["vae"]["psnr"]:.1f} dB (worst percent
{results["vae"]["psnr_worst_percent"]:.1f} dB). Share of generated pictures whose nearest training
picture (L2 on 32x32 RGB, over every icon and recoloured icon) is of the icon asked for, after a
last run of {results["steps"]} training steps; `captions_200` are training captions,
`phrasings_20x20` are 20 ordinary phrasings (about half of them not among the training templates)
of 20 names (half of them synonyms):

| list and settings | right |
| --- | --- |
{rows}
"""


if __name__ == "__main__":
    main()
