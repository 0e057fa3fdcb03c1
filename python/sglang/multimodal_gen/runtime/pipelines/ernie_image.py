"""ERNIE-Image: prompt enhancer, Mistral-3 embeddings, flow-match Euler, AutoencoderKLFlux2."""

import torch

from sglang.multimodal_gen.configs.model_specs import ModelSpec
from sglang.multimodal_gen.configs.server_args import ServerArgs
from sglang.multimodal_gen.runtime.layers.attention import (
    make_attention,
    resolve_attention_backend,
)
from sglang.multimodal_gen.runtime.layers.layernorm import find_backend
from sglang.multimodal_gen.runtime.loader.component_loader import (
    DTYPES,
    ComponentLoader,
    params_from_config,
)
from sglang.multimodal_gen.runtime.loader.dummy import ByteTokenizer
from sglang.multimodal_gen.runtime.models.dits.ernie_image import (
    ErnieImageParams,
    ErnieImageTransformer2DModel,
)
from sglang.multimodal_gen.runtime.models.schedulers.flow_match_euler import FlowMatchEulerConfig
from sglang.multimodal_gen.runtime.pipelines.base import LoadProgress, Pipeline
from sglang.multimodal_gen.runtime.pipelines.residency import offloads_text_encoders
from sglang.multimodal_gen.runtime.pipelines.stages.mistral_text_encoding import (
    MistralTextEncodingStage,
)
from sglang.multimodal_gen.runtime.pipelines.stages.patched_latents import (
    PatchedDecodingStage,
    PatchedLatentPreparationStage,
)
from sglang.multimodal_gen.runtime.pipelines.stages.prompt_denoising import PromptDenoisingStage
from sglang.multimodal_gen.runtime.pipelines.stages.prompt_enhancement import PromptEnhancementStage
from sglang.multimodal_gen.runtime.pipelines.stages.static_timesteps import (
    StaticTimestepPreparationStage,
)


def build_ernie_image(
    loader: ComponentLoader, spec: ModelSpec, args: ServerArgs, on_load: LoadProgress
) -> Pipeline:
    """Load every component of an ERNIE-Image checkpoint and line up the stages."""
    from diffusers import AutoencoderKLFlux2
    from transformers import AutoTokenizer, Ministral3ForCausalLM, Mistral3Model

    device = loader.device
    precisions = {
        part: args.precision(part, device.type) for part in ("dit", "vae", "text_encoder")
    }
    dit, vae_dtype, text_dtype = (DTYPES[precisions[p]] for p in ("dit", "vae", "text_encoder"))
    offload = offloads_text_encoders(args, loader)
    text_device = torch.device("cpu") if offload else device

    on_load("transformer", 0, 4)
    denoising = load_ernie_denoising(loader, spec, args)
    params = denoising.transformer.params

    on_load("text_encoder", 1, 4)
    encoder = loader.transformers_model("text_encoder", Mistral3Model, text_dtype, text_device)
    tokenizer = loader.tokenizer("tokenizer", AutoTokenizer, ByteTokenizer(4096, bos=True))
    text = MistralTextEncodingStage(tokenizer, encoder, device, dit)

    on_load("pe", 2, 4)
    enhancement = []
    if spec.has_prompt_enhancer:
        pe = loader.transformers_model("pe", Ministral3ForCausalLM, text_dtype, text_device)
        pe_tokenizer = loader.tokenizer("pe_tokenizer", AutoTokenizer, ByteTokenizer(1, bos=True))
        enhancement = [PromptEnhancementStage(pe, pe_tokenizer, device)]

    on_load("vae", 3, 4)
    vae = loader.diffusers_model("vae", AutoencoderKLFlux2, vae_dtype, device)
    scheduler = FlowMatchEulerConfig.from_dict(loader.config("scheduler", "scheduler_config.json"))
    on_load("ready", 4, 4)

    latents = PatchedLatentPreparationStage(params.in_channels, spec.size_multiple, dit, device)
    timesteps = StaticTimestepPreparationStage(scheduler, device)
    decoding = PatchedDecodingStage(vae, spec.size_multiple)
    waiting = {text.name: (encoder,)} | {stage.name: (stage.enhancer,) for stage in enhancement}
    return Pipeline(
        spec=spec,
        transformer=denoising.transformer,
        stages=(*enhancement, text, latents, timesteps, denoising, decoding),
        device=device,
        attention_backend=denoising.transformer.attention.name,
        norm_backend=find_backend(device, dit),
        precisions=precisions,
        offloaded=waiting if offload else {},
    )


def load_ernie_denoising(
    loader: ComponentLoader, spec: ModelSpec, args: ServerArgs
) -> PromptDenoisingStage:
    """The transformer and its loop: all that a further rank of a picture needs."""
    device, parallel = loader.device, loader.parallel
    dit = DTYPES[args.precision("dit", device.type)]
    params = params_from_config(ErnieImageParams, loader.config("transformer"))
    backend = resolve_attention_backend(args.attention_backend, device, dit)
    attention = make_attention(backend, parallel.ulysses)
    transformer = loader.dit(lambda: ErnieImageTransformer2DModel(params, attention), dit)
    return PromptDenoisingStage(transformer, False, device, parallel=parallel)
