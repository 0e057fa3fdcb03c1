"""FLUX.1: CLIP and T5 embeddings, packed latents, flow-match Euler, AutoencoderKL."""

from sglang.multimodal_gen.configs.json_config import require_number
from sglang.multimodal_gen.configs.model_specs import ModelSpec
from sglang.multimodal_gen.configs.server_args import ServerArgs
from sglang.multimodal_gen.runtime.loader.component_loader import ComponentLoader
from sglang.multimodal_gen.runtime.loader.dummy import ByteTokenizer
from sglang.multimodal_gen.runtime.models.dits.flux import FluxParams, FluxTransformer2DModel
from sglang.multimodal_gen.runtime.pipelines import loading
from sglang.multimodal_gen.runtime.pipelines.base import LoadProgress, Pipeline
from sglang.multimodal_gen.runtime.pipelines.stages.decoding import DecodingStage
from sglang.multimodal_gen.runtime.pipelines.stages.denoising import DenoisingStage
from sglang.multimodal_gen.runtime.pipelines.stages.image_to_image import (
    ImageLatentPreparationStage,
    StrengthTimestepPreparationStage,
)
from sglang.multimodal_gen.runtime.pipelines.stages.text_encoding import TextEncodingStage


def build_flux(
    loader: ComponentLoader, spec: ModelSpec, args: ServerArgs, on_load: LoadProgress
) -> Pipeline:
    """Load every component of a FLUX.1 checkpoint and line up the stages."""
    from diffusers import AutoencoderKL
    from transformers import CLIPTextModel, CLIPTokenizer, T5EncoderModel, T5TokenizerFast

    place = loading.Placement.of(loader, args)
    device, text_device = place.device, place.text_device
    dit, vae_dtype, text_dtype = place.dtypes
    scale = spec.size_multiple // 2

    on_load("transformer", 0, 4)
    loader.check_class("scheduler", "FlowMatchEulerDiscreteScheduler")
    for name in ("scaling_factor", "shift_factor"):
        require_number(loader.config("vae"), name, "vae/config.json")
    denoising = load_flux_denoising(loader, spec, args)
    transformer = denoising.transformer

    on_load("text_encoder", 1, 4)
    clip = loader.transformers_model("text_encoder", CLIPTextModel, text_dtype, text_device)
    clip_tokenizer = loader.tokenizer(
        "tokenizer",
        CLIPTokenizer,
        ByteTokenizer(77, bos=True),
        positions=clip.config.max_position_embeddings,
    )

    on_load("text_encoder_2", 2, 4)
    t5 = loader.transformers_model("text_encoder_2", T5EncoderModel, text_dtype, text_device)
    t5_tokenizer = loader.tokenizer("tokenizer_2", T5TokenizerFast, ByteTokenizer(512, bos=False))
    text = TextEncodingStage(clip_tokenizer, clip, t5_tokenizer, t5, device, dit)

    on_load("vae", 3, 4)
    vae = loader.diffusers_model("vae", AutoencoderKL, vae_dtype, device)
    channels = transformer.params.in_channels // 4
    latents = ImageLatentPreparationStage(channels, scale, dit, device, vae=vae)
    timesteps = StrengthTimestepPreparationStage(loading.scheduler(loader), device)
    on_load("ready", 4, 4)

    return Pipeline(
        spec=spec,
        transformer=transformer,
        stages=(text, latents, timesteps, denoising, DecodingStage(vae, scale)),
        device=device,
        attention_backend=transformer.attention.name,
        precisions=place.precisions,
        offloaded={text.name: (clip, t5)} if place.offloads else {},
    )


def load_flux_denoising(
    loader: ComponentLoader, spec: ModelSpec, args: ServerArgs
) -> DenoisingStage:
    """The transformer and its loop: all that a further rank of a picture needs."""
    loader.check_class("transformer", "FluxTransformer2DModel")
    transformer = loading.transformer(
        loader, args, FluxParams, lambda p, a: FluxTransformer2DModel(p, a, loader.parallel.tp)
    )
    guided = transformer.params.guidance_embeds
    return DenoisingStage(transformer, guided, loader.device, parallel=loader.parallel)
