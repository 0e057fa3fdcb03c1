"""Condition images of GLM-Image as latents, which the transformer reads once a request."""

from dataclasses import dataclass

import torch

from sglang.multimodal_gen.configs.condition_image import ConditionImage
from sglang.multimodal_gen.runtime.pipelines.stages.checks import require_finite
from sglang.multimodal_gen.runtime.pipelines.stages.condition_pixels import vae_pixels
from sglang.multimodal_gen.runtime.pipelines.stages.glm_sampling import GlmLatentPreparationStage
from sglang.multimodal_gen.runtime.pipelines.stages.state import BatchState


@dataclass(kw_only=True)
class GlmConditionLatentStage(GlmLatentPreparationStage):
    """Noise, and the latents of the condition images: at the size that the prior reads them at, so
    that both have the same tokens."""

    vae: torch.nn.Module  # AutoencoderKL

    def __call__(self, batch: BatchState) -> None:
        super().__call__(batch)
        pictures = batch.params.image or ()
        for picture, condition in zip(pictures, batch.conditions, strict=True):
            condition.latents = self.encode(picture, condition.size)

    def encode(self, picture: ConditionImage, size: tuple[int, int]) -> torch.Tensor:
        """[1, C, h, w] in the transformer's dtype: the posterior's mode, scaled by channel."""
        pixels = vae_pixels(picture, *size).to(self.device, self.vae.dtype)
        latents = self.vae.encode(pixels).latent_dist.mode().to(self.dtype)
        require_finite(self.name, "encoded image", latents)
        mean, std = (
            torch.tensor(values).view(1, -1, 1, 1).to(latents)
            for values in (self.vae.config.latents_mean, self.vae.config.latents_std)
        )
        return (latents - mean) / std
