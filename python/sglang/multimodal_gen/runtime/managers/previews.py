"""Pictures of the current estimate while a request is denoised."""

import logging
import math
from dataclasses import dataclass

import torch

from sglang.multimodal_gen.runtime.managers.messages import EmitProgress, GenerateRequest, Preview
from sglang.multimodal_gen.runtime.pipelines.base import Pipeline
from sglang.multimodal_gen.runtime.pipelines.stages.checks import NonFiniteError
from sglang.multimodal_gen.runtime.pipelines.stages.state import ImageState

logger = logging.getLogger(__name__)


def preview_steps(count: int, steps: int) -> list[int]:
    """After which of 1..steps a preview is due: evenly spaced, at most `count`, never the last."""
    due = {math.ceil(i * steps / (count + 1)) for i in range(1, count + 1)}
    return sorted(due - {steps})


@dataclass
class PreviewMaker:
    """`BatchState.on_estimate` of one request: only reads what it is given."""

    request: GenerateRequest
    pipeline: Pipeline
    emit: EmitProgress

    def __call__(
        self, image: ImageState, index: int, latents: torch.Tensor, velocity: torch.Tensor
    ) -> None:
        """latents and velocity are those of step `index`, from 0, in one shape."""
        steps = len(image.timesteps)
        if index + 1 not in preview_steps(self.request.previews, steps):
            return
        # The straight line to sigma 0, which is what one step to the end would give.
        estimate = latents.float() - image.sigmas[index] * velocity.float()
        try:
            pixels = self.pipeline.decode(estimate.to(latents.dtype), self.request.params)
        except NonFiniteError as error:  # the finished picture may still be sound, and is checked
            logger.warning("no preview after step %d: %s", index + 1, error)
            return
        request_id = self.request.request_id
        self.emit(Preview(request_id, image.request.index, index + 1, steps, pixels))
