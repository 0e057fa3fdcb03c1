"""The arms of bench_denoise.py: one set of random weights, run by this engine or by diffusers."""

import functools
from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from timing import time_us

from sglang.kernels.ops.diffusion.bitexact_gate import all_gates, fast_paths
from sglang.multimodal_gen.configs.model_specs import DUMMY_CONFIGS, read_model_spec
from sglang.multimodal_gen.configs.sampling_params import ImageRequest, SamplingParams
from sglang.multimodal_gen.runtime.layers.attention import AttentionBackend
from sglang.multimodal_gen.runtime.loader.component_loader import (
    ComponentLoader,
    params_from_config,
)
from sglang.multimodal_gen.runtime.managers.worker import numeric_switches
from sglang.multimodal_gen.runtime.models.dits.flux import FluxParams, FluxTransformer2DModel
from sglang.multimodal_gen.runtime.models.schedulers.flow_match_euler import (
    FlowMatchEulerConfig,
    image_shift,
)
from sglang.multimodal_gen.runtime.pipelines.stages.denoising import DenoisingStage, mounted_tier
from sglang.multimodal_gen.runtime.pipelines.stages.latent_preparation import LatentPreparationStage
from sglang.multimodal_gen.runtime.pipelines.stages.state import BatchState, ImageState, TextEmbeds
from sglang.multimodal_gen.runtime.pipelines.stages.timestep_preparation import (
    TimestepPreparationStage,
)
from sglang.multimodal_gen.runtime.pipelines.step_clock import StepClock
from sglang.multimodal_gen.runtime.profiling import family_seconds

DTYPE = torch.bfloat16
PROFILED_STEPS = 4


