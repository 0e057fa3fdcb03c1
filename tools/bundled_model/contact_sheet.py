"""Arranges pictures in a labelled grid."""

import numpy as np
from PIL import Image, ImageDraw, ImageFont


def contact_sheet(
    pictures: list[np.ndarray], labels: list[str], columns: int, cell: int = 128
) -> Image.Image:
    """uint8 RGB pictures of any sizes -> one sheet; each scaled into a cell above its label."""
    font = ImageFont.load_default(size=11)
    rows = (len(pictures) + columns - 1) // columns
    pitch = cell + 12, cell + 34
    sheet = Image.new("RGB", (columns * pitch[0] + 12, rows * pitch[1] + 12), "#f3f4f6")
    pen = ImageDraw.Draw(sheet)
    for i, (picture, label) in enumerate(zip(pictures, labels, strict=True)):
        x, y = 12 + i % columns * pitch[0], 12 + i // columns * pitch[1]
        image = Image.fromarray(picture)
        image.thumbnail((cell, cell))
        sheet.paste(image, (x + (cell - image.width) // 2, y))
        lines = wrap(label, font, cell)
        pen.multiline_text(
            (x, y + cell + 2), "\n".join(lines[:2]), fill="#111", font=font, spacing=1
        )
    return sheet


def wrap(text: str, font: ImageFont.FreeTypeFont, width: int) -> list[str]:
    """Words in lines no wider than `width` pixels."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if font.getlength(longer) <= width or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines
