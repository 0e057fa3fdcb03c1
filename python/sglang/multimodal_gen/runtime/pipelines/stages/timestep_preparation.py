"""The noise schedule of the request."""

from dataclasses import dataclass

import torch

from sglang.multimodal_gen.runtime.models.schedulers.flow_match_euler import (
    FlowMatchEulerConfig,
    make_sigmas,
    make_timesteps,
)
from sglang.multimodal_gen.runtime.pipelines.stages.state import BatchState, ImageState


@dataclass
class TimestepPreparationStage:
    """Fills sigmas and timesteps; with dynamic shifting they depend on the image's size."""

    scheduler: FlowMatchEulerConfig
    device: torch.device
    name: str = "TimestepPreparationStage"

    def __call__(self, batch: BatchState) -> None:
        for image in batch.images:
            sigmas = self.sigmas(batch.params.num_inference_steps, image)
            image.timesteps = make_timesteps(self.scheduler, sigmas).to(self.device)
            image.sigmas = sigmas.to(self.device)

    def sigmas(self, num_steps: int, image: ImageState) -> torch.Tensor:
        """float32 [num_steps + 1] on the CPU, from 1 down to 0."""
        return make_sigmas(self.scheduler, num_steps, image.latents.shape[1])
