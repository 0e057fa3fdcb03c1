"""All that crosses from a client to the worker and back, in one process or between two."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sglang.multimodal_gen.configs.sampling_params import SamplingParams


@dataclass(frozen=True)
class GenerateRequest:
    """One request, its parameters resolved for the model."""

    request_id: int
    params: SamplingParams


@dataclass(frozen=True)
class ImageOutput:
    """One finished image."""

    index: int
    prompt: str
    seed: int
    pixels: np.ndarray  # [height, width, 3] uint8
    step_seconds: tuple[float, ...]
    revised_prompt: str | None = None  # what a prompt enhancer made of it


@dataclass(frozen=True)
class GenerateResponse:
    """The answer to a request: images in prompt order, or the error that ended it."""

    request_id: int
    images: tuple[ImageOutput, ...] = ()
    stage_seconds: dict[str, float] = field(default_factory=dict)
    mounted: dict[str, str | None] = field(default_factory=dict)  # fusion -> why not, None if so
    sites: tuple[dict[str, Any], ...] = ()  # rows of `report.fused_sites`
    peak_memory_mb: float = 0.0
    error: BaseException | None = None


@dataclass(frozen=True)
class Progress:
    """A long step went on."""

    label: str
    done: int
    total: int


EmitProgress = Callable[[Progress], None]
