"""The icons as tensors on the device, and the pictures composed from them."""

import io
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from recolour import BACKGROUNDS, oklab

WHITE = 1.0


def background_colours(device: torch.device) -> torch.Tensor:
    """The named backgrounds, RGB in 0..1, float32 [N, 3]."""
    values = [[int(c[i : i + 2], 16) / 255 for i in (1, 3, 5)] for c in BACKGROUNDS.values()]
    assert all(0 < oklab(c)[0] < 1 for c in BACKGROUNDS.values()), "backgrounds are hex colours"
    return torch.tensor(values, device=device)


class IconStore:
    """All icons, alpha-premultiplied RGBA uint8 [N, 4, S, S], at full and at half size."""

    def __init__(self, path: Path, device: torch.device, size: int = 256) -> None:
        archive = np.load(path)
        blob, offsets = archive["blob"].tobytes(), archive["offsets"]

        def decode(index: int) -> np.ndarray:
            data = io.BytesIO(blob[offsets[index] : offsets[index + 1]])
            image = Image.open(data).convert("RGBA")
            if size != image.size[0]:
                image = image.resize((size, size), Image.BOX)
            rgba = np.asarray(image).astype(np.uint16)
            rgba[..., :3] = (rgba[..., :3] * rgba[..., 3:] + 127) // 255
            return rgba.astype(np.uint8).transpose(2, 0, 1)

        with ThreadPoolExecutor(8) as threads:
            icons = np.stack(list(threads.map(decode, range(len(offsets) - 1))))
        self.full = torch.from_numpy(icons).to(device)
        self.half = torch.cat([half_size(part) for part in self.full.split(256)])
        self.device = device
        self.backgrounds = background_colours(device)

    def __len__(self) -> int:
        return len(self.full)

    def square(self, index: torch.Tensor, side: int) -> torch.Tensor:
        """Icons resized to side x side, premultiplied RGBA float32 in 0..1 [B, 4, side, side]."""
        source = self.half if self.half.shape[-1] >= side else self.full
        icons = source[index].float() / 255
        if icons.shape[-1] == side:
            return icons
        return F.interpolate(icons, (side, side), mode="bilinear", antialias=True)


def half_size(icons: torch.Tensor) -> torch.Tensor:
    """Exact 2x2 mean of uint8 icons."""
    return F.avg_pool2d(icons.float(), 2).round().to(torch.uint8)


def over(icons: torch.Tensor, colour: torch.Tensor) -> torch.Tensor:
    """Premultiplied RGBA over RGB [B, 3] -> RGB in -1..1."""
    rgb = icons[:, :3] + (1 - icons[:, 3:]) * colour[:, :, None, None]
    return rgb * 2 - 1


def compose(store: IconStore, scenes: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Scene rows (item, background, second) [B, 3] -> pictures in -1..1, [B, 3, height, width].

    One icon fills the shorter side, centred; two icons stand side by side at half that size.
    """
    side = min(height, width)
    canvas = torch.zeros(len(scenes), 4, height, width, device=store.device)
    pair = scenes[:, 2] >= 0
    if bool((~pair).any()):
        paste(canvas, ~pair, store.square(scenes[~pair, 0], side), width // 2)
    if bool(pair.any()):
        small = side // 2
        paste(canvas, pair, store.square(scenes[pair, 0], small), width // 2 - small // 2)
        paste(canvas, pair, store.square(scenes[pair, 2], small), width // 2 + small // 2)
    white = torch.full((len(scenes), 3), WHITE, device=store.device)
    backed = scenes[:, 1:2] >= 0
    colour = torch.where(backed, store.backgrounds[scenes[:, 1].clamp_min(0)], white)
    return over(canvas, colour)


def paste(canvas: torch.Tensor, rows: torch.Tensor, icons: torch.Tensor, centre: int) -> None:
    """Write icons into the chosen canvas rows, centred at column `centre` and half height."""
    side = icons.shape[-1]
    top, left = canvas.shape[-2] // 2 - side // 2, centre - side // 2
    canvas[rows, :, top : top + side, left : left + side] = icons


def augmented(store: IconStore, count: int, size: int) -> torch.Tensor:
    """Training pictures for the VAE, in -1..1, [count, 3, size, size].

    60 % exact icons, 25 % zoomed, shifted and flipped, 15 % two icons; half on a colour; some with
    their channels permuted.
    """
    device = store.device
    exact, moved = int(count * 0.60), int(count * 0.25)
    index = torch.randint(len(store), (count,), device=device)
    parts = [store.square(index[:exact], size), zoomed(store, index[exact : exact + moved], size)]
    left = index[exact + moved :]
    canvas = torch.zeros(len(left), 4, size, size, device=device)
    rows = torch.ones(len(left), dtype=torch.bool, device=device)
    right = torch.randint(len(store), (len(left),), device=device)
    paste(canvas, rows, store.square(left, size // 2), size // 4)
    paste(canvas, rows, store.square(right, size // 2), size - size // 4)
    icons = torch.cat([*parts, canvas])
    named = store.backgrounds[torch.randint(len(store.backgrounds), (count,), device=device)]
    free = torch.rand(count, 3, device=device)
    roll = torch.rand(count, 1, device=device)
    colour = torch.where(roll < 0.5, torch.ones_like(free), torch.where(roll < 0.85, named, free))
    images = over(icons, colour)
    permuted = images[:, torch.randperm(3, device=device)]
    return torch.where(torch.rand(count, 1, 1, 1, device=device) < 0.12, permuted, images)


def zoomed(store: IconStore, index: torch.Tensor, size: int) -> torch.Tensor:
    """Icons with zoom 0.7-1.3, shifts of up to 10 % and random flips."""
    count = len(index)
    zoom = torch.empty(count, device=store.device).uniform_(0.7, 1.3).reciprocal()
    flip = torch.where(torch.rand(count, device=store.device) < 0.5, -1.0, 1.0)
    shift = torch.empty(count, 2, device=store.device).uniform_(-0.2, 0.2)
    theta = torch.zeros(count, 2, 3, device=store.device)
    theta[:, 0, 0], theta[:, 1, 1], theta[:, :, 2] = zoom * flip, zoom, shift
    grid = F.affine_grid(theta, (count, 4, size, size), align_corners=False)
    return F.grid_sample(store.full[index].float() / 255, grid, align_corners=False)