class DenoiseCase:
    """A dummy FLUX.1 transformer with one prepared image, and the arms that denoise it."""

    def __init__(self, config_name: str, width: int, height: int, steps: int) -> None:
        self.device = torch.device("cuda")
        folder = DUMMY_CONFIGS / config_name
        loader = ComponentLoader(folder, dummy=True, device=self.device)
        self.config = loader.config("transformer")
        self.scheduler = loader.config("scheduler", "scheduler_config.json")
        params = params_from_config(FluxParams, self.config)
        attention = AttentionBackend("cudnn")
        self.transformer = loader.dit(lambda: FluxTransformer2DModel(params, attention), DTYPE)
        self.stage = DenoisingStage(self.transformer, params.guidance_embeds, self.device)
        self.spec = read_model_spec(folder)
        asked = SamplingParams(prompt="", width=width, height=height, num_inference_steps=steps)
        self.params = asked.resolve(self.spec)

    def run(
        self, arm: str, steps: int | None = None
    ) -> tuple[torch.Tensor, list[float], list[str]]:
        """One denoising. Returns final latents, seconds of each step, and the fallbacks."""
        params = replace(self.params, num_inference_steps=steps or self.params.num_inference_steps)
        for gate in all_gates():
            gate.reset_counters()
        with torch.inference_mode(), numeric_switches(self.device):
            batch = self._batch(params)
            if arm.startswith("diffusers"):
                return *self._run_diffusers(arm, batch), []
            with fast_paths(arm != "eager"), self._tier(arm) as mounted:
                latents = self.stage.denoise(batch.images[0], batch, arm)
        states = [gate.state() for gate in all_gates()]
        fallbacks = [f"{s.name}: {s.reason}" for s in states if s.eager_calls and s.reason]
        fallbacks += [f"{name}: {reason}" for name, reason in mounted.items() if reason]
        return latents, batch.images[0].step_seconds, fallbacks

    def floor_ms(self) -> float:
        """Milliseconds of all GEMMs and attentions of one step, each op timed alone, L2 cold."""
        gemms: Counter = Counter()

        def note(module: torch.nn.Linear, inputs: tuple, _: torch.Tensor) -> None:
            gemms[(tuple(inputs[0].shape), tuple(module.weight.shape))] += 1

        linears = [m for m in self.transformer.modules() if isinstance(m, torch.nn.Linear)]
        hooks = [linear.register_forward_hook(note) for linear in linears]
        self.run("lossless", steps=1)
        for hook in hooks:
            hook.remove()
        gemm_us = sum(count * gemm_time_us(*shapes) for shapes, count in gemms.items())
        blocks = self.config["num_layers"] + self.config["num_single_layers"]
        return (gemm_us + blocks * self._attention_us()) / 1e3

    def families_ms(self, arm: str) -> dict[str, float]:
        """Kernel family -> GPU milliseconds a step."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            self.run(arm, steps=PROFILED_STEPS)
            torch.cuda.synchronize()
        families = family_seconds(profile.key_averages())
        return {name: 1e3 * s / PROFILED_STEPS for name, s in families.items()}

    def _batch(self, params: SamplingParams) -> BatchState:
        """One image with random text embeddings of the published sizes, noise and schedule."""
        image = ImageState(ImageRequest(index=0, prompt="", negative_prompt=None, seed=0))
        draw = torch.Generator(self.device).manual_seed(1)
        tokens = (1, params.max_sequence_length, self.config["joint_attention_dim"])
        pooled = (1, self.config["pooled_projection_dim"])
        image.text = TextEmbeds(
            *(
                torch.randn(s, generator=draw, device=self.device, dtype=DTYPE)
                for s in (tokens, pooled)
            )
        )
        batch = BatchState(params, [image], on_progress=lambda label, done, total: None)
        channels, vae_scale = self.config["in_channels"] // 4, self.spec.size_multiple // 2
        LatentPreparationStage(channels, vae_scale, DTYPE, self.device)(batch)
        schedule = FlowMatchEulerConfig.from_dict(self.scheduler)
        TimestepPreparationStage(schedule, self.device)(batch)
        return batch

    def _tier(self, arm: str) -> AbstractContextManager[dict[str, str | None]]:
        return mounted_tier(self.transformer, "high" if arm == "high" else "lossless")

    def _run_diffusers(self, arm: str, batch: BatchState) -> tuple[torch.Tensor, list[float]]:
        """The reference's loop over its own transformer and scheduler, on the same weights."""
        from diffusers import FlowMatchEulerDiscreteScheduler

        transformer = self._reference(arm == "diffusers-compile")
        image, params = batch.images[0], batch.params
        scheduler = FlowMatchEulerDiscreteScheduler.from_config(self.scheduler)
        sigmas = np.linspace(1.0, 1 / params.num_inference_steps, params.num_inference_steps)
        mu = image_shift(FlowMatchEulerConfig.from_dict(self.scheduler), image.latents.shape[1])
        scheduler.set_timesteps(sigmas=sigmas, mu=mu, device=self.device)
        scheduler.set_begin_index(0)
        guidance = torch.full([1], params.guidance_scale, device=self.device)
        txt_ids = torch.zeros(image.text.tokens.shape[1], 3, device=self.device, dtype=DTYPE)
        latents, clock = image.latents, StepClock(self.device)
        for t in scheduler.timesteps:
            velocity = transformer(
                hidden_states=latents,
                timestep=t.expand(1).to(DTYPE) / 1000,
                guidance=guidance if self.config["guidance_embeds"] else None,
                pooled_projections=image.text.pooled,
                encoder_hidden_states=image.text.tokens,
                txt_ids=txt_ids,
                img_ids=image.img_ids,
                return_dict=False,
            )[0]
            latents = scheduler.step(velocity, t, latents, return_dict=False)[0]
            clock.tick()
        return latents, clock.seconds()

    @functools.cache  # noqa: B019 - one case lives as long as the process
    def _reference(self, compiled: bool) -> torch.nn.Module:
        """diffusers' transformer sharing our weights; regionally compiled where asked."""
        import diffusers

        with torch.device("meta"):
            model = diffusers.FluxTransformer2DModel.from_config(self.config)
        model.load_state_dict(self.transformer.state_dict(), assign=True)
        model.set_attention_backend("_native_cudnn")
        if compiled:
            model.compile_repeated_blocks(fullgraph=True)
        return model.eval()

    def _attention_us(self) -> float:
        joint = self.params.max_sequence_length + (
            self.params.width * self.params.height // self.spec.size_multiple**2
        )
        heads, head = self.config["num_attention_heads"], self.config["attention_head_dim"]
        q, k, v = (
            torch.randn(1, joint, heads, head, device=self.device, dtype=DTYPE) for _ in range(3)
        )
        attention = AttentionBackend("cudnn")
        return time_us(lambda: attention(q, k, v), iterations=30)


def gemm_time_us(x_shape: tuple[int, ...], weight_shape: tuple[int, ...]) -> float:
    """Median GPU microseconds of one linear with bias, on random data."""
    x = torch.randn(x_shape, device="cuda", dtype=DTYPE)
    weight = torch.randn(weight_shape, device="cuda", dtype=DTYPE)
    bias = torch.randn(weight_shape[0], device="cuda", dtype=DTYPE)
    return time_us(lambda: F.linear(x, weight, bias), iterations=30)
