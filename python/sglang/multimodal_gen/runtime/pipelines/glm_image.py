"""GLM-Image: autoregressive prior, glyph embeddings, flow-match Euler, AutoencoderKL."""

from sglang.multimodal_gen.configs.model_specs import ModelSpec
from sglang.multimodal_gen.configs.server_args import ServerArgs
from sglang.multimodal_gen.runtime.loader.component_loader import ComponentLoader
from sglang.multimodal_gen.runtime.models.dits.glm_image import (
    GlmImageParams,
    GlmImageTransformer2DModel,
)
from sglang.multimodal_gen.runtime.pipelines import loading
from sglang.multimodal_gen.runtime.pipelines.base import LoadProgress, Pipeline
from sglang.multimodal_gen.runtime.pipelines.glm_prior import checked_vae_scale, load_glm_prior
from sglang.multimodal_gen.runtime.pipelines.stages.glm_conditions import GlmConditionLatentStage
from sglang.multimodal_gen.runtime.pipelines.stages.glm_sampling import (
    GlmDecodingStage,
    GlmDenoisingStage,
    GlmTimestepPreparationStage,
)
from sglang.multimodal_gen.runtime.pipelines.stages.glyph_encoding import GlyphEncodingStage

BYT5_FILES = ("tokenizer_config.json",)  # its vocabulary is the bytes


def build_glm_image(
    loader: ComponentLoader, spec: ModelSpec, args: ServerArgs, on_load: LoadProgress
) -> Pipeline:
    """Load every component of a GLM-Image checkpoint and line up the stages."""
    from diffusers import AutoencoderKL
    from transformers import ByT5Tokenizer, T5EncoderModel

    place = loading.Placement.of(loader, args)
    device, text_device = place.device, place.text_device
    dit, vae_dtype, text_dtype = place.dtypes

    on_load("transformer", 0, 4)
    denoising = load_glm_denoising(loader, spec, args)
    transformer, scale = denoising.transformer, denoising.vae_scale

    on_load("vision_language_encoder", 1, 4)
    codebook = transformer.params.prior_vq_quantizer_codebook_size
    prior = load_glm_prior(loader, codebook, text_dtype, text_device)

    on_load("text_encoder", 2, 4)
    t5 = loader.transformers_model("text_encoder", T5EncoderModel, text_dtype, text_device)
    tokenizer = loader.tokenizer("tokenizer", ByT5Tokenizer, ByT5Tokenizer(), BYT5_FILES)
    glyphs = GlyphEncodingStage(tokenizer, t5, device, dit)

    on_load("vae", 3, 4)
    vae = loader.diffusers_model("vae", AutoencoderKL, vae_dtype, device)
    channels = transformer.params.in_channels
    latents = GlmConditionLatentStage(channels, scale, dit, device, vae=vae)
    timesteps = GlmTimestepPreparationStage(loading.scheduler(loader), device)
    on_load("ready", 4, 4)

    return Pipeline(
        spec=spec,
        transformer=transformer,
        stages=(prior, glyphs, latents, timesteps, denoising, GlmDecodingStage(vae, scale)),
        device=device,
        attention_backend=transformer.attention.name,
        precisions=place.precisions,
        offloaded={prior.name: (prior.model,), glyphs.name: (t5,)} if place.offloads else {},
    )


def load_glm_denoising(
    loader: ComponentLoader, spec: ModelSpec, args: ServerArgs
) -> GlmDenoisingStage:
    """The transformer and its loop: all that a further rank of a picture needs."""
    scale = checked_vae_scale(loader, spec)
    transformer = loading.transformer(loader, args, GlmImageParams, GlmImageTransformer2DModel)
    return GlmDenoisingStage(
        transformer,
        False,
        loader.device,
        parallel=loader.parallel,
        dtype=loading.dit_dtype(loader, args),
        vae_scale=scale,
    )
