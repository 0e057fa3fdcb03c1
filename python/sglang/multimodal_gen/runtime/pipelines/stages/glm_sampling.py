"""Latents, schedule, denoising and decoding where GLM-Image differs from FLUX.1."""

import functools
from dataclasses import dataclass, replace

import numpy as np
import torch

from sglang.multimodal_gen.configs.sampling_params import SamplingParams
from sglang.multimodal_gen.runtime.layers.rotary import Rope
from sglang.multimodal_gen.runtime.models.dits.glm_image import glm_rope_tables
from sglang.multimodal_gen.runtime.models.schedulers.flow_match_euler import (
    FlowMatchEulerConfig,
    shift_sigmas,
)
from sglang.multimodal_gen.runtime.pipelines.stages.decoding import DecodingStage
from sglang.multimodal_gen.runtime.pipelines.stages.denoising import DenoisingStage
from sglang.multimodal_gen.runtime.pipelines.stages.latent_preparation import LatentPreparationStage
from sglang.multimodal_gen.runtime.pipelines.stages.state import (
    BatchState,
    ConditionState,
    ImageState,
    TextEmbeds,
)


@dataclass
class GlmLatentPreparationStage(LatentPreparationStage):
    """The same noise, not packed: rounded to the model's dtype, then kept in float32."""

    def __call__(self, batch: BatchState) -> None:
        height = batch.params.height // self.vae_scale
        width = batch.params.width // self.vae_scale
        for image in batch.images:
            noise = self.draw(image.request.seed, height, width, batch.params.generator_device)
            image.latents = noise.to(self.device, self.dtype).float()


@dataclass
class GlmTimestepPreparationStage:
    """Whole timesteps that stay as they are, and sigmas shifted by the image's size."""

    scheduler: FlowMatchEulerConfig
    device: torch.device
    name: str = "TimestepPreparationStage"

    def __call__(self, batch: BatchState) -> None:
        for image in batch.images:
            timesteps, sigmas = glm_schedule(
                self.scheduler, batch.params.num_inference_steps, image.prior_ids.shape[1]
            )
            image.timesteps, image.sigmas = timesteps.to(self.device), sigmas.to(self.device)


def glm_schedule(
    config: FlowMatchEulerConfig, steps: int, image_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [steps] timesteps and [steps + 1] sigmas on the CPU, as the reference's tables."""
    levels = np.linspace(config.num_train_timesteps, 1.0, steps + 1)[:-1]
    timesteps = levels.astype(np.int64).astype(np.float32)
    side = (image_tokens / config.base_image_seq_len) ** 0.5
    mu = side * config.max_shift + config.base_shift
    sigmas = shift_sigmas(config, timesteps / config.num_train_timesteps, mu)
    return torch.from_numpy(timesteps), sigmas


@dataclass(kw_only=True)
class GlmDenoisingStage(DenoisingStage):
    """Text and prior are projected once an image; the velocity is float32 before guidance."""

    dtype: torch.dtype  # of the transformer
    vae_scale: int

    def __call__(self, batch: BatchState) -> None:
        if batch.conditions:
            batch.memory = torch.cat([self._remember(c) for c in batch.conditions], dim=3)
        super().__call__(batch)
        batch.memory = None

    def denoise(self, image: ImageState, batch: BatchState, label: str) -> torch.Tensor:
        """The loop over timesteps. Returns latents of the same shape."""
        image.text = self._project(image, image.text, drop_prior=False)
        image.text = replace(image.text, memory=batch.memory)
        if batch.true_cfg:
            image.negative_text = self._project(image, image.negative_text, drop_prior=True)
        latents = super().denoise(image, batch, label)
        image.text = image.negative_text = None  # the next image has priors of its own
        return latents

    def _project(self, image: ImageState, text: TextEmbeds, *, drop_prior: bool) -> TextEmbeds:
        tokens, prior = self.transformer.condition(
            text.tokens, image.prior_ids, drop_prior=drop_prior
        )
        return replace(text, tokens=tokens, prior=prior)

    def _remember(self, condition: ConditionState) -> torch.Tensor:
        latents, p = condition.latents, self.transformer.params
        patches = (latents.shape[2] // p.patch_size, latents.shape[3] // p.patch_size)
        rope = _rope(*patches, p.attention_head_dim, self.device)
        return self.transformer.remember(latents, condition.prior_ids, rope, condition.size)

    def _velocity(
        self,
        image: ImageState,
        text: TextEmbeds,
        latents: torch.Tensor,
        timestep: torch.Tensor,
        guidance: torch.Tensor | None,
    ) -> torch.Tensor:
        params = self.transformer.params
        height, width = latents.shape[-2:]
        patches = (height // params.patch_size, width // params.patch_size)
        rope = _rope(*patches, params.attention_head_dim, self.device)
        size = _size(height * self.vae_scale, width * self.vae_scale, self.dtype, self.device)
        velocity = self._forward(
            latents.to(self.dtype), text.tokens, text.prior, timestep - 1, size, rope, text.memory
        )
        return velocity.float()


@functools.lru_cache(maxsize=8)
def _rope(rows: int, columns: int, head_dim: int, device: torch.device) -> Rope:
    cos, sin = glm_rope_tables(rows, columns, head_dim)
    return cos.to(device), sin.to(device)


@functools.lru_cache(maxsize=8)
def _size(height: int, width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.tensor([[height, width]], dtype=dtype, device=device)


@dataclass
class GlmDecodingStage(DecodingStage):
    """Latents are scaled channel by channel."""

    def vae_latents(self, latents: torch.Tensor, params: SamplingParams) -> torch.Tensor:
        """Denoised latents -> [1, c, h, w] as the VAE has them, in its dtype."""
        latents = latents.to(self.vae.dtype)
        mean, std = (
            torch.tensor(values).view(1, -1, 1, 1).to(latents)
            for values in (self.vae.config.latents_mean, self.vae.config.latents_std)
        )
        return latents * std + mean
