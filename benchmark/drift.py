"""How far the high tier's latents leave the lossless ones, step by step."""

import torch
from denoise_arms import DenoiseCase

from sglang.multimodal_gen.runtime.pipelines.stages.state import ImageState


def drift_by_step(case: DenoiseCase) -> list[float]:
    """Relative L2 distance of the latents of `high` from those of `lossless` after each step."""
    lossless, high = (latents_by_step(case, arm) for arm in ("lossless", "high"))
    return [relative_distance(a, b) for a, b in zip(high, lossless, strict=True)]


def latents_by_step(case: DenoiseCase, arm: str) -> list[torch.Tensor]:
    """The latents after each step of one arm, on the CPU."""
    before: list[torch.Tensor] = []

    def keep(image: ImageState, done: int, latents: torch.Tensor, velocity: torch.Tensor) -> None:
        before.append(latents.cpu())

    last = case.run(arm, on_estimate=keep).latents
    return [*before[1:], last.cpu()]  # what a step starts from is what the one before made


def relative_distance(values: torch.Tensor, reference: torch.Tensor) -> float:
    """|values - reference| / |reference| in the Euclidean norm."""
    values, reference = values.double(), reference.double()
    return ((values - reference).norm() / reference.norm()).item()
