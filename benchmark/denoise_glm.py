"""The case of bench_denoise.py for GLM-Image: true CFG, with and without the prior."""

import torch
from denoise_arms import DenoiseCase, classifier_free_guidance, negative_text

from sglang.multimodal_gen.configs.sampling_params import SamplingParams
from sglang.multimodal_gen.runtime.models.dits.glm_image import (
    GlmImageParams,
    GlmImageTransformer2DModel,
)
from sglang.multimodal_gen.runtime.pipelines.stages.denoising import DenoisingStage
from sglang.multimodal_gen.runtime.pipelines.stages.glm_sampling import (
    GlmDenoisingStage,
    GlmLatentPreparationStage,
    GlmTimestepPreparationStage,
)
from sglang.multimodal_gen.runtime.pipelines.stages.state import BatchState, ImageState, TextEmbeds

TEXT_TOKENS = 264  # with 4096 image tokens the joint length of the requirement's kernels
NEGATIVE_TOKENS = 1  # the glyphs of an empty prompt


class GlmDenoiseCase(DenoiseCase):
    """GLM-Image with random glyphs and a random prior."""

    params_class = GlmImageParams
    model_class = GlmImageTransformer2DModel
    reference_name = "GlmImageTransformer2DModel"

    @property
    def vae_scale(self) -> int:
        return self.spec.size_multiple // (2 * self.config["patch_size"])

    def make_stage(self) -> DenoisingStage:
        return GlmDenoisingStage(
            self.transformer,
            False,
            self.device,
            parallel=self.parallel,
            dtype=self.dtype,
            vae_scale=self.vae_scale,
        )

    def prepare(self, batch: BatchState) -> None:
        image, config = batch.images[0], self.config
        image.text = TextEmbeds(self.random_text(TEXT_TOKENS, config["text_embed_dim"]))
        negative = TextEmbeds(self.random_text(NEGATIVE_TOKENS, config["text_embed_dim"]))
        image.negative_text = negative_text(batch, negative)
        token = self.vae_scale * config["patch_size"]
        tokens = (batch.params.height // token) * (batch.params.width // token)
        draw = torch.Generator(self.device).manual_seed(1)
        image.prior_ids = torch.randint(
            config["prior_vq_quantizer_codebook_size"],
            (1, tokens),
            generator=draw,
            device=self.device,
        )
        channels = config["in_channels"]
        GlmLatentPreparationStage(channels, self.vae_scale, self.dtype, self.device)(batch)
        GlmTimestepPreparationStage(self.schedule, self.device)(batch)

    def reference_velocity(
        self,
        transformer: torch.nn.Module,
        latents: torch.Tensor,
        timestep: torch.Tensor,
        image: ImageState,
        params: SamplingParams,
    ) -> torch.Tensor:
        size = torch.tensor([[params.height, params.width]], dtype=self.dtype, device=self.device)

        def velocity(text: TextEmbeds, drop_prior: bool) -> torch.Tensor:
            return transformer(
                hidden_states=latents.to(self.dtype),
                encoder_hidden_states=text.tokens,
                prior_token_id=image.prior_ids,
                prior_token_drop=torch.full_like(image.prior_ids, drop_prior, dtype=torch.bool),
                timestep=timestep.expand(1) - 1,
                target_size=size,
                crop_coords=torch.zeros_like(size),
                return_dict=False,
            )[0].float()

        positive = velocity(image.text, drop_prior=False)
        if image.negative_text is None:
            return positive
        negative = velocity(image.negative_text, drop_prior=True)
        return classifier_free_guidance(positive, negative, params.true_cfg_scale)
