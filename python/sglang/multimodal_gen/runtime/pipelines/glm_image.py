"""GLM-Image: autoregressive prior, glyph embeddings, flow-match Euler, AutoencoderKL."""

import torch

from sglang.multimodal_gen.configs.model_specs import ModelSpec
from sglang.multimodal_gen.configs.server_args import ServerArgs
from sglang.multimodal_gen.runtime.layers.attention import (
    make_attention,
    resolve_attention_backend,
)
from sglang.multimodal_gen.runtime.loader.component_loader import (
    DTYPES,
    ComponentLoader,
    params_from_config,
)
from sglang.multimodal_gen.runtime.loader.dummy_glm import GlmByteProcessor
from sglang.multimodal_gen.runtime.loader.weights import CheckpointError
from sglang.multimodal_gen.runtime.models.dits.glm_image import (
    GlmImageParams,
    GlmImageTransformer2DModel,
)
from sglang.multimodal_gen.runtime.models.glm_image_ar import GlmImageDecoder
from sglang.multimodal_gen.runtime.models.glm_image_ar_sampling import SamplingRule
from sglang.multimodal_gen.runtime.models.schedulers.flow_match_euler import FlowMatchEulerConfig
from sglang.multimodal_gen.runtime.pipelines.base import LoadProgress, Pipeline
from sglang.multimodal_gen.runtime.pipelines.residency import offloads_text_encoders
from sglang.multimodal_gen.runtime.pipelines.stages.glm_conditions import GlmConditionLatentStage
from sglang.multimodal_gen.runtime.pipelines.stages.glm_sampling import (
    GlmDecodingStage,
    GlmDenoisingStage,
    GlmTimestepPreparationStage,
)
from sglang.multimodal_gen.runtime.pipelines.stages.glyph_encoding import GlyphEncodingStage
from sglang.multimodal_gen.runtime.pipelines.stages.prior_tokens import (
    PIXELS_A_TOKEN,
    UPSAMPLING,
    GlmImageARStage,
)

PATCH_SIZE = 2
BYT5_FILES = ("tokenizer_config.json",)  # its vocabulary is the bytes


def build_glm_image(
    loader: ComponentLoader, spec: ModelSpec, args: ServerArgs, on_load: LoadProgress
) -> Pipeline:
    """Load every component of a GLM-Image checkpoint and line up the stages."""
    from diffusers import AutoencoderKL
    from transformers import ByT5Tokenizer, GlmImageForConditionalGeneration, T5EncoderModel

    device = loader.device
    precisions = {
        part: args.precision(part, device.type) for part in ("dit", "vae", "text_encoder")
    }
    dit, vae_dtype, text_dtype = (DTYPES[precisions[p]] for p in ("dit", "vae", "text_encoder"))
    offload = offloads_text_encoders(args, loader)
    text_device = torch.device("cpu") if offload else device

    on_load("transformer", 0, 4)
    denoising = load_glm_denoising(loader, spec, args)
    params, vae_scale = denoising.transformer.params, denoising.vae_scale

    on_load("vision_language_encoder", 1, 4)
    ar = loader.transformers_model(
        "vision_language_encoder", GlmImageForConditionalGeneration, text_dtype, text_device
    )
    prior = _prior_stage(loader, params, ar)

    on_load("text_encoder", 2, 4)
    t5 = loader.transformers_model("text_encoder", T5EncoderModel, text_dtype, text_device)
    tokenizer = loader.tokenizer("tokenizer", ByT5Tokenizer, ByT5Tokenizer(), BYT5_FILES)

    on_load("vae", 3, 4)
    vae = loader.diffusers_model("vae", AutoencoderKL, vae_dtype, device)
    scheduler = FlowMatchEulerConfig.from_dict(loader.config("scheduler", "scheduler_config.json"))
    on_load("ready", 4, 4)

    glyphs = GlyphEncodingStage(tokenizer, t5, device, dit)
    latents = GlmConditionLatentStage(params.in_channels, vae_scale, dit, device, vae=vae)
    timesteps = GlmTimestepPreparationStage(scheduler, device)
    return Pipeline(
        spec=spec,
        transformer=denoising.transformer,
        stages=(prior, glyphs, latents, timesteps, denoising, GlmDecodingStage(vae, vae_scale)),
        device=device,
        attention_backend=denoising.transformer.attention.name,
        precisions=precisions,
        offloaded={prior.name: (ar,), glyphs.name: (t5,)} if offload else {},
    )


def load_glm_denoising(
    loader: ComponentLoader, spec: ModelSpec, args: ServerArgs
) -> GlmDenoisingStage:
    """The transformer and its loop: all that a further rank of a picture needs."""
    device, parallel = loader.device, loader.parallel
    dit = DTYPES[args.precision("dit", device.type)]
    params = params_from_config(GlmImageParams, loader.config("transformer"))
    vae_scale = _vae_scale(spec, params)
    backend = resolve_attention_backend(args.attention_backend, device, dit)
    attention = make_attention(backend, parallel.ulysses)
    transformer = loader.dit(lambda: GlmImageTransformer2DModel(params, attention), dit)
    return GlmDenoisingStage(
        transformer, False, device, parallel=parallel, dtype=dit, vae_scale=vae_scale
    )


def _prior_stage(
    loader: ComponentLoader, params: GlmImageParams, ar: torch.nn.Module
) -> GlmImageARStage:
    from transformers import GlmImageProcessor

    stand_in = GlmByteProcessor(ar.config.image_start_token_id, ar.config)
    processor = loader.tokenizer("processor", GlmImageProcessor, stand_in)
    return GlmImageARStage(
        processor=processor,
        model=ar,
        decoder=GlmImageDecoder(ar, SamplingRule.from_generation_config(ar.generation_config)),
        codebook=params.prior_vq_quantizer_codebook_size,
        device=loader.device,
    )


def _vae_scale(spec: ModelSpec, params: GlmImageParams) -> int:
    """Pixels a latent. Raises CheckpointError when the tokens of prior and transformer clash."""
    scale = spec.size_multiple // (UPSAMPLING * PATCH_SIZE)
    if (spec.size_multiple, params.patch_size) != (PIXELS_A_TOKEN, PATCH_SIZE):
        raise CheckpointError(
            f"got a VAE that scales by {scale} and patch_size {params.patch_size}, expected"
            f" {PIXELS_A_TOKEN // UPSAMPLING // PATCH_SIZE} and {PATCH_SIZE}: the prior has one"
            f" token for {PIXELS_A_TOKEN}x{PIXELS_A_TOKEN} pixels"
        )
    return scale
