"""A tiny random-weight GLM-Image checkpoint in diffusers layout, for tests: made in seconds.

It has every component of the published model, with a real processor and tokenizers built on the
spot. Its autoregressive model can only name tokens of the prior codebook: random weights would
otherwise end a picture early or name tokens that the codebook lacks.
"""

from typing import Any

TEXT_WIDTH = 32
LATENT_CHANNELS = 4
CODEBOOK = 64


def glm_transformer_config(num_layers: int = 2) -> dict[str, Any]:
    """The options of a tiny `GlmImageTransformer2DModel`: hidden size 64, two heads."""
    return {
        "patch_size": 2,
        "in_channels": LATENT_CHANNELS,
        "out_channels": LATENT_CHANNELS,
        "num_layers": num_layers,
        "attention_head_dim": 32,
        "num_attention_heads": 2,
        "text_embed_dim": TEXT_WIDTH,
        "time_embed_dim": 32,
        "condition_dim": 16,
        "prior_vq_quantizer_codebook_size": CODEBOOK,
    }
