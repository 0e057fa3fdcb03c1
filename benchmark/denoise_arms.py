"""The arms of bench_denoise.py: one set of random weights, run by this engine or by diffusers.

A `DenoiseCase` is one model at one size. What the models share is here; each model's own file says
how its inputs are made and how diffusers' pipeline calls its transformer.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from sglang.kernels.ops.diffusion.bitexact_gate import BitExactFusionGate, all_gates, fast_paths
from sglang.multimodal_gen.configs.model_specs import ModelSpec, read_model_spec
from sglang.multimodal_gen.configs.sampling_params import ImageRequest, SamplingParams
from sglang.multimodal_gen.runtime.distributed.parallel_state import SINGLE, ParallelState
from sglang.multimodal_gen.runtime.distributed.ulysses import UlyssesAttention
from sglang.multimodal_gen.runtime.layers.attention import AttentionBackend, make_attention
from sglang.multimodal_gen.runtime.loader.component_loader import (
    ComponentLoader,
    params_from_config,
)
from sglang.multimodal_gen.runtime.managers.numeric_switches import numeric_switches
from sglang.multimodal_gen.runtime.models.schedulers.flow_match_euler import FlowMatchEulerConfig
from sglang.multimodal_gen.runtime.pipelines.stages.denoising import DenoisingStage, mounted_tier
from sglang.multimodal_gen.runtime.pipelines.stages.state import BatchState, ImageState, TextEmbeds
from sglang.multimodal_gen.runtime.pipelines.step_clock import StepClock

ARMS = ("eager", "lossless", "high", "diffusers", "diffusers-compile")
OnStep = Callable[[int], None]  # takes how many steps are done
# image, how many steps are done, its latents, their velocity
OnEstimate = Callable[[ImageState, int, torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True)
class CaseSetup:
    """Which model, at which size, where."""

    folder: Path  # in diffusers layout; only its configs are read
    width: int | None = None  # None: the model's default, as for the other two
    height: int | None = None
    steps: int | None = None
    device: torch.device = torch.device("cuda")
    dtype: torch.dtype = torch.bfloat16
    attention: str = "cudnn"  # of this engine, and of diffusers where it lets itself be told
    parallel: ParallelState = SINGLE  # this process's place among the ranks, if there are several


@dataclass(frozen=True)
class ArmRun:
    """One denoising by one arm."""

    latents: torch.Tensor
    step_seconds: list[float]
    fallbacks: list[str]  # site: why it ran eager


class DenoiseCase(ABC):
    """A transformer with random weights, and the arms that denoise one prepared image with it."""

    params_class: type
    model_class: type
    reference_name: str  # the transformer's class in diffusers
    reference_takes_backend = True  # False: diffusers' own dispatch chooses, as in its pipeline
    without: tuple[str, ...] = ()  # sites that the arm of this name leaves to their eager chains

    def __init__(self, setup: CaseSetup) -> None:
        self.device, self.dtype, self.attention = setup.device, setup.dtype, setup.attention
        self.parallel = setup.parallel
        loader = ComponentLoader(setup.folder, True, setup.device, setup.parallel)
        self.config = loader.config("transformer")
        self.scheduler_config = loader.config("scheduler", "scheduler_config.json")
        self.schedule = FlowMatchEulerConfig.from_dict(self.scheduler_config)
        self.spec: ModelSpec = read_model_spec(setup.folder)
        params = params_from_config(self.params_class, self.config)
        attention = make_attention(setup.attention, setup.parallel.ulysses)
        self.transformer = loader.dit(lambda: self.make_model(params, attention), setup.dtype)
        asked = SamplingParams(
            prompt="", width=setup.width, height=setup.height, num_inference_steps=setup.steps
        )
        self.params = asked.fit(self.spec)
        self.stage = self.make_stage()
        self._references: dict[bool, torch.nn.Module] = {}

    def make_model(
        self, params: Any, attention: AttentionBackend | UlyssesAttention
    ) -> torch.nn.Module:
        """The engine's transformer, or this rank's part of it."""
        return self.model_class(params, attention)

    @abstractmethod
    def make_stage(self) -> DenoisingStage:
        """The engine's denoising stage around `self.transformer`."""

    @abstractmethod
    def prepare(self, batch: BatchState) -> None:
        """Give the batch's one image random text of the published sizes, noise and schedule."""

    @abstractmethod
    def reference_velocity(
        self,
        transformer: torch.nn.Module,
        latents: torch.Tensor,
        timestep: torch.Tensor,
        image: ImageState,
        params: SamplingParams,
    ) -> torch.Tensor:
        """One step's velocity as diffusers' pipeline computes it. timestep is 0-dimensional."""

    def run(
        self,
        arm: str,
        steps: int | None = None,
        on_step: OnStep | None = None,
        on_estimate: OnEstimate | None = None,
    ) -> ArmRun:
        """One denoising from the same noise. `on_step` is called after each step; `on_estimate`
        before it is taken, by this engine's arms only."""
        for gate in all_gates():
            gate.reset_counters()
        with torch.inference_mode(), numeric_switches(self.device):
            batch = self._batch(steps, on_step)
            batch.on_estimate = on_estimate
            if arm.startswith("diffusers"):
                return self._run_reference(arm, batch)
            quality = "high" if arm == "high" else "lossless"
            left_out = sites_off(self.without if arm == "without" else ())
            tier = mounted_tier(self.transformer, quality)
            with fast_paths(arm != "eager"), left_out, tier as mounted:
                latents = self.stage.denoise(batch.images[0], batch, arm)
        return ArmRun(latents, batch.images[0].step_seconds, fallbacks(mounted))

    def random_text(self, *tokens_and_width: int) -> torch.Tensor:
        """Standard normal [1, *tokens_and_width], the same in every run."""
        draw = torch.Generator(self.device).manual_seed(1)
        shape = (1, *tokens_and_width)
        return torch.randn(shape, generator=draw, device=self.device, dtype=self.dtype)

    def reference(self, compiled: bool) -> torch.nn.Module:
        """diffusers' transformer sharing our weights; regionally compiled where asked."""
        if compiled not in self._references:
            self._references[compiled] = self._make_reference(compiled)
        return self._references[compiled]

    def _batch(self, steps: int | None, on_step: OnStep | None) -> BatchState:
        params = replace(self.params, num_inference_steps=steps or self.params.num_inference_steps)
        image = ImageState(ImageRequest(index=0, prompt="", negative_prompt="", seed=0))

        def on_progress(label: str, done: int, total: int) -> None:
            if on_step is not None:
                on_step(done)

        batch = BatchState(params, [image], on_progress, true_cfg=params.true_cfg_scale > 1)
        self.prepare(batch)
        return batch

    def _run_reference(self, arm: str, batch: BatchState) -> ArmRun:
        """The loop of diffusers' pipeline over its own transformer and scheduler."""
        from diffusers import FlowMatchEulerDiscreteScheduler

        transformer = self.reference(compiled=arm == "diffusers-compile")
        image = batch.images[0]
        scheduler = FlowMatchEulerDiscreteScheduler.from_config(self.scheduler_config)
        # a test shows that these tables are the reference's
        scheduler.timesteps, scheduler.sigmas = image.timesteps, image.sigmas
        scheduler.set_begin_index(0)
        latents, clock = image.latents, StepClock(self.device)
        for done, t in enumerate(scheduler.timesteps, start=1):
            velocity = self.reference_velocity(transformer, latents, t, image, batch.params)
            latents = scheduler.step(velocity, t, latents, return_dict=False)[0]
            clock.tick()
            batch.on_progress(arm, done, batch.params.num_inference_steps)
        return ArmRun(latents, clock.seconds(), [])

    def _make_reference(self, compiled: bool) -> torch.nn.Module:
        import diffusers

        with torch.device("meta"):
            model: Any = getattr(diffusers, self.reference_name).from_config(self.config)
        model.load_state_dict(self.transformer.state_dict(), assign=True)
        if self.reference_takes_backend and self.attention == "cudnn":
            model.set_attention_backend("_native_cudnn")
        if compiled:
            model.compile_repeated_blocks(fullgraph=True)
        return model.eval()


