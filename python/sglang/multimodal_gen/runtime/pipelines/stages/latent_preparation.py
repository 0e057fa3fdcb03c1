"""Noise and positions: one generator an image, seeded with the image's own seed."""

from dataclasses import dataclass

import torch

from sglang.multimodal_gen.runtime.pipelines.stages.state import BatchState


@dataclass
class LatentPreparationStage:
    """Draws float32 noise on the generator's device, then casts and packs it in 2x2 patches."""

    latent_channels: int
    vae_scale: int
    dtype: torch.dtype
    device: torch.device
    name: str = "LatentPreparationStage"

    def __call__(self, batch: BatchState) -> None:
        height = batch.params.height // self.vae_scale
        width = batch.params.width // self.vae_scale
        ids = position_ids(height // 2, width // 2).to(self.device, self.dtype)
        for image in batch.images:
            noise = self.draw(image.request.seed, height, width, batch.params.generator_device)
            image.latents = pack_latents(noise.to(self.device, self.dtype))
            image.img_ids = ids

    def draw(self, seed: int, height: int, width: int, generator_device: str) -> torch.Tensor:
        """float32 [1, latent_channels, height, width] standard normal noise."""
        generator = torch.Generator(generator_device).manual_seed(seed)
        return draw_noise(generator, (1, self.latent_channels, height, width))


def draw_noise(generator: torch.Generator, shape: tuple[int, ...]) -> torch.Tensor:
    """Standard normal noise, float32 on the generator's device."""
    return torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float32)


def pack_latents(latents: torch.Tensor) -> torch.Tensor:
    """[B, c, h, w] -> [B, (h/2)(w/2), 4c]: each 2x2 patch becomes one token, channel-major."""
    b, c, h, w = latents.shape
    patches = latents.view(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(b, (h // 2) * (w // 2), 4 * c)


def unpack_latents(tokens: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """The inverse of `pack_latents`; height and width are those of the latent image."""
    b, _, c = tokens.shape
    patches = tokens.view(b, height // 2, width // 2, c // 4, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return patches.reshape(b, c // 4, height, width)


def position_ids(rows: int, columns: int) -> torch.Tensor:
    """float32 [rows * columns, 3]: (0, row, column) of each image token."""
    ids = torch.zeros(rows, columns, 3)
    ids[..., 1] = torch.arange(rows)[:, None]
    ids[..., 2] = torch.arange(columns)[None, :]
    return ids.reshape(rows * columns, 3)
