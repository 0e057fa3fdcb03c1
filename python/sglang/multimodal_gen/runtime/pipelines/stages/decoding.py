"""Latents to uint8 pixels."""

from dataclasses import dataclass

import numpy as np
import torch

from sglang.multimodal_gen.configs.sampling_params import SamplingParams
from sglang.multimodal_gen.runtime.pipelines.stages.checks import require_finite
from sglang.multimodal_gen.runtime.pipelines.stages.latent_preparation import unpack_latents
from sglang.multimodal_gen.runtime.pipelines.stages.state import BatchState


@dataclass
class DecodingStage:
    """VAE decode, one image at a time: a large batch would pass 2^31 elements."""

    vae: torch.nn.Module  # AutoencoderKL
    vae_scale: int
    name: str = "DecodingStage"

    def __call__(self, batch: BatchState) -> None:
        for index, image in enumerate(batch.images):
            image.pixels = self.decode(self.vae_latents(image.latents, batch.params))
            image.latents = None
            batch.on_progress("decode", index + 1, len(batch.images))

    def vae_latents(self, latents: torch.Tensor, params: SamplingParams) -> torch.Tensor:
        """Denoised latents -> [1, c, h, w] as the VAE has them."""
        height, width = params.height // self.vae_scale, params.width // self.vae_scale
        config = self.vae.config
        latents = unpack_latents(latents, height, width) / config.scaling_factor
        return latents + config.shift_factor

    def decode(self, latents: torch.Tensor) -> np.ndarray:
        """[1, c, h, w] as the VAE has them -> uint8 [H, W, 3]."""
        decoded = self.vae.decode(latents.to(self.vae.dtype), return_dict=False)[0]
        require_finite(self.name, "decoded image", decoded)
        return to_uint8(decoded)


def to_uint8(decoded: torch.Tensor) -> np.ndarray:
    """[1, 3, H, W] in -1..1 -> uint8 [H, W, 3]; scaled in the VAE's dtype, rounded half to even."""
    image = (decoded * 0.5 + 0.5).clamp(0, 1)
    array = image[0].permute(1, 2, 0).float().cpu().numpy()
    return (array * 255).round().astype(np.uint8)
