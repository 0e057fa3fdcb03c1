"""Measures the bundled model through the product's own API (CPU is enough).

    python tools/bundled_model/evaluate.py [--limit 40] [--output results.json]

Exit code 1 when a list is under its floor.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
from retrieval import Reference, load_list

from sglang.multimodal_gen import DiffGenerator

FLOORS = {"captions_200": 0.98, "phrasings_20x20": 0.90}


def main() -> None:
    """Both lists, one line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=int, default=0, help="rows of each list; 0 = all")
    parser.add_argument("--model-path", help="default: the bundled model")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    figures = {}
    with DiffGenerator.from_pretrained(model_path=options.model_path) as generator:
        for name in FLOORS:
            figures[name] = measure(generator, name, options.limit)
            print(json.dumps({name: figures[name]}, indent=1), flush=True)
    if options.output:
        options.output.write_text(json.dumps(figures, indent=1) + "\n")
    if any(figures[name]["top1"] < floor for name, floor in FLOORS.items()):
        raise SystemExit(1)


def measure(generator: DiffGenerator, name: str, limit: int) -> dict:
    """Top-1 retrieval of one list; row i is made with seed 100 + i."""
    rows = load_list(name)
    picked = range(0, len(rows), max(1, len(rows) // limit) if limit else 1)
    start = time.monotonic()
    pictures = []
    for i in picked:
        result = generator.generate(
            prompt=rows[i]["caption"], seed=100 + i, width=128, height=128, save_output=False
        )
        pictures.append(np.asarray(result.image.convert("RGB"), np.float32) / 255)
    seconds = time.monotonic() - start
    found = Reference().nearest(np.stack(pictures))
    wrong = [
        f"{rows[i]['caption']} -> {icon}"
        for i, icon in zip(picked, found, strict=True)
        if icon != rows[i]["icon"]
    ]
    return {
        "top1": 1 - len(wrong) / len(found),
        "pictures": len(found),
        "seconds_a_picture": round(seconds / len(found), 3),
        "wrong": wrong,
    }


if __name__ == "__main__":
    main()
