"""ERNIE-Image: prompt enhancer, Mistral-3 embeddings, flow-match Euler, AutoencoderKLFlux2."""

from sglang.multimodal_gen.configs.model_specs import ModelSpec
from sglang.multimodal_gen.configs.server_args import ServerArgs
from sglang.multimodal_gen.runtime.layers.layernorm import find_backend
from sglang.multimodal_gen.runtime.loader.component_loader import ComponentLoader
from sglang.multimodal_gen.runtime.loader.dummy import ByteTokenizer
from sglang.multimodal_gen.runtime.models.dits.ernie_image import (
    ErnieImageParams,
    ErnieImageTransformer2DModel,
)
from sglang.multimodal_gen.runtime.pipelines import loading
from sglang.multimodal_gen.runtime.pipelines.base import LoadProgress, Pipeline
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

    place = loading.Placement.of(loader, args)
    device, text_device = place.device, place.text_device
    dit, vae_dtype, text_dtype = place.dtypes

    on_load("transformer", 0, 4)
    denoising = load_ernie_denoising(loader, spec, args)
    transformer = denoising.transformer

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
    channels, scale = transformer.params.in_channels, spec.size_multiple
    latents = PatchedLatentPreparationStage(channels, scale, dit, device)
    timesteps = StaticTimestepPreparationStage(loading.scheduler(loader), device)
    decode = PatchedDecodingStage(vae, scale)
    on_load("ready", 4, 4)
    waiting = {text.name: (encoder,)} | {stage.name: (stage.enhancer,) for stage in enhancement}
    return Pipeline(
        spec=spec,
        transformer=transformer,
        stages=(*enhancement, text, latents, timesteps, denoising, decode),
        device=device,
        attention_backend=transformer.attention.name,
        norm_backend=find_backend(device, dit),
        precisions=place.precisions,
        offloaded=waiting if place.offloads else {},
    )


def load_ernie_denoising(
    loader: ComponentLoader, spec: ModelSpec, args: ServerArgs
) -> PromptDenoisingStage:
    """The transformer and its loop: all that a further rank of a picture needs."""
    transformer = loading.transformer(loader, args, ErnieImageParams, ErnieImageTransformer2DModel)
    return PromptDenoisingStage(transformer, False, loader.device, parallel=loader.parallel)
