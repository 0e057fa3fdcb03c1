"""The denoising loop, and the quality tier mounted around it."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from sglang.kernels.ops.diffusion.bitexact_gate import fast_paths_enabled
from sglang.kernels.ops.diffusion.fused_linear_gelu import (
    FUSED_LINEAR_GELU,
    mount_fused_linear_gelu,
    unmount_fused_linear_gelu,
)
from sglang.kernels.ops.diffusion.fused_ln_modulate import (
    FUSED_LN_MODULATE,
    mount_fused_ln_modulate,
    unmount_fused_ln_modulate,
)
from sglang.kernels.ops.diffusion.quality_gate import QualityGatedFusion
from sglang.multimodal_gen.runtime.distributed.parallel_state import SINGLE, ParallelState
from sglang.multimodal_gen.runtime.layers.layerwise_offload import is_offloaded
from sglang.multimodal_gen.runtime.models.schedulers.flow_match_euler import euler_step
from sglang.multimodal_gen.runtime.pipelines.forward_graphs import ForwardGraphs
from sglang.multimodal_gen.runtime.pipelines.stages.checks import require_finite
from sglang.multimodal_gen.runtime.pipelines.stages.modulation_rows import modulation_rows
from sglang.multimodal_gen.runtime.pipelines.stages.state import (
    BatchState,
    ImageState,
    TextEmbeds,
)
from sglang.multimodal_gen.runtime.pipelines.step_clock import StepClock

# name -> gate, mount, unmount
HIGH_TIER = {
    "fused_linear_gelu": (FUSED_LINEAR_GELU, mount_fused_linear_gelu, unmount_fused_linear_gelu),
    "fused_ln_modulate": (FUSED_LN_MODULATE, mount_fused_ln_modulate, unmount_fused_ln_modulate),
}


@dataclass
class DenoisingStage:
    """Runs the transformer over the schedule, image by image."""

    transformer: torch.nn.Module
    has_guidance: bool
    device: torch.device
    name: str = "DenoisingStage"
    parallel: ParallelState = SINGLE

    def __post_init__(self) -> None:
        self._graphs = ForwardGraphs(self.transformer)

    def __call__(self, batch: BatchState) -> None:
        with mounted_tier(self.transformer, batch.params.quality) as batch.mounted:
            for index, image in enumerate(batch.images):
                label = f"denoise {index + 1}/{len(batch.images)}"
                image.latents = self.denoise(image, batch, label)
                require_finite(self.name, "latents", image.latents)

    def denoise(self, image: ImageState, batch: BatchState, label: str) -> torch.Tensor:
        """The loop over timesteps. Returns latents of the same shape."""
        latents, steps = image.latents, len(image.timesteps)
        guidance = self._guidance(batch.params.guidance_scale)
        self._start(image, latents.dtype, guidance)
        clock = StepClock(self.device)
        for i in range(steps):
            timestep = image.timesteps[i].expand(1).to(latents.dtype)
            velocity = self._guided_velocity(image, batch, latents, timestep, guidance)
            if batch.on_estimate is not None:
                batch.on_estimate(image, i, latents, velocity)
            latents = euler_step(latents, velocity, image.sigmas[i], image.sigmas[i + 1])
            clock.tick()
            batch.on_progress(label, i + 1, steps)
        image.step_seconds = clock.seconds()
        return latents

    def _guided_velocity(
        self,
        image: ImageState,
        batch: BatchState,
        latents: torch.Tensor,
        timestep: torch.Tensor,
        guidance: torch.Tensor | None,
    ) -> torch.Tensor:
        """A step's velocity: one forward, or with true CFG two, each on ranks of its own where
        the layout says so; combined in the same order everywhere."""
        texts = [image.text, image.negative_text] if batch.true_cfg else [image.text]
        velocity, *others = self.parallel.cfg.share_branches(
            lambda text: self._velocity(image, text, latents, timestep, guidance), texts
        )
        for negative in others:
            velocity = negative + batch.params.true_cfg_scale * (velocity - negative)
        return velocity

    def _velocity(
        self,
        image: ImageState,
        text: TextEmbeds,
        latents: torch.Tensor,
        timestep: torch.Tensor,
        guidance: torch.Tensor | None,
    ) -> torch.Tensor:
        """One forward; timestep is [1], in 0..1000, of the latents' dtype."""
        txt_ids = torch.zeros(text.tokens.shape[1], 3, device=self.device, dtype=latents.dtype)
        inputs = (latents, text.tokens, text.pooled, timestep / 1000, image.img_ids, txt_ids)
        rows = () if text.rows is None else (next(text.rows),)
        return self._forward(*inputs, guidance, *rows)

    def _start(self, image: ImageState, dtype: torch.dtype, guidance: torch.Tensor | None) -> None:
        """Before the first step of an image: what every step needs and no pixel goes into."""
        hoistable = hasattr(self.transformer, "modulation_rows") and fast_paths_enabled()
        if self.device.type != "cuda" or not hoistable:
            return
        timesteps = image.timesteps.to(dtype) / 1000
        for name in ("text", "negative_text"):
            text = getattr(image, name)
            if text is not None:
                rows = modulation_rows(self.transformer, timesteps, guidance, text.pooled)
                setattr(image, name, replace(text, rows=rows))

    def _forward(self, *args: Any) -> torch.Tensor:
        """The transformer, from the second step on as a CUDA graph where that pays."""
        layout = self.parallel.layout
        plain = layout.ulysses == layout.tp == 1 and not self._changes_by_itself
        if self.device.type != "cuda" or not plain:
            return self.transformer(*args)
        return self._graphs(self._mounted_fusions, *args)

    @property
    def _mounted_fusions(self) -> tuple[bool, ...]:
        return tuple(
            any(gate.is_enabled(site) for site in sites) for gate, sites in self._tier_sites
        )

    @functools.cached_property
    def _changes_by_itself(self) -> bool:
        """Whether torch.compile has a part of the transformer, or its weights move about."""
        modules = self.transformer.modules()
        compiled = any(module._compiled_call_impl is not None for module in modules)
        return compiled or is_offloaded(self.transformer)

    @functools.cached_property
    def _tier_sites(self) -> list[tuple[QualityGatedFusion, list[torch.nn.Module]]]:
        """One site of each fusion: all are mounted or none."""
        gates = [gate for gate, *_ in HIGH_TIER.values()]
        return [(gate, list(gate.iter_sites(self.transformer))[:1]) for gate in gates]

    def _guidance(self, scale: float) -> torch.Tensor | None:
        if not self.has_guidance:
            return None
        return torch.full([1], scale, device=self.device, dtype=torch.float32)


def count_tier_sites(transformer: torch.nn.Module) -> dict[str, int]:
    """Fusion of the high tier -> modules that are marked for it."""
    return {
        name: sum(1 for _ in gate.iter_sites(transformer)) for name, (gate, *_) in HIGH_TIER.items()
    }


@contextmanager
def mounted_tier(transformer: torch.nn.Module, quality: str) -> Iterator[dict[str, str | None]]:
    """Mount the high tier's fusions for one batch; yields fusion -> None, or why not mounted.

    A tier that could not be mounted leaves the sites lossless and is visible in the report.
    """
    if quality != "high":
        yield {}
        return
    try:
        yield {
            name: None if mount(transformer) else gate.last_reject
            for name, (gate, mount, _) in HIGH_TIER.items()
        }
    finally:
        for _, _, unmount in HIGH_TIER.values():
            unmount(transformer)
