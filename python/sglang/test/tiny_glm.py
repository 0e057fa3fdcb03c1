"""A tiny random-weight GLM-Image checkpoint in diffusers layout, for tests: made in seconds.

It has every component of the published model, with a real processor and tokenizers built on the
spot. Its autoregressive model can only name tokens of the prior codebook: random weights would
otherwise end a picture early or name tokens that the codebook lacks.
"""

from pathlib import Path
from typing import Any

from sglang.test.tiny_checkpoints import VAE_CONFIG, fill_at_unit_scale

TEXT_WIDTH = 32
LATENT_CHANNELS = 4
CODEBOOK = 64


def write_tiny_glm(
    folder: Path, *, seed: int = 0, vision_vocabulary: int = CODEBOOK, heads: int = 2
) -> Path:
    """Write a GLM-Image checkpoint into `folder` and return it.

    Sizes are multiples of 32. All weights are float32 and depend only on `seed` and the vocabulary;
    one above CODEBOOK lets the prior name tokens that the transformer lacks, and the end token.
    """
    from diffusers import AutoencoderKL, GlmImagePipeline, GlmImageTransformer2DModel
    from transformers import ByT5Tokenizer

    transformer = GlmImageTransformer2DModel(**glm_transformer_config(heads=heads))
    vae, text_encoder = AutoencoderKL(**GLM_VAE_CONFIG), _glyph_encoder()
    for i, module in enumerate((text_encoder, transformer, vae)):
        fill_at_unit_scale(module, 1000 * seed + i)
    GlmImagePipeline(
        tokenizer=ByT5Tokenizer(),
        processor=glm_processor(),
        text_encoder=text_encoder,
        vision_language_encoder=glm_ar_model(seed, vision_vocabulary),
        vae=vae,
        transformer=transformer,
        scheduler=_scheduler(),
    ).save_pretrained(folder)
    return Path(folder)


GLM_VAE_CONFIG: dict[str, Any] = VAE_CONFIG | {
    "latent_channels": LATENT_CHANNELS,
    "latents_mean": [0.1, -0.2, 0.3, 0.0],
    "latents_std": [1.5, 2.0, 0.7, 1.1],
}


def _glyph_encoder() -> Any:
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(
        T5Config(
            vocab_size=384,
            d_model=TEXT_WIDTH,
            d_kv=TEXT_WIDTH // 2,
            d_ff=2 * TEXT_WIDTH,
            num_layers=2,
            num_heads=2,
            feed_forward_proj="gated-gelu",
            tie_word_embeddings=False,
        )
    )


def _scheduler() -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_shift=0.25,
        max_shift=0.75,
        base_image_seq_len=256,
        max_image_seq_len=4096,
        time_shift_type="linear",
    )


def glm_transformer_config(num_layers: int = 2, heads: int = 2) -> dict[str, Any]:
    """The options of a tiny `GlmImageTransformer2DModel`: hidden size 64, two heads."""
    return {
        "patch_size": 2,
        "in_channels": LATENT_CHANNELS,
        "out_channels": LATENT_CHANNELS,
        "num_layers": num_layers,
        "attention_head_dim": 64 // heads,
        "num_attention_heads": heads,
        "text_embed_dim": TEXT_WIDTH,
        "time_embed_dim": 32,
        "condition_dim": 16,
        "prior_vq_quantizer_codebook_size": CODEBOOK,
    }


# Ids of the tokenizer: the codebook first, then these, then the 256 bytes.
SPECIAL = {
    "bos_token": "<|dit_token_64|>",  # begins an image
    "eos_token": "<|dit_token_65|>",  # ends an image
    "image_token": "<|image|>",
    "grid_bos_token": "<sop>",
    "grid_eos_token": "<eop>",
    "pad_token": "<|endoftext|>",
}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>\n{% for part in message.content %}"
    "{% if part.type == 'image' %}<|dit_token_64|><|image|><|dit_token_65|>{% else %}"
    "{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
)


def glm_processor() -> Any:
    """A `GlmImageProcessor` whose tokenizer is byte-level, so that any text has ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import GlmImageProcessor, PreTrainedTokenizerFast
    from transformers.models.glm_image.image_processing_pil_glm_image import (
        GlmImageImageProcessorPil,
    )

    codes = [f"<|dit_token_{i}|>" for i in range(CODEBOOK)]
    tokens = [*codes, *SPECIAL.values(), *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    extra = {name: SPECIAL[name] for name in ("image_token", "grid_bos_token", "grid_eos_token")}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SPECIAL["bos_token"],
        eos_token=SPECIAL["eos_token"],
        pad_token=SPECIAL["pad_token"],
        extra_special_tokens=extra,
        padding_side="left",
    )
    images = GlmImageImageProcessorPil(patch_size=16, merge_size=1, temporal_patch_size=1)
    return GlmImageProcessor(images, fast, chat_template=CHAT_TEMPLATE)


def glm_ar_config(vision_vocabulary: int = CODEBOOK) -> Any:
    """The configuration of a tiny `GlmImageForConditionalGeneration`: two layers of width 64."""
    from transformers import GlmImageConfig

    names = list(SPECIAL)
    ids = {name: CODEBOOK + names.index(name) for name in names}
    text = {
        "vocab_size": CODEBOOK + len(SPECIAL) + 256,
        "vision_vocab_size": vision_vocabulary,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "pad_token_id": ids["pad_token"],
        "eos_token_id": ids["eos_token"],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [1, 2, 1],
        },
    }
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64}
    return GlmImageConfig(
        text_config=text,
        vision_config=vision | {"image_size": 64, "patch_size": 16},
        vq_config={"embed_dim": 16, "num_embeddings": CODEBOOK, "latent_channels": 32},
        image_token_id=ids["image_token"],
        image_start_token_id=ids["bos_token"],
        image_end_token_id=ids["eos_token"],
    )


def glm_ar_model(seed: int = 0, vision_vocabulary: int = CODEBOOK) -> Any:
    """A tiny `GlmImageForConditionalGeneration` with random float32 weights."""
    from transformers import GenerationConfig, GlmImageForConditionalGeneration

    config = glm_ar_config(vision_vocabulary)
    model = GlmImageForConditionalGeneration(config)
    fill_at_unit_scale(model, seed)
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=0.9,
        top_p=0.75,
        top_k=40,
        eos_token_id=config.image_end_token_id,
        pad_token_id=config.text_config.pad_token_id,
    )
    return model.eval()
