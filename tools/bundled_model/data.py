"""Builds the training data from Fluent Emoji Flat: work/data.npz and the reference images.

Needs node, and in work/npm the packages @iconify-json/fluent-emoji-flat and @resvg/resvg-js.
"""

import io
import json
import random
import re
import subprocess
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from PIL import Image
from recolour import COLOURS, RECOLOURED, dominant_family, fills, recoloured
from wording import COLOUR_WORDS, all_names

HERE = Path(__file__).resolve().parent
WORK = HERE / "work"
ICONS = WORK / "npm/node_modules/@iconify-json/fluent-emoji-flat/icons.json"
_SKIN = re.compile(r"-(dark|light|medium)(-|$)")

# (colour, noun) never trained: the compositional check; below, a pair and a background.
HELD_OUT_COLOURS = {
    ("blue", "heart"), ("green", "circle"), ("purple", "square"), ("red", "star"),
    ("green", "balloon"), ("purple", "apple"), ("pink", "car"), ("orange", "umbrella"),
    ("blue", "crown"), ("green", "cat"),
}  # fmt: skip
HELD_OUT_PAIR = ("dog", "car")
HELD_OUT_BACKGROUND = ("heart", "yellow")


@dataclass(frozen=True)
class Item:
    """One picture: an icon, or an icon in another colour."""

    icon: str
    names: list[str]  # without the colour word when `colour` is set
    colour: str | None
    base: int  # index of the uncoloured icon
    kind: str  # "base", "recolour" or "skin" (skin tones train the VAE only)
    trained: bool  # False: held out from the text-to-image training


def main() -> None:
    """Render everything and write work/data.npz, work/items.json and reference_32.npz."""
    bodies = {name: icon["body"] for name, icon in json.loads(ICONS.read_text())["icons"].items()}
    icons = sorted(name for name in bodies if not _SKIN.search(name))
    names = all_names(icons)
    base_png = render([svg(bodies[icon]) for icon in icons], "base")
    items = [base_item(i, icon, names[icon]) for i, icon in enumerate(icons)]
    recolours, recolour_bodies = recolour_items(icons, names, bodies, base_png)
    skins = sorted(name for name in bodies if _SKIN.search(name))
    chosen = sorted(random.Random(7).sample(skins, 400))
    skin_items = [Item(s, [], None, -1, "skin", False) for s in chosen]
    extra = [svg(b) for b in recolour_bodies] + [svg(bodies[s]) for s in chosen]
    png = base_png + render(extra, "extra")
    items += recolours + skin_items
    write(items, png)


def base_item(index: int, icon: str, names: list[str]) -> Item:
    """The icon as drawn; held out when its name is a held-out composition."""
    held = any(tuple(name.split(" ", 1)) in HELD_OUT_COLOURS for name in names)
    return Item(icon, names, None, index, "base", not held)


def recolour_items(
    icons: list[str], names: dict[str, list[str]], bodies: dict[str, str], png: list[bytes]
) -> tuple[list[Item], list[str]]:
    """The everyday objects in ten colours; a colour that an icon's own name says is left out."""
    taken = {name for values in names.values() for name in values}
    items, out = [], []
    for icon, noun in sorted(RECOLOURED.items()):
        if icon not in bodies:
            print(f"no such icon, left out: {icon}")
            continue
        index = icons.index(icon)
        dominant, family = dominant_family(fill_areas(bodies[icon], png[index]))
        nouns = colourless_names(noun, names[icon])
        words = {word for name in nouns for word in name.split()}
        blocked = {c for c, n in HELD_OUT_COLOURS if n in words}
        for colour in COLOURS:
            if colour in blocked or any(f"{colour} {n}" in taken for n in nouns):
                continue
            out.append(recoloured(bodies[icon], dominant, family, colour))
            items.append(Item(icon, nouns, colour, index, "recolour", True))
    return items, out


def colourless_names(noun: str, names: list[str]) -> list[str]:
    """The nouns that a colour word may stand before."""
    words = set(COLOUR_WORDS) | {"golden", "gold", "blue", "white"}
    plain = [n for n in names if not words & set(n.split())]
    return [noun] + [n for n in plain if n != noun]


def fill_areas(body: str, png: bytes) -> dict[str, float]:
    """Pixels of the rendered icon by fill colour (antialiased pixels count for none)."""
    rgba = np.asarray(Image.open(io.BytesIO(png)).convert("RGBA")).reshape(-1, 4)
    counts = Counter(map(tuple, rgba[rgba[:, 3] == 255][:, :3].tolist()))
    areas = {fill: float(counts.get(rgb(fill), 0)) for fill in fills(body)}
    return areas


def rgb(fill: str) -> tuple[int, int, int]:
    """'#abc' or '#aabbcc' -> (170, 187, 204)."""
    digits = fill[1:] if len(fill) == 7 else "".join(c * 2 for c in fill[1:])
    return int(digits[:2], 16), int(digits[2:4], 16), int(digits[4:], 16)


def svg(body: str) -> str:
    """The SVG document of an icon body."""
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32">{body}</svg>'


def render(documents: list[str], stem: str) -> list[bytes]:
    """SVG documents -> PNG files of 256x256 RGBA."""
    jobs, binary, offsets = (WORK / f"{stem}.{end}" for end in ("jobs.json", "bin", "offsets.json"))
    jobs.write_text(json.dumps(documents))
    subprocess.run(["node", HERE / "render.mjs", jobs, binary, offsets], check=True)
    blob, marks = binary.read_bytes(), json.loads(offsets.read_text())
    for path in (jobs, binary, offsets):
        path.unlink()
    return [blob[a:b] for a, b in zip(marks, marks[1:], strict=False)]


def write(items: list[Item], png: list[bytes]) -> None:
    """work/data.npz (lossless WebP files in one blob), work/items.json, reference_32.npz."""
    webp, small = [], []
    for data in png:
        image = Image.open(io.BytesIO(data)).convert("RGBA")
        buffer = io.BytesIO()
        image.save(buffer, "WEBP", lossless=True, method=2, quality=40)
        webp.append(buffer.getvalue())
        white = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        small.append(np.asarray(white.convert("RGB").resize((32, 32), Image.BOX)))
    offsets = np.cumsum([0] + [len(w) for w in webp])
    np.savez(WORK / "data.npz", blob=np.frombuffer(b"".join(webp), np.uint8), offsets=offsets)
    (WORK / "items.json").write_text(json.dumps([asdict(item) for item in items]))
    kept = [i for i, item in enumerate(items) if item.kind != "skin"]
    np.savez_compressed(
        HERE / "reference_32.npz",
        images=np.stack([small[i] for i in kept]),
        icon=np.array([items[i].icon for i in kept]),
        colour=np.array([items[i].colour or "" for i in kept]),
    )
    counts = Counter(item.kind for item in items)
    print(dict(counts), f"data.npz {offsets[-1] / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
