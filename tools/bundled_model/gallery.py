"""Draws the gallery with the bundled model: unseen compositions first, then plain names.

python tools/bundled_model/gallery.py --output docs/gallery.png
"""

import argparse
from pathlib import Path

import numpy as np
from contact_sheet import contact_sheet
from retrieval import load_list

from sglang.multimodal_gen import DiffGenerator

PLAIN = [
    "a rocket", "a butterfly", "a castle", "an octopus", "a birthday cake", "a unicorn",
    "a strawberry", "an astronaut", "a sailboat", "a robot", "a blue car", "a wizard",
]  # fmt: skip


def main() -> None:
    """One picture a prompt at the model's defaults."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=42)
    options = parser.parse_args()
    prompts = [row["caption"] for row in load_list("compositions_12")] + PLAIN
    with DiffGenerator.from_pretrained() as generator:
        results = generator.generate(prompt=prompts, seed=options.seed, save_output=False)
    pictures = [np.asarray(result.image.convert("RGB")) for result in results]
    options.output.parent.mkdir(parents=True, exist_ok=True)
    contact_sheet(pictures, prompts, columns=6).save(options.output, optimize=True)
    print(options.output)


if __name__ == "__main__":
    main()
