"""Scenes (what is drawn) and the pool of tokenised captions that point to them.

Run as a script it writes the pool for `train.py`: python pool.py --out pool.npz --count 1500000
"""

import argparse
import json
import os
import random
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from data import HELD_OUT_BACKGROUND, HELD_OUT_PAIR
from recolour import BACKGROUNDS
from wording import background_caption, caption, pair_caption

WORK = Path(__file__).resolve().parent / "work"
TEXT_LENGTH = 48  # tokens of both encoders in training; also the default of the pipeline
BACKGROUND_NAMES = list(BACKGROUNDS)
# Share of the pool: plain icons, recoloured ones, coloured backgrounds, two objects.
SHARES = {"base": 0.62, "recolour": 0.20, "background": 0.11, "pair": 0.07}
PAIRS = 16000
COLOURLESS = 0.20  # recoloured objects whose caption leaves the colour to the seed


@dataclass(frozen=True)
class Scenes:
    """Columns (item, background or -1, second item or -1), and the row range of each share."""

    table: np.ndarray  # int32 [N, 3]
    ranges: dict[str, tuple[int, int]]


def load_items() -> list[dict]:
    """The items that data.py wrote, in order."""
    return json.loads((WORK / "items.json").read_text())


def build_scenes(items: list[dict], limit: int = 0) -> Scenes:
    """The fixed list of scenes, the same on every machine; `limit` a group in smoke tests."""
    rng = random.Random(11)
    bases = [i for i, x in enumerate(items) if x["kind"] == "base" and x["trained"]]
    recolours = [i for i, x in enumerate(items) if x["kind"] == "recolour" and x["trained"]]
    backed = [(i, b) for i in bases for b in rng.sample(range(len(BACKGROUNDS)), 4)]
    backed += [(i, rng.randrange(len(BACKGROUNDS))) for i in recolours]
    backed = [(i, b) for i, b in backed if not held_background(items[i], b)]
    recoloured_bases = sorted({items[i]["base"] for i in recolours})
    groups = {
        "base": [(i, -1, -1) for i in bases],
        "recolour": [(i, -1, -1) for i in recolours],
        "background": [(i, b, -1) for i, b in backed],
        "pair": [draw_pair(items, recoloured_bases, recolours, rng) for _ in range(PAIRS)],
    }
    rows, ranges = [], {}
    for name, group in groups.items():
        group = group[:limit] if limit else group
        ranges[name] = (len(rows), len(rows) + len(group))
        rows += group
    return Scenes(np.array(rows, np.int32), ranges)


def held_background(item: dict, background: int) -> bool:
    """True for the composition that is kept for the test."""
    noun, colour = HELD_OUT_BACKGROUND
    return noun in item["names"] and BACKGROUND_NAMES[background] == colour


def draw_pair(
    items: list[dict], bases: list[int], recolours: list[int], rng: random.Random
) -> tuple[int, int, int]:
    """Two different objects, never the held-out pair."""
    while True:
        left, right = (rng.choice(recolours if rng.random() < 0.4 else bases) for _ in range(2))
        words = [set(" ".join(items[i]["names"]).split()) for i in (left, right)]
        held = all(any(noun in w for w in words) for noun in HELD_OUT_PAIR)
        if items[left]["base"] != items[right]["base"] and not held:
            return left, -1, right


def scene_caption(items: list[dict], row: np.ndarray, rng: random.Random) -> str:
    """A caption for one scene."""
    item, background, second = (int(v) for v in row)
    if second >= 0:
        return pair_caption(spoken(items[item], rng), spoken(items[second], rng), rng)
    names, colour = items[item]["names"], items[item]["colour"]
    if background >= 0:
        return background_caption(names, colour, BACKGROUND_NAMES[background], rng)
    if colour and rng.random() < COLOURLESS:
        colour = None
    return caption(names, colour, rng)


def spoken(item: dict, rng: random.Random) -> str:
    """'blue car', 'car'."""
    names = item["names"]
    name = names[0] if rng.random() < 0.6 else rng.choice(names)
    return f"{item['colour']} {name}" if item["colour"] else name


def draw_captions(items: list[dict], scenes: Scenes, count: int, seed: int) -> tuple[list, list]:
    """`count` (scene index, caption) draws, as two lists."""
    rng = random.Random(seed)
    kinds = rng.choices(list(SHARES), weights=list(SHARES.values()), k=count)
    indices = [rng.randrange(*scenes.ranges[kind]) for kind in kinds]
    return indices, [scene_caption(items, scenes.table[i], rng) for i in indices]


def token_ids(tokenizer: object, texts: list[str], length: int = TEXT_LENGTH) -> np.ndarray:
    """Padded ids, uint16 [len(texts), length]."""
    batch = tokenizer(texts, padding="max_length", max_length=length, truncation=True)
    return np.array(batch["input_ids"], np.uint16)


def load_tokenizers() -> tuple[object, object]:
    """The CLIP and the T5 tokenizer that tokenizers.py made."""
    from transformers import CLIPTokenizer, T5TokenizerFast

    return (
        CLIPTokenizer.from_pretrained(WORK / "tokenizer"),
        T5TokenizerFast.from_pretrained(WORK / "tokenizer_2"),
    )


def make_shard(job: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(count, seed, scene limit) -> scene indices, CLIP ids, T5 ids."""
    count, seed, limit = job
    items = load_items()
    indices, texts = draw_captions(items, build_scenes(items, limit), count, seed)
    clip, t5 = load_tokenizers()
    return np.array(indices, np.int32), token_ids(clip, texts), token_ids(t5, texts)


def main() -> None:
    """Write the pool."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=1_500_000)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 4))
    parser.add_argument("--scene-limit", type=int, default=0)
    options = parser.parse_args()
    start = time.monotonic()
    shards = 4 * options.workers
    jobs = [(options.count // shards, 1000 + s, options.scene_limit) for s in range(shards)]
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as executor:
        parts = list(executor.map(make_shard, jobs))
    scene, clip, t5 = (np.concatenate(column) for column in zip(*parts, strict=True))
    partial = options.out.with_suffix(".partial.npz")
    np.savez(partial, scene=scene, clip=clip, t5=t5)
    partial.rename(options.out)  # appears whole or not at all
    print(f"pool: {len(scene)} captions in {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
