"""The denoising loop of a transformer that reads latents, one prompt and the timestep."""

import torch

from sglang.multimodal_gen.runtime.pipelines.stages.denoising import DenoisingStage
from sglang.multimodal_gen.runtime.pipelines.stages.state import ImageState, TextEmbeds


class PromptDenoisingStage(DenoisingStage):
    """Prompts are not padded, so the two of true CFG differ in length: two forwards a step."""

    def _velocity(
        self,
        image: ImageState,
        text: TextEmbeds,
        latents: torch.Tensor,
        timestep: torch.Tensor,
        guidance: torch.Tensor | None,
    ) -> torch.Tensor:
        """One forward; timestep is [1], in 0..1000, of the latents' dtype."""
        return self._forward(latents, text.tokens, timestep)
