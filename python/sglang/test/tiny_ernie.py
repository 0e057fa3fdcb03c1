"""A tiny random-weight ERNIE-Image checkpoint in diffusers layout, for tests: below 2 MB.

Every component of the published model is there, with or without the prompt enhancer. The tokenizer
is byte-level without merges, so that any text has ids.
"""

from pathlib import Path
from typing import Any

import torch

from sglang.test.tiny_checkpoints import ROPE_AXES, fill_at_unit_scale

TEXT_WIDTH = 32
LATENT_CHANNELS = 4
SPECIAL = {"<unk>": 0, "<s>": 1, "</s>": 2, "<pad>": 3}
ENHANCED_TOKENS = 12  # the most that the tiny enhancer writes
CHAT_TEMPLATE = "{% for m in messages %}<s>{{ m['content'] }}{% endfor %}Output:"
VAE_CONFIG: dict[str, Any] = {
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (8, 8, 16, 16),
    "layers_per_block": 1,
    "latent_channels": LATENT_CHANNELS,
    "norm_num_groups": 4,
    "sample_size": 64,
}


def write_tiny_ernie(
    folder: Path, *, with_pe: bool, seed: int = 0, shift: float = 3.0, heads: int = 2
) -> Path:
    """Write an ERNIE-Image checkpoint into `folder` and return it.

    The VAE scales by 8 and its latents are patched 2x2, so sizes are multiples of 16. All weights
    are float32 and depend only on `seed`; the statistics of the VAE's batch norm are not 0 and 1.
    """
    from diffusers import (
        AutoencoderKLFlux2,
        ErnieImagePipeline,
        ErnieImageTransformer2DModel,
        FlowMatchEulerDiscreteScheduler,
    )

    pipeline = ErnieImagePipeline(
        transformer=ErnieImageTransformer2DModel(**ernie_transformer_config(heads)),
        vae=AutoencoderKLFlux2(**VAE_CONFIG),
        text_encoder=_text_encoder(),
        tokenizer=ernie_tiny_tokenizer(model_max_length=512),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=shift),
        pe=_enhancer() if with_pe else None,
        pe_tokenizer=ernie_tiny_tokenizer(ENHANCED_TOKENS) if with_pe else None,
    )
    parts = ("text_encoder", "transformer", "vae", *(["pe"] if with_pe else []))
    for i, name in enumerate(parts):
        fill_at_unit_scale(getattr(pipeline, name), 1000 * seed + i)
    _fill_batch_norm(pipeline.vae.bn, 1000 * seed)
    pipeline.save_pretrained(folder)
    return Path(folder)


def ernie_transformer_config(heads: int = 2, **changes: Any) -> dict[str, Any]:
    """The options of a tiny `ErnieImageTransformer2DModel`: hidden size 64, two or four heads."""
    return {
        "hidden_size": 64,
        "num_attention_heads": heads,
        "num_layers": 2,
        "ffn_hidden_size": 96,
        "in_channels": 4 * LATENT_CHANNELS,
        "out_channels": 4 * LATENT_CHANNELS,
        "text_in_dim": TEXT_WIDTH,
        "rope_axes_dim": ROPE_AXES[heads],
    } | changes


def ernie_tiny_tokenizer(model_max_length: int) -> Any:
    """A byte-level tokenizer that begins with `<s>` and has a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = SPECIAL | {char: len(SPECIAL) + i for i, char in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", SPECIAL["<s>"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        model_max_length=model_max_length,
        chat_template=CHAT_TEMPLATE,
    )


def _language_model(layers: int) -> dict[str, Any]:
    return {
        "model_type": "ministral3",
        "vocab_size": len(SPECIAL) + 256,
        "hidden_size": TEXT_WIDTH,
        "intermediate_size": 2 * TEXT_WIDTH,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "pad_token_id": SPECIAL["<pad>"],
        "bos_token_id": SPECIAL["<s>"],
        "eos_token_id": SPECIAL["</s>"],
    }


def _text_encoder() -> torch.nn.Module:
    from transformers import Mistral3Config, Mistral3Model

    vision = {
        "model_type": "pixtral",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "head_dim": 16,
        "image_size": 28,
        "patch_size": 14,
    }
    return Mistral3Model(Mistral3Config(text_config=_language_model(3), vision_config=vision))


def _enhancer() -> torch.nn.Module:
    from transformers import Ministral3Config, Ministral3ForCausalLM

    return Ministral3ForCausalLM(Ministral3Config(**_language_model(2)))


@torch.no_grad()
def _fill_batch_norm(norm: torch.nn.BatchNorm2d, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    norm.running_mean.normal_(0.0, 0.5, generator=generator)
    norm.running_var.uniform_(0.5, 2.0, generator=generator)