@contextmanager
def sites_off(names: Collection[str]) -> Iterator[None]:
    """The gates of these names turned off inside; ValueError where there is none of a name."""
    gates = gates_named(names)
    before = [(gate, gate.disabled, gate.verified) for gate in gates]
    for gate in gates:
        gate.disabled, gate.verified = True, False  # a verified gate runs its op without a look
    try:
        yield
    finally:
        for gate, disabled, verified in before:
            gate.disabled, gate.verified = disabled, verified


def gates_named(names: Collection[str]) -> list[BitExactFusionGate]:
    """The gates of these names; ValueError where there is none of a name."""
    gates = {gate.name: gate for gate in all_gates()}
    unknown = sorted(set(names) - set(gates))
    if unknown:
        raise ValueError(f"--without: got {', '.join(unknown)}, expected some of {sorted(gates)}")
    return [gates[name] for name in dict.fromkeys(names)]


def classifier_free_guidance(
    velocity: torch.Tensor, negative: torch.Tensor, scale: float
) -> torch.Tensor:
    """The two velocities of true CFG as one."""
    return negative + scale * (velocity - negative)


def fallbacks(mounted: dict[str, str | None]) -> list[str]:
    """Every site that ran eager though a fused op exists, with the reason."""
    states = [gate.state() for gate in all_gates()]
    rows = [f"{s.name}: {s.reason}" for s in states if s.eager_calls and s.reason]
    return rows + [f"{name}: {reason}" for name, reason in mounted.items() if reason]


def negative_text(batch: BatchState, text: TextEmbeds) -> TextEmbeds | None:
    """`text`, where the batch has true CFG to use it for."""
    return text if batch.true_cfg else None
