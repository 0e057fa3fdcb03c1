"""A pipeline is a list of stages over loaded components."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from sglang.multimodal_gen.configs.model_specs import ModelSpec
from sglang.multimodal_gen.configs.parallel_layout import ParallelLayout
from sglang.multimodal_gen.configs.sampling_params import SamplingParams
from sglang.multimodal_gen.runtime.pipelines.stages.state import BatchState

logger = logging.getLogger(__name__)

Stage = Callable[[BatchState], None]  # every stage also has a `name`
LoadProgress = Callable[[str, int, int], None]  # (component, components done, in all)


@dataclass
class Pipeline:
    """The ordered stages of one model, and what a report says of it."""

    spec: ModelSpec
    transformer: torch.nn.Module
    stages: Sequence[Stage]
    device: torch.device
    attention_backend: str
    precisions: dict[str, str]
    backend: str = "sglang"  # or "diffusers"
    norm_backend: str | None = None  # the RMSNorm kernel, where the model's norm has a choice
    layout: ParallelLayout = ParallelLayout()  # of the ranks that make a picture together
    compiled: bool = False  # torch.compile changes rounding: never reported as lossless
    loras: tuple[dict[str, Any], ...] = ()  # `Lora.describe` of what is merged
    # stage name -> modules that wait in host memory outside that stage
    offloaded: Mapping[str, Sequence[torch.nn.Module]] = field(default_factory=dict)

    def run(self, batch: BatchState) -> dict[str, float]:
        """Run every stage over the batch. Returns stage name -> seconds."""
        seconds = {}
        for stage in self.stages:
            start = time.perf_counter()
            with self._on_device(self.offloaded.get(stage.name, ())):
                stage(batch)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            seconds[stage.name] = time.perf_counter() - start
            logger.info("[%s] finished in %.4f seconds", stage.name, seconds[stage.name])
        return seconds

    def decode(self, latents: torch.Tensor, params: SamplingParams) -> np.ndarray:
        """uint8 [height, width, 3] of latents as the denoising stage has them."""
        decoding = self.stages[-1]
        with self._on_device(self.offloaded.get(decoding.name, ())):
            return decoding.decode(decoding.vae_latents(latents, params))

    @contextmanager
    def _on_device(self, modules: Sequence[torch.nn.Module]) -> Iterator[None]:
        for module in modules:
            module.to(self.device)
        try:
            yield
        finally:
            for module in modules:
                module.to("cpu")
