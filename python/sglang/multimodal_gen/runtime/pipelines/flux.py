"""FLUX.1: CLIP and T5 embeddings, packed latents, flow-match Euler, AutoencoderKL."""

import torch

from sglang.multimodal_gen.configs.json_config import require_number
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
from sglang.multimodal_gen.runtime.loader.dummy import ByteTokenizer
from sglang.multimodal_gen.runtime.loader.weights import CheckpointError
from sglang.multimodal_gen.runtime.models.dits.flux import FluxParams, FluxTransformer2DModel
from sglang.multimodal_gen.runtime.models.schedulers.flow_match_euler import FlowMatchEulerConfig
from sglang.multimodal_gen.runtime.pipelines.base import LoadProgress, Pipeline
from sglang.multimodal_gen.runtime.pipelines.residency import offloads_text_encoders
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

    device = loader.device
    precisions = {
        part: args.precision(part, device.type) for part in ("dit", "vae", "text_encoder")
    }
    dit, vae_dtype, text_dtype = (DTYPES[precisions[p]] for p in ("dit", "vae", "text_encoder"))
    offload = offloads_text_encoders(args, loader)
    text_device = torch.device("cpu") if offload else device

    on_load("transformer", 0, 4)
    loader.check_class("scheduler", "FlowMatchEulerDiscreteScheduler")
    for name in ("scaling_factor", "shift_factor"):
        require_number(loader.config("vae"), name, "vae/config.json")
    denoising = load_flux_denoising(loader, spec, args)
    params = denoising.transformer.params

    on_load("text_encoder", 1, 4)
    clip = loader.transformers_model("text_encoder", CLIPTextModel, text_dtype, text_device)
    clip_tokenizer = loader.tokenizer("tokenizer", CLIPTokenizer, ByteTokenizer(77, bos=True))
    if clip_tokenizer.model_max_length > clip.config.max_position_embeddings:
        raise CheckpointError(
            f"{loader.folder}/tokenizer: got model_max_length {clip_tokenizer.model_max_length},"
            f" expected at most the text encoder's {clip.config.max_position_embeddings} positions"
        )

    on_load("text_encoder_2", 2, 4)
    t5 = loader.transformers_model("text_encoder_2", T5EncoderModel, text_dtype, text_device)
    t5_tokenizer = loader.tokenizer("tokenizer_2", T5TokenizerFast, ByteTokenizer(512, bos=False))

    on_load("vae", 3, 4)
    vae = loader.diffusers_model("vae", AutoencoderKL, vae_dtype, device)
    vae_scale = spec.size_multiple // 2
    scheduler = FlowMatchEulerConfig.from_dict(loader.config("scheduler", "scheduler_config.json"))
    on_load("ready", 4, 4)

    text = TextEncodingStage(clip_tokenizer, clip, t5_tokenizer, t5, device, dit)
    latents = ImageLatentPreparationStage(params.in_channels // 4, vae_scale, dit, device, vae=vae)
    timesteps = StrengthTimestepPreparationStage(scheduler, device)
    decoding = DecodingStage(vae, vae_scale)
    return Pipeline(
        spec=spec,
        transformer=denoising.transformer,
        stages=(text, latents, timesteps, denoising, decoding),
        device=device,
        attention_backend=denoising.transformer.attention.name,
        precisions=precisions,
        offloaded={text.name: (clip, t5)} if offload else {},
    )


def load_flux_denoising(
    loader: ComponentLoader, spec: ModelSpec, args: ServerArgs
) -> DenoisingStage:
    """The transformer and its loop: all that a further rank of a picture needs."""
    device, parallel = loader.device, loader.parallel
    dit = DTYPES[args.precision("dit", device.type)]
    loader.check_class("transformer", "FluxTransformer2DModel")
    params = params_from_config(FluxParams, loader.config("transformer"))
    backend = resolve_attention_backend(args.attention_backend, device, dit)
    attention = make_attention(backend, parallel.ulysses)
    transformer = loader.dit(lambda: FluxTransformer2DModel(params, attention, parallel.tp), dit)
    return DenoisingStage(transformer, params.guidance_embeds, device, parallel=parallel)
