"""GLM-Image's prior: loading it, and whether its tokens fit the transformer's."""

import torch

from sglang.multimodal_gen.configs.model_specs import ModelSpec
from sglang.multimodal_gen.runtime.loader.component_loader import (
    ComponentLoader,
    params_from_config,
)
from sglang.multimodal_gen.runtime.loader.dummy_glm import GlmByteProcessor
from sglang.multimodal_gen.runtime.loader.weights import CheckpointError
from sglang.multimodal_gen.runtime.models.dits.glm_image import GlmImageParams
from sglang.multimodal_gen.runtime.models.glm_image_ar import GlmImageDecoder
from sglang.multimodal_gen.runtime.models.glm_image_ar_sampling import SamplingRule
from sglang.multimodal_gen.runtime.pipelines.stages.prior_tokens import (
    PIXELS_A_TOKEN,
    UPSAMPLING,
    GlmImageARStage,
)

PATCH_SIZE = 2


def load_glm_prior(
    loader: ComponentLoader, codebook: int, dtype: torch.dtype, device: torch.device
) -> GlmImageARStage:
    """The stage that names the prior's tokens, out of `codebook`; its weights wait on `device`."""
    from transformers import GlmImageForConditionalGeneration, GlmImageProcessor

    ar = loader.transformers_model(
        "vision_language_encoder", GlmImageForConditionalGeneration, dtype, device
    )
    stand_in = GlmByteProcessor(ar.config.image_start_token_id, ar.config)
    return GlmImageARStage(
        processor=loader.tokenizer("processor", GlmImageProcessor, stand_in),
        model=ar,
        decoder=GlmImageDecoder(ar, SamplingRule.from_generation_config(ar.generation_config)),
        codebook=codebook,
        device=loader.device,
    )


def checked_vae_scale(loader: ComponentLoader, spec: ModelSpec) -> int:
    """Pixels a latent. Raises CheckpointError when the tokens of prior and transformer clash."""
    patch_size = params_from_config(GlmImageParams, loader.config("transformer")).patch_size
    scale = spec.size_multiple // (UPSAMPLING * PATCH_SIZE)
    if (spec.size_multiple, patch_size) != (PIXELS_A_TOKEN, PATCH_SIZE):
        raise CheckpointError(
            f"got a VAE that scales by {scale} and patch_size {patch_size}, expected"
            f" {PIXELS_A_TOKEN // UPSAMPLING // PATCH_SIZE} and {PATCH_SIZE}: the prior has one"
            f" token for {PIXELS_A_TOKEN}x{PIXELS_A_TOKEN} pixels"
        )
    return scale
