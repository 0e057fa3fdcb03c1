"""Tiny random-weight checkpoints in diffusers layout, for tests: made in seconds, below 5 MB.

They have every component of the published model, with real tokenizers built on the spot, so
they run through the same loader and pipeline. The pictures mean nothing, but are not constant.
"""

import math
from pathlib import Path
from typing import Any

import torch

from sglang.test.tiny_tokenizers import CLIP_LENGTH, clip_tiny_tokenizer, t5_tiny_tokenizer

TEXT_WIDTH = 32
LATENT_CHANNELS = 4
ROPE_AXES = {2: (8, 12, 12), 4: (4, 6, 6)}  # by heads


def write_tiny_flux(
    folder: Path,
    *,
    guidance_embeds: bool,
    seed: int = 0,
    num_layers: int = 2,
    num_single_layers: int = 2,
    heads: int = 2,
    max_shard_size: str = "5GB",
) -> Path:
    """Write a FLUX.1 checkpoint into `folder` and return it.

    With `guidance_embeds` it is a "dev" (dynamic shift, guidance embedding), without a "schnell".
    The VAE scales by 8, so sizes are multiples of 16. All weights are float32 and depend only on
    `seed` and the layer counts. A small `max_shard_size` ("100KB") makes sharded components.
    """
    from diffusers import AutoencoderKL, FluxPipeline, FluxTransformer2DModel

    clip_tokenizer, t5_tokenizer = clip_tiny_tokenizer(), t5_tiny_tokenizer()
    pipeline = FluxPipeline(
        scheduler=_scheduler(guidance_embeds),
        text_encoder=_clip(len(clip_tokenizer)),
        tokenizer=clip_tokenizer,
        text_encoder_2=_t5(len(t5_tokenizer)),
        tokenizer_2=t5_tokenizer,
        transformer=FluxTransformer2DModel(
            **transformer_config(guidance_embeds, num_layers, num_single_layers, heads)
        ),
        vae=AutoencoderKL(**VAE_CONFIG),
    )
    parts = ("text_encoder", "text_encoder_2", "transformer", "vae")
    for i, name in enumerate(parts):
        fill_at_unit_scale(getattr(pipeline, name), 1000 * seed + i)
    pipeline.save_pretrained(folder, max_shard_size=max_shard_size)
    return Path(folder)


VAE_CONFIG: dict[str, Any] = {
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (8, 8, 16, 16),
    "layers_per_block": 1,
    "latent_channels": LATENT_CHANNELS,
    "norm_num_groups": 4,
    "sample_size": 64,
    "scaling_factor": 0.3611,
    "shift_factor": 0.1159,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}


def transformer_config(
    guidance_embeds: bool, num_layers: int = 2, num_single_layers: int = 2, heads: int = 2
) -> dict[str, Any]:
    """The options of a tiny `FluxTransformer2DModel`: hidden size 64, two or four heads."""
    return {
        "in_channels": 4 * LATENT_CHANNELS,
        "num_layers": num_layers,
        "num_single_layers": num_single_layers,
        "attention_head_dim": 64 // heads,
        "num_attention_heads": heads,
        "joint_attention_dim": TEXT_WIDTH,
        "pooled_projection_dim": TEXT_WIDTH,
        "guidance_embeds": guidance_embeds,
        "axes_dims_rope": ROPE_AXES[heads],
    }


@torch.no_grad()
def fill_at_unit_scale(module: torch.nn.Module, seed: int) -> None:
    """Fill every parameter, in name order, so that activations neither vanish nor explode.

    Matrices are normal with variance 1 / fan-in, a norm's gain is near 1, biases near 0. The values
    are drawn on the parameters' device.
    """
    device = next(module.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in sorted(module.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator, device=device)
        if parameter.ndim > 1:
            fan_in = 1 if "embedding" in name or "shared" in name else parameter[0].numel()
            parameter.copy_(noise / math.sqrt(fan_in))
        else:
            parameter.copy_(0.1 * noise + (1.0 if name.endswith("weight") else 0.0))


def _clip(vocab_size: int) -> torch.nn.Module:
    from transformers import CLIPTextConfig, CLIPTextModel

    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=vocab_size,
            hidden_size=TEXT_WIDTH,
            intermediate_size=2 * TEXT_WIDTH,
            projection_dim=TEXT_WIDTH,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=CLIP_LENGTH,
            bos_token_id=0,
            pad_token_id=1,
            eos_token_id=2,  # as published: means "pool at the highest id"
        )
    )


def _t5(vocab_size: int) -> torch.nn.Module:
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(
        T5Config(
            vocab_size=vocab_size,
            d_model=TEXT_WIDTH,
            d_kv=TEXT_WIDTH // 2,
            d_ff=2 * TEXT_WIDTH,
            num_layers=2,
            num_heads=2,
            feed_forward_proj="gated-gelu",
            tie_word_embeddings=False,
        )
    )


def _scheduler(dynamic: bool) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(
        shift=3.0 if dynamic else 1.0,
        use_dynamic_shifting=dynamic,
        base_shift=0.5,
        max_shift=1.15,
        base_image_seq_len=256,
        max_image_seq_len=4096,
    )
