"""Measures the trained model right after training, in batches on the training device."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from contact_sheet import contact_sheet
from retrieval import Reference, load_list
from sampling import Model, sample

PLAIN = [
    "a dog", "a cat", "an apple", "pizza", "a rocket", "a castle", "a butterfly", "a guitar",
    "a red apple", "grinning face", "a robot", "an astronaut", "a strawberry", "fire",
    "a sailboat", "an octopus", "a blue car", "a purple tent", "a birthday cake", "a unicorn",
    "sunflower", "a bicycle", "an alarm clock", "a wizard",
]  # fmt: skip
WILD = [
    "please show me a puppy", "TWO HEARTS!!", "a kitten on a blue background", "red umbrela",
    "a banana and a crown", "a green robot next to a pink cup", "a yellow elephant, 4k",
    "i want a beautiful tree, thanks",
]  # fmt: skip
SIZES = [(64, 64), (96, 96), (192, 192), (256, 256), (128, 192), (192, 128)]


def top1(model: Model, name: str, limit: int, **options: float) -> float:
    """Share of a fixed list whose picture is nearest to its own icon."""
    rows = load_list(name)
    rows = rows[:: max(1, len(rows) // limit)] if limit else rows
    seeds = [100 + i for i in range(len(rows))]
    pictures = sample(model, [r["caption"] for r in rows], seeds, **options)
    found = Reference().nearest(pictures.permute(0, 2, 3, 1).numpy())
    return float(np.mean([f == r["icon"] for f, r in zip(found, rows, strict=True)]))


def measure_text(
    model: Model, limit: int, save: Callable[[dict], None], *, quick: bool = False
) -> None:
    """Top-1 of both lists over guidance, steps, text lengths and sizes; saves after each."""
    some = limit or 100
    runs: list[tuple[str, str, int, dict]] = []
    for cfg in (2.5, 1.0, 2.0, 3.0, 4.0):
        for name in ("captions_200", "phrasings_20x20"):
            runs.append((f"{name} cfg {cfg:g}", name, limit, {"cfg": cfg}))
    for steps in (4, 8, 12):
        runs.append((f"captions_200 steps {steps}", "captions_200", limit, {"steps": steps}))
    for length in (64, 128, 512):
        runs.append((f"captions_200 text {length}", "captions_200", some, {"length": length}))
    for side in (64, 192, 256):
        options = {"size": (side, side), "chunk": 64}
        runs.append((f"captions_200 size {side}", "captions_200", some, options))
    figures: dict[str, float] = {}
    runs = runs[:2] if quick else runs
    for label, name, count, options in runs:
        figures[label] = top1(model, name, count, **options)
        save(figures)


def misses(model: Model, limit: int = 0) -> list[str]:
    """'caption -> icon found' of the phrasing list at the default settings."""
    rows = load_list("phrasings_20x20")
    rows = rows[:: max(1, len(rows) // limit)] if limit else rows
    pictures = sample(model, [r["caption"] for r in rows], list(range(len(rows))))
    found = Reference().nearest(pictures.permute(0, 2, 3, 1).numpy())
    return [f"{r['caption']} -> {f}" for f, r in zip(found, rows, strict=True) if f != r["icon"]]


def as_bytes(pictures: torch.Tensor) -> list[np.ndarray]:
    """Pictures in 0..1 -> uint8 [H, W, 3] arrays."""
    return list((pictures * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy())


def draw_sheets(model: Model, out: Path) -> None:
    """contact_sheet.png: compositions, plain names, free wording, seeds and sizes."""
    compositions = [row["caption"] for row in load_list("compositions_12")]
    texts = compositions + PLAIN + WILD
    pictures = as_bytes(sample(model, texts, [42] * len(texts)))
    labels = list(texts)
    pictures += as_bytes(sample(model, ["a car", "an umbrella"] * 6, list(range(12))))
    labels += [f"{('a car', 'an umbrella')[i % 2]} (seed {i})" for i in range(12)]
    for size in SIZES:
        pair = ["a red apple", "a castle"]
        pictures += as_bytes(sample(model, pair, [42, 42], size=size))
        labels += [f"{text} {size[1]}x{size[0]}" for text in pair]
    contact_sheet(pictures, labels, columns=12, cell=128).save(out / "contact_sheet.png")


def reconstruction_sheet(images: torch.Tensor, made: torch.Tensor, out: Path) -> None:
    """vae_sheet.png: originals above their reconstructions."""
    both = as_bytes((torch.cat([images, made]).float().cpu() / 2 + 0.5).clamp(0, 1))
    contact_sheet(both, [""] * len(both), columns=len(images)).save(out / "vae_sheet.png")
