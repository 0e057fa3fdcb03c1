"""The case of bench_denoise.py for FLUX.1: embedded guidance, one forward a step."""

import torch
from denoise_arms import DenoiseCase

from sglang.multimodal_gen.configs.sampling_params import SamplingParams
from sglang.multimodal_gen.runtime.distributed.ulysses import UlyssesAttention
from sglang.multimodal_gen.runtime.layers.attention import AttentionBackend
from sglang.multimodal_gen.runtime.models.dits.flux import FluxParams, FluxTransformer2DModel
from sglang.multimodal_gen.runtime.pipelines.stages.denoising import DenoisingStage
from sglang.multimodal_gen.runtime.pipelines.stages.latent_preparation import LatentPreparationStage
from sglang.multimodal_gen.runtime.pipelines.stages.state import BatchState, ImageState, TextEmbeds
from sglang.multimodal_gen.runtime.pipelines.stages.timestep_preparation import (
    TimestepPreparationStage,
)


class FluxDenoiseCase(DenoiseCase):
    """FLUX.1, dev or schnell as the configs say; as many text tokens as the model's default."""

    params_class = FluxParams
    model_class = FluxTransformer2DModel
    reference_name = "FluxTransformer2DModel"

    def make_model(
        self, params: FluxParams, attention: AttentionBackend | UlyssesAttention
    ) -> FluxTransformer2DModel:
        return FluxTransformer2DModel(params, attention, self.parallel.tp)

    def make_stage(self) -> DenoisingStage:
        guidance = self.config["guidance_embeds"]
        return DenoisingStage(self.transformer, guidance, self.device, parallel=self.parallel)

    def prepare(self, batch: BatchState) -> None:
        config, image = self.config, batch.images[0]
        image.text = TextEmbeds(
            self.random_text(batch.params.max_sequence_length, config["joint_attention_dim"]),
            self.random_text(config["pooled_projection_dim"]),
        )
        channels, vae_scale = config["in_channels"] // 4, self.spec.size_multiple // 2
        LatentPreparationStage(channels, vae_scale, self.dtype, self.device)(batch)
        TimestepPreparationStage(self.schedule, self.device)(batch)

    def reference_velocity(
        self,
        transformer: torch.nn.Module,
        latents: torch.Tensor,
        timestep: torch.Tensor,
        image: ImageState,
        params: SamplingParams,
    ) -> torch.Tensor:
        guidance = torch.full([1], params.guidance_scale, device=self.device)
        tokens = image.text.tokens
        return transformer(
            hidden_states=latents,
            timestep=timestep.expand(1).to(self.dtype) / 1000,
            guidance=guidance if self.config["guidance_embeds"] else None,
            pooled_projections=image.text.pooled,
            encoder_hidden_states=tokens,
            txt_ids=torch.zeros(tokens.shape[1], 3, device=self.device, dtype=self.dtype),
            img_ids=image.img_ids,
            return_dict=False,
        )[0]
