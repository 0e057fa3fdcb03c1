"""All that crosses from a client to the worker and back, in one process or between two."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sglang.multimodal_gen.configs.model_specs import ModelSpec
from sglang.multimodal_gen.configs.sampling_params import SamplingParams


@dataclass(frozen=True)
class GenerateRequest:
    """One request, its parameters resolved for the model."""

    request_id: str
    params: SamplingParams
    previews: int = 0  # pictures of the current estimate to send for each image


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

    request_id: str
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


@dataclass(frozen=True)
class Preview:
    """What the finished image looks like by the estimate after `step` of `total` steps."""

    request_id: str
    image_index: int
    step: int
    total: int
    pixels: np.ndarray  # [height, width, 3] uint8


Event = Progress | Preview  # a Preview only where a request asks for it
EmitProgress = Callable[[Event], None]


# Between the processes of the server, besides GenerateRequest, Progress and Preview.


@dataclass(frozen=True)
class CancelRequest:
    """Stop the request that was sent last at its next step; nothing, if it has ended."""


@dataclass(frozen=True)
class WorkerReady:
    """The model is loaded and warm."""

    spec: ModelSpec
    device: str
    sites: tuple[dict[str, Any], ...]  # rows of `report.fused_sites`, of the warm-up
    peak_memory_mb: float


@dataclass(frozen=True)
class WorkerFailure:
    """Why a load or a request ended, in words that need none of the worker's classes."""

    kind: str  # "oom", "cancelled", "invalid", else the exception's class name
    message: str
    traceback: str
    parameter: str | None = None  # of kind "invalid"


@dataclass(frozen=True)
class GenerateReply:
    """A finished request: images in prompt order and `report.build_report` of each."""

    images: tuple[ImageOutput, ...]
    reports: tuple[dict[str, Any], ...]
    seconds: float  # of the worker, without the wait in the queue


@dataclass(frozen=True)
class RequestEnded:
    """The worker's last word on a request; exactly one of the two is set."""

    request_id: str
    reply: GenerateReply | None = None
    failure: WorkerFailure | None = None
