"""Latents whose channels hold 2x2 patches, normalised by a batch norm: drawn, and undone to decode.

C = 4 c channels over a grid of (height / m) x (width / m) with m the size multiple.
"""

from dataclasses import dataclass

import torch

from sglang.multimodal_gen.configs.sampling_params import SamplingParams
from sglang.multimodal_gen.runtime.pipelines.stages.decoding import DecodingStage
from sglang.multimodal_gen.runtime.pipelines.stages.latent_preparation import LatentPreparationStage
from sglang.multimodal_gen.runtime.pipelines.stages.state import BatchState

BATCH_NORM_EPS = 1e-5  # what the VAE was trained with; its config says 1e-4


class PatchedLatentPreparationStage(LatentPreparationStage):
    """Draws float32 noise [1, C, h, w] of the patched grid; `vae_scale` is the size multiple."""

    def __call__(self, batch: BatchState) -> None:
        height = batch.params.height // self.vae_scale
        width = batch.params.width // self.vae_scale
        for image in batch.images:
            noise = self.draw(image.request.seed, height, width, batch.params.generator_device)
            image.latents = noise.to(self.device, self.dtype)


@dataclass
class PatchedDecodingStage(DecodingStage):
    """VAE decode after undoing the batch norm and the patches."""

    vae: torch.nn.Module  # AutoencoderKLFlux2

    def vae_latents(self, latents: torch.Tensor, params: SamplingParams) -> torch.Tensor:
        """[1, C, h, w] -> [1, c, 2 h, 2 w]."""
        norm, shape = self.vae.bn, (1, -1, 1, 1)
        mean = norm.running_mean.view(shape).to(latents.dtype)
        std = torch.sqrt(norm.running_var.view(shape) + BATCH_NORM_EPS).to(latents.dtype)
        return unpatch_latents(latents * std + mean)


def unpatch_latents(latents: torch.Tensor) -> torch.Tensor:
    """[B, 4 c, h, w] -> [B, c, 2 h, 2 w]; a channel's patch is four channels, row by row."""
    b, channels, h, w = latents.shape
    patches = latents.reshape(b, channels // 4, 2, 2, h, w).permute(0, 1, 4, 2, 5, 3)
    return patches.reshape(b, channels // 4, 2 * h, 2 * w)
