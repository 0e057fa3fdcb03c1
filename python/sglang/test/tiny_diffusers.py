"""Tiny random-weight checkpoints of pipelines that only diffusers runs: SDXL, Qwen-Image, Z-Image.

In diffusers layout, with real tokenizers built on the spot. Weights depend only on `seed`.
"""

from pathlib import Path
from typing import Any

from sglang.test.tiny_checkpoints import VAE_CONFIG, fill_at_unit_scale
from sglang.test.tiny_tokenizers import clip_tiny_tokenizer

WIDTH = 32  # of the text encoders
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_sdxl(folder: Path, *, seed: int = 0) -> Path:
    """A Stable Diffusion XL checkpoint; sizes are multiples of 8, 64x64 is the default."""
    from diffusers import (
        AutoencoderKL,
        EulerDiscreteScheduler,
        StableDiffusionXLPipeline,
        UNet2DConditionModel,
    )

    tokenizer = clip_tiny_tokenizer()
    pipeline = StableDiffusionXLPipeline(
        vae=AutoencoderKL(**_SDXL_VAE),
        text_encoder=_clip(len(tokenizer), projected=False),
        text_encoder_2=_clip(len(tokenizer), projected=True),
        tokenizer=tokenizer,
        tokenizer_2=tokenizer,
        unet=UNet2DConditionModel(**_SDXL_UNET),
        scheduler=EulerDiscreteScheduler(
            beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", steps_offset=1
        ),
        force_zeros_for_empty_prompt=True,
        add_watermarker=False,
    )
    return _save(pipeline, folder, seed)


def write_tiny_qwen_image(folder: Path, *, seed: int = 0) -> Path:
    """A Qwen-Image checkpoint; sizes are multiples of 16."""
    from diffusers import (
        AutoencoderKLQwenImage,
        FlowMatchEulerDiscreteScheduler,
        QwenImagePipeline,
        QwenImageTransformer2DModel,
    )
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    tokenizer = _qwen_tokenizer()
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 32}
    config = Qwen2_5_VLConfig(
        text_config=_text_config(len(tokenizer)) | {"rope_parameters": _MROPE},
        vision_config=vision | {"out_hidden_size": WIDTH},
    )
    vae = {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
    pipeline = QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=AutoencoderKLQwenImage(**vae, latents_mean=[0.0] * 4, latents_std=[1.0] * 4),
        text_encoder=Qwen2_5_VLForConditionalGeneration(config),
        tokenizer=tokenizer,
        transformer=QwenImageTransformer2DModel(
            in_channels=16,
            out_channels=4,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=WIDTH,
            axes_dims_rope=(4, 6, 6),
        ),
    )
    return _save(pipeline, folder, seed)


def write_tiny_z_image(folder: Path, *, seed: int = 0) -> Path:
    """A Z-Image checkpoint; sizes are multiples of 16."""
    from diffusers import (
        AutoencoderKL,
        FlowMatchEulerDiscreteScheduler,
        ZImagePipeline,
        ZImageTransformer2DModel,
    )
    from transformers import Qwen3Config, Qwen3Model

    tokenizer = _qwen_tokenizer()
    pipeline = ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=AutoencoderKL(**VAE_CONFIG),
        text_encoder=Qwen3Model(Qwen3Config(**_text_config(len(tokenizer)), head_dim=16)),
        tokenizer=tokenizer,
        transformer=ZImageTransformer2DModel(
            in_channels=4,
            dim=WIDTH,
            n_layers=2,
            n_refiner_layers=1,
            n_heads=2,
            n_kv_heads=2,
            cap_feat_dim=WIDTH,
            axes_dims=[4, 6, 6],
            axes_lens=[512, 64, 64],
        ),
    )
    return _save(pipeline, folder, seed)


_SDXL_VAE: dict[str, Any] = VAE_CONFIG | {
    "use_quant_conv": True,
    "use_post_quant_conv": True,
    "shift_factor": None,
    "scaling_factor": 0.13025,
}
_SDXL_UNET: dict[str, Any] = {
    "sample_size": 8,
    "in_channels": 4,
    "out_channels": 4,
    "block_out_channels": (16, 32),
    "layers_per_block": 1,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "norm_num_groups": 8,
    "attention_head_dim": (2, 4),
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": WIDTH + 6 * 8,
    "cross_attention_dim": 2 * WIDTH,
}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}


def _text_config(vocabulary: int) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 2048,
    }


def _clip(vocabulary: int, *, projected: bool) -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=vocabulary,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        projection_dim=WIDTH,
        num_hidden_layers=3,
        num_attention_heads=2,
        bos_token_id=0,
        pad_token_id=1,
        eos_token_id=2,
    )
    return CLIPTextModelWithProjection(config) if projected else CLIPTextModel(config)


def _qwen_tokenizer() -> Any:
    """Byte-level, so that any text has ids."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    tokens = [*sorted(ByteLevel.alphabet()), *SPECIAL]
    tokenizer = Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=[],
        additional_special_tokens=list(SPECIAL[1:]),
        padding_side="right",
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _save(pipeline: Any, folder: Path, seed: int) -> Path:
    import torch

    models = [part for part in pipeline.components.values() if isinstance(part, torch.nn.Module)]
    for i, model in enumerate(models):
        fill_at_unit_scale(model, 1000 * seed + i)
    pipeline.save_pretrained(folder)
    return Path(folder)
