"""FLUX's latent conventions, and the table of pre-computed latents."""

import torch
from diffusers import AutoencoderKL
from images import IconStore, compose
from vae_stage import encode


def pack(latents: torch.Tensor) -> torch.Tensor:
    """[B, C, H, W] -> 2x2 patches [B, H/2 * W/2, C * 4]."""
    b, c, h, w = latents.shape
    grid = latents.view(b, c, h // 2, 2, w // 2, 2)
    return grid.permute(0, 2, 4, 1, 3, 5).reshape(b, (h // 2) * (w // 2), c * 4)


def unpack(patches: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """The inverse of `pack` for a picture of height x width pixels."""
    b, _, width4 = patches.shape
    h, w = height // 16, width // 16
    grid = patches.view(b, h, w, width4 // 4, 2, 2)
    return grid.permute(0, 3, 1, 4, 2, 5).reshape(b, width4 // 4, h * 2, w * 2)


def position_ids(height: int, width: int, device: torch.device) -> torch.Tensor:
    """(0, row, column) of each patch, float32 [H/16 * W/16, 3]."""
    h, w = height // 16, width // 16
    ids = torch.zeros(h, w, 3, device=device)
    ids[..., 1] = torch.arange(h, device=device)[:, None]
    ids[..., 2] = torch.arange(w, device=device)[None, :]
    return ids.reshape(h * w, 3)


@torch.no_grad()
def encode_scenes(
    vae: AutoencoderKL, store: IconStore, scenes: torch.Tensor, size: tuple[int, int], amp: bool
) -> torch.Tensor:
    """Scene rows -> normalised packed latents, float16 [N, tokens, C * 4]."""
    height, width = size
    chunk = max(8, 512 * 128 * 128 // (height * width))
    shift, scale = vae.config.shift_factor, vae.config.scaling_factor
    out = []
    for rows in scenes.split(chunk):
        images = compose(store, rows, height, width)
        with torch.autocast(images.device.type, torch.bfloat16, enabled=amp):
            latents = encode(vae, images)
        out.append(pack((latents - shift) * scale).half())
    return torch.cat(out)


def decode_patches(
    vae: AutoencoderKL, patches: torch.Tensor, height: int, width: int, amp: bool = False
) -> torch.Tensor:
    """Packed latents -> pictures in 0..1, float32 [B, 3, height, width]."""
    latents = unpack(patches, height, width)
    latents = latents / vae.config.scaling_factor + vae.config.shift_factor
    with torch.autocast(latents.device.type, torch.bfloat16, enabled=amp):
        images = vae.decoder(latents)
    return (images.float() / 2 + 0.5).clamp(0, 1)
