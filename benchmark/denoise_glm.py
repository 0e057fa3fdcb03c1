"""The arms of bench_denoise.py for GLM-Image: two forwards a step, with and without the prior."""

import functools
from collections import Counter

import torch
from denoise_arms import DTYPE, DenoiseCase, gemm_time_us
from timing import time_us

from sglang.multimodal_gen.configs.model_specs import DUMMY_CONFIGS, read_model_spec
from sglang.multimodal_gen.configs.sampling_params import ImageRequest, SamplingParams
from sglang.multimodal_gen.runtime.layers.attention import AttentionBackend
from sglang.multimodal_gen.runtime.loader.component_loader import (
    ComponentLoader,
    params_from_config,
)
from sglang.multimodal_gen.runtime.models.dits.glm_image import (
    GlmImageParams,
    GlmImageTransformer2DModel,
)
from sglang.multimodal_gen.runtime.models.schedulers.flow_match_euler import FlowMatchEulerConfig
from sglang.multimodal_gen.runtime.pipelines.stages.glm_sampling import (
    GlmDenoisingStage,
    GlmLatentPreparationStage,
    GlmTimestepPreparationStage,
)
from sglang.multimodal_gen.runtime.pipelines.stages.state import BatchState, ImageState, TextEmbeds
from sglang.multimodal_gen.runtime.pipelines.step_clock import StepClock

TEXT_TOKENS = 264  # with 4096 image tokens the joint length of the requirement's kernels
FORWARDS_A_STEP = 2


class GlmDenoiseCase(DenoiseCase):
    """A dummy GLM-Image transformer with one prepared image."""

    def __init__(
        self,
        config_name: str,
        width: int,
        height: int,
        steps: int,
        device: torch.device | None = None,
        backend: str = "cudnn",
    ) -> None:
        self.device = device or torch.device("cuda")
        self.backend = backend
        folder = DUMMY_CONFIGS / config_name
        loader = ComponentLoader(folder, dummy=True, device=self.device)
        self.config = loader.config("transformer")
        self.scheduler = loader.config("scheduler", "scheduler_config.json")
        params = params_from_config(GlmImageParams, self.config)
        attention = AttentionBackend(backend)
        self.transformer = loader.dit(lambda: GlmImageTransformer2DModel(params, attention), DTYPE)
        self.spec = read_model_spec(folder)
        self.vae_scale = self.spec.size_multiple // (2 * params.patch_size)
        self.stage = GlmDenoisingStage(
            self.transformer, False, self.device, dtype=DTYPE, vae_scale=self.vae_scale
        )
        asked = SamplingParams(prompt="", width=width, height=height, num_inference_steps=steps)
        self.params = asked.resolve(self.spec)

    def floor_ms(self) -> float:
        """Milliseconds of all GEMMs and attentions of one step, each op timed alone, L2 cold.

        What is projected once an image is left out."""
        gemms: Counter = Counter()

        def note(module: torch.nn.Linear, inputs: tuple, _: torch.Tensor) -> None:
            gemms[(tuple(inputs[0].shape), tuple(module.weight.shape))] += 1

        hooks = [
            module.register_forward_hook(note)
            for name, module in self.transformer.named_modules()
            if isinstance(module, torch.nn.Linear)
            and not name.startswith(("glyph_projector", "prior_projector"))
        ]
        self.run("lossless", steps=1)
        for hook in hooks:
            hook.remove()
        gemm_us = sum(count * gemm_time_us(*shapes) for shapes, count in gemms.items())
        attentions = FORWARDS_A_STEP * self.config["num_layers"]
        return (gemm_us + attentions * self._attention_us()) / 1e3

    def _batch(self, params: SamplingParams) -> BatchState:
        """One image with random glyphs and prior of the published sizes, noise and schedule."""
        image = ImageState(ImageRequest(index=0, prompt="", negative_prompt="", seed=0))
        draw = torch.Generator(self.device).manual_seed(1)
        options = {"generator": draw, "device": self.device}
        width = self.config["text_embed_dim"]
        image.text, image.negative_text = (
            TextEmbeds(torch.randn(1, tokens, width, dtype=DTYPE, **options))
            for tokens in (TEXT_TOKENS, 1)
        )
        codebook = self.config["prior_vq_quantizer_codebook_size"]
        image.prior_ids = torch.randint(codebook, (1, self._image_tokens()), **options)
        batch = BatchState(params, [image], lambda label, done, total: None, true_cfg=True)
        channels = self.config["in_channels"]
        GlmLatentPreparationStage(channels, self.vae_scale, DTYPE, self.device)(batch)
        schedule = FlowMatchEulerConfig.from_dict(self.scheduler)
        GlmTimestepPreparationStage(schedule, self.device)(batch)
        return batch

    def _image_tokens(self) -> int:
        token = self.vae_scale * self.config["patch_size"]
        return (self.params.height // token) * (self.params.width // token)

    def _run_diffusers(self, arm: str, batch: BatchState) -> tuple[torch.Tensor, list[float]]:
        """The reference's loop over its own transformer and scheduler, on the same weights."""
        from diffusers import FlowMatchEulerDiscreteScheduler

        transformer = self._reference(arm == "diffusers-compile")
        image, params = batch.images[0], batch.params
        scheduler = FlowMatchEulerDiscreteScheduler.from_config(self.scheduler)
        scheduler.timesteps, scheduler.sigmas = image.timesteps, image.sigmas  # shown to be equal
        scheduler.set_begin_index(0)
        size = torch.tensor([[params.height, params.width]], dtype=DTYPE, device=self.device)
        latents, clock = image.latents, StepClock(self.device)
        for t in scheduler.timesteps:
            velocity, negative = (
                transformer(
                    hidden_states=latents.to(DTYPE),
                    encoder_hidden_states=text.tokens,
                    prior_token_id=image.prior_ids,
                    prior_token_drop=torch.full_like(image.prior_ids, drop, dtype=torch.bool),
                    timestep=t.expand(1) - 1,
                    target_size=size,
                    crop_coords=torch.zeros_like(size),
                    return_dict=False,
                )[0].float()
                for text, drop in ((image.text, False), (image.negative_text, True))
            )
            velocity = negative + params.true_cfg_scale * (velocity - negative)
            latents = scheduler.step(velocity, t, latents, return_dict=False)[0]
            clock.tick()
        return latents, clock.seconds()

    @functools.cache  # noqa: B019 - one case lives as long as the process
    def _reference(self, compiled: bool) -> torch.nn.Module:
        """diffusers' transformer sharing our weights; regionally compiled where asked."""
        import diffusers

        with torch.device("meta"):
            model = diffusers.GlmImageTransformer2DModel.from_config(self.config)
        model.load_state_dict(self.transformer.state_dict(), assign=True)
        if self.backend == "cudnn":
            model.set_attention_backend("_native_cudnn")
        if compiled:
            model.compile_repeated_blocks(fullgraph=True)
        return model.eval()

    def _attention_us(self) -> float:
        """Of the longer of the two forwards; the other lacks the text."""
        heads, head = self.config["num_attention_heads"], self.config["attention_head_dim"]
        shape = (1, TEXT_TOKENS + self._image_tokens(), heads, head)
        q, k, v = (torch.randn(shape, device=self.device, dtype=DTYPE) for _ in range(3))
        attention = AttentionBackend(self.backend)
        return time_us(lambda: attention(q, k, v), iterations=30)
