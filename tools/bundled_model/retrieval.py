"""Nearest training picture by L2 on 32x32 RGB, over every icon and every recoloured icon."""

import json
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent


class Reference:
    """The shipped 32x32 training pictures."""

    def __init__(self) -> None:
        archive = np.load(HERE / "reference_32.npz")
        self.icons = archive["icon"]
        images = archive["images"].reshape(len(self.icons), -1).astype(np.float32) / 255
        self.images, self.norms = images, (images**2).sum(1)

    def nearest(self, pictures: np.ndarray) -> list[str]:
        """RGB in 0..1, float [B, H, W, 3] with H = W a multiple of 32 -> the nearest icon ids."""
        small = box_32(pictures).reshape(len(pictures), -1).astype(np.float32)
        distances = self.norms[None] - 2 * small @ self.images.T
        return [str(self.icons[i]) for i in distances.argmin(1)]


def box_32(pictures: np.ndarray) -> np.ndarray:
    """Mean over equal boxes down to 32x32."""
    count, height, width, _ = pictures.shape
    if height % 32 or width % 32:
        raise ValueError(f"got {width}x{height} pictures, expected sides that 32 divides")
    boxes = pictures.reshape(count, 32, height // 32, 32, width // 32, 3)
    return boxes.mean(axis=(2, 4))


def load_list(name: str) -> list[dict[str, str]]:
    """One of the fixed lists, by stem."""
    return json.loads((HERE / f"{name}.json").read_text())
