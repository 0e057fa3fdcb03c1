"""Writes the fixed test lists: captions_200.json, phrasings_20x20.json, compositions_12.json."""

import json
import random
from pathlib import Path

from pool import load_items
from wording import with_article

HERE = Path(__file__).resolve().parent

CAPTIONS = [
    "{n}", "{p}", "{n} emoji", "{p} on a white background", "an icon of {p}", "a picture of {p}",
    "draw {p}", "please show me {p}", "{p}!", "a drawing of {p}",
]  # fmt: skip

# Some of these are among the training templates, about half of them are not.
PHRASINGS = [
    "please show me {p}", "{n}!!", "I want {n}", "can you draw {p}?", "{n}, please.", "Draw me {p}",
    "A PICTURE OF {P}", "i would like to see {p}...", "{n} emoji",
    "Could you make an image of {p} for me?", "show me the {n}", "{P}.", "hello, one {n} please",
    "{n} icon on white", "what does {p} look like?", "A Cute {N}", "paint {p} for my daughter",
    "just a simple {n}", "I NEED {P} NOW", "hey there, {p} thanks :)",
]  # fmt: skip
# The second column is the icon that the name must bring; half of the names are synonyms.
NAMES = {
    "umbrella": "umbrella", "elephant": "elephant", "pizza": "pizza", "rocket": "rocket",
    "guitar": "guitar", "castle": "castle", "penguin": "penguin", "strawberry": "strawberry",
    "candle": "candle", "robot": "robot", "puppy": "dog-face", "kitty": "cat-face",
    "car": "automobile", "plane": "airplane", "burger": "hamburger", "bike": "bicycle",
    "bunny": "rabbit-face", "donut": "doughnut", "tv": "television", "flower": "blossom",
}  # fmt: skip
COMPOSITIONS = [
    "a blue heart", "a green circle", "a purple square", "a red star", "a green balloon",
    "a purple apple", "a pink car", "an orange umbrella", "a blue crown", "a green cat",
    "a red heart on a yellow background", "a dog and a car",
]  # fmt: skip


def fill(template: str, name: str) -> str:
    """{n} name, {p} with its article, capitals for upper-case fields."""
    phrase = f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
    return template.format(n=name, p=phrase, N=name.title(), P=phrase.upper())


def captions() -> list[dict[str, str]]:
    """200 icons drawn from the trained ones, each in one trained template."""
    rng = random.Random(200)
    items = [x for x in load_items() if x["kind"] == "base" and x["trained"]]
    rows = []
    for item in rng.sample(items, 200):
        name = item["names"][0]
        phrase = with_article(name, random.Random(0)) if name.endswith("s") else None
        template = rng.choice(CAPTIONS)
        text = template.format(n=name, p=phrase or fill("{p}", name))
        rows.append({"caption": text, "icon": item["icon"]})
    return rows


def phrasings() -> list[dict[str, str]]:
    """20 phrasings x 20 names."""
    return [
        {"caption": fill(template, name), "icon": icon, "phrasing": template, "name": name}
        for template in PHRASINGS
        for name, icon in NAMES.items()
    ]


def main() -> None:
    """Write the three files."""
    rows = {
        "captions_200": captions(),
        "phrasings_20x20": phrasings(),
        "compositions_12": [{"caption": text} for text in COMPOSITIONS],
    }
    for name, content in rows.items():
        lines = ",\n".join("  " + json.dumps(row) for row in content)
        (HERE / f"{name}.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
