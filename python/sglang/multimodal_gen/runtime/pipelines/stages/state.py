"""What the stages hand on: one `ImageState` an image.

Shape legend: T text tokens, S = (height / m) * (width / m) packed latent tokens with m the size
multiple, C packed latent channels, N steps. The leading 1 is the batch: images are denoised one
by one, so that a batch never changes an image's bytes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from sglang.multimodal_gen.configs.sampling_params import ImageRequest, SamplingParams

ProgressCallback = Callable[[str, int, int], None]  # (label, steps done, steps in all)
# (image, index of the step, latents before the step, velocity)
EstimateCallback = Callable[["ImageState", int, torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True)
class TextEmbeds:
    """One encoded prompt."""

    tokens: torch.Tensor  # [1, T, joint_attention_dim]
    pooled: torch.Tensor | None = None  # [1, pooled_projection_dim], where the model reads it
    prior: torch.Tensor | None = None  # [1, S, D] projected prior tokens, where there are any
    # [layers, 2, 1, M, H, E] keys and values of condition images, where it is read with them
    memory: torch.Tensor | None = None
    rows: Iterator[torch.Tensor] | None = None  # each step's modulation [1, R], where hoisted


@dataclass
class ImageState:
    """One image on its way through the stages; each stage fills its own fields."""

    request: ImageRequest
    revised_prompt: str | None = None  # what a prompt enhancer made of the prompt
    text: TextEmbeds | None = None
    negative_text: TextEmbeds | None = None  # set exactly when true CFG runs
    prior_ids: torch.Tensor | None = None  # int64 [1, S], one codebook index an image token
    start_latents: torch.Tensor | None = None  # [1, S, C] of the picture to start from, if any
    latents: torch.Tensor | None = None  # [1, S, C] or [1, C, h, w]: noise, then denoised
    img_ids: torch.Tensor | None = None  # [S, 3] positions
    sigmas: torch.Tensor | None = None  # [N + 1] float32 on the device
    timesteps: torch.Tensor | None = None  # [N] float32 on the device
    step_seconds: list[float] = field(default_factory=list)
    pixels: np.ndarray | None = None  # [height, width, 3] uint8

    @property
    def prompt(self) -> str:
        """The prompt that is drawn: the revised one where there is one."""
        return self.request.prompt if self.revised_prompt is None else self.revised_prompt


@dataclass
class ConditionState:
    """One picture of the request that the model reads beside the text."""

    prior_ids: torch.Tensor  # int64 [1, S'], as of an image
    size: tuple[int, int]  # (height, width) in pixels that it is read at
    latents: torch.Tensor | None = None  # [1, C, h', w'], normalised


@dataclass
class BatchState:
    """All images of one request, with what every stage may read."""

    params: SamplingParams  # resolved: no field is None that a stage needs
    images: list[ImageState]
    on_progress: ProgressCallback
    true_cfg: bool = False
    conditions: list[ConditionState] = field(default_factory=list)
    memory: torch.Tensor | None = None  # of `TextEmbeds`, while images are denoised
    on_estimate: EstimateCallback | None = None  # hears of every step's velocity
    mounted: dict[str, str | None] = field(default_factory=dict)  # fusion -> why not, None if so
