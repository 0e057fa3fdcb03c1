"""The noise schedule of the request."""

from dataclasses import dataclass

import torch

from sglang.multimodal_gen.runtime.models.schedulers.flow_match_euler import (
    FlowMatchEulerConfig,
    make_sigmas,
    make_timesteps,
)
from sglang.multimodal_gen.runtime.pipelines.stages.state import BatchState


@dataclass
class TimestepPreparationStage:
    """Fills sigmas and timesteps; with dynamic shifting they depend on the image's size."""

    scheduler: FlowMatchEulerConfig
    device: torch.device
    name: str = "TimestepPreparationStage"

    def __call__(self, batch: BatchState) -> None:
        for image in batch.images:
            sigmas = make_sigmas(
                self.scheduler, batch.params.num_inference_steps, image.latents.shape[1]
            )
            image.timesteps = make_timesteps(self.scheduler, sigmas).to(self.device)
            image.sigmas = sigmas.to(self.device)
