"""What rank 0 tells the further ranks of a picture, and what they answer. Tensors are broadcast."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from sglang.multimodal_gen.configs.parallel_layout import ParallelLayout
from sglang.multimodal_gen.configs.sampling_params import ImageRequest, SamplingParams
from sglang.multimodal_gen.configs.server_args import ServerArgs
from sglang.multimodal_gen.runtime.pipelines.stages.state import (
    BatchState,
    ConditionState,
    ImageState,
    TextEmbeds,
)

TEXTS = ("text", "negative_text")
PARTS = ("tokens", "pooled", "prior")
TENSORS = ("prior_ids", "latents", "img_ids", "sigmas", "timesteps")
CONDITION_TENSORS = ("prior_ids", "latents")
Outline = dict[str, tuple[torch.Size, torch.dtype]]  # path of a tensor -> what it is


@dataclass(frozen=True)
class StartRank:
    """The first message: which rank a process is, and of which model."""

    rank: int
    layout: ParallelLayout
    device: str
    folder: str
    args: ServerArgs
    store_file: str
    timeout_s: float
    threads: int


@dataclass(frozen=True)
class DenoiseJob:
    """One request whose images are to be denoised. The outlines' tensors are broadcast after it."""

    params: SamplingParams
    true_cfg: bool
    images: tuple[tuple[ImageRequest, Outline], ...]
    conditions: tuple[tuple[tuple[int, int], Outline], ...]  # size and tensors of each

    @classmethod
    def of(cls, batch: BatchState) -> "DenoiseJob":
        """The job of a batch that is ready to be denoised."""
        images = tuple((image.request, _outline(tensors_of(image))) for image in batch.images)
        conditions = tuple((one.size, _outline(condition_tensors(one))) for one in batch.conditions)
        params = replace(batch.params, image=None, strength=None)  # rank 0 alone reads pictures
        return cls(params, batch.true_cfg, images, conditions)


@dataclass(frozen=True)
class StepDone:
    """Rank 0 has ended its step. Without `proceed` the job is abandoned, by all at this step."""

    proceed: bool


@dataclass(frozen=True)
class Answer:
    """A rank has started, loaded, or ended a job. `failure` says why it could not."""

    failure: str | None = None
    failed_at: float = 0.0  # seconds on this machine's clock
    sites: tuple[dict[str, Any], ...] = ()  # rows of `report.fused_sites`


def tensors_of(image: ImageState) -> Iterator[tuple[str, torch.Tensor]]:
    """(path, tensor) of everything that denoising reads of an image, in a fixed order."""
    for name in TENSORS:
        if getattr(image, name) is not None:
            yield name, getattr(image, name)
    for name in TEXTS:
        text = getattr(image, name)
        for part in PARTS if text is not None else ():
            if getattr(text, part) is not None:
                yield f"{name}.{part}", getattr(text, part)


def condition_tensors(condition: ConditionState) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of everything that denoising reads of a condition image."""
    for name in CONDITION_TENSORS:
        if getattr(condition, name) is not None:
            yield name, getattr(condition, name)


def _outline(tensors: Iterable[tuple[str, torch.Tensor]]) -> Outline:
    return {path: (x.shape, x.dtype) for path, x in tensors}


def image_of(request: ImageRequest, tensors: dict[str, torch.Tensor]) -> ImageState:
    """The image whose `tensors_of` these are."""
    image = ImageState(request, **{name: tensors.get(name) for name in TENSORS})
    for name in TEXTS:
        paths = {part: f"{name}.{part}" for part in PARTS}
        parts = {part: tensors[path] for part, path in paths.items() if path in tensors}
        setattr(image, name, TextEmbeds(**parts) if parts else None)
    return image
