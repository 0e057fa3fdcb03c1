"""The condition images of a GLM-Image prompt, as tokens of the prior's codebook.

The vision encoder and the quantiser are those of transformers' `GlmImageForConditionalGeneration`
5.17 to 5.24; where it runs them inside `generate`, they run once here, and the prompt gets their
tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any

import torch

from sglang.multimodal_gen.runtime.models.glm_image_ar import Grid, Source


@dataclass(frozen=True)
class SourceTokens:
    """One condition image: a codebook index for each cell of its grid."""

    tokens: torch.Tensor  # int64 [rows * columns]
    grid: Grid


@torch.inference_mode()
def read_sources(
    model: torch.nn.Module, pixel_values: torch.Tensor, grids: torch.Tensor
) -> list[SourceTokens]:
    """The images of a `GlmImageProcessor`'s output, on the model's device.

    pixel_values [patches of all images, patch size]; grids int64 [images, 3]: (1, rows, columns).
    """
    features = model.get_image_features(pixel_values, grids).pooler_output
    tokenize = model.model.get_image_tokens
    if signature(tokenize).parameters["image_grid_thw"].default is Parameter.empty:
        tokens = tokenize(torch.cat(features), grids)  # transformers 5.17
    else:
        tokens = tokenize(features)
    tokens = tokens.split(grids.prod(-1).tolist())
    sizes = [(rows, columns) for _, rows, columns in grids.tolist()]
    return [SourceTokens(*pair) for pair in zip(tokens, sizes, strict=True)]


def place_sources(
    prompt_ids: torch.Tensor, sources: Sequence[SourceTokens], config: Any
) -> tuple[torch.Tensor, list[Source]]:
    """The prompt [1, T] with the images' tokens for their placeholders, and where these are.

    Each image follows a start token; `config` is the model's.
    """
    if not sources:
        return prompt_ids, []
    placeholders = prompt_ids == config.image_token_id
    tokens = torch.cat([source.tokens for source in sources]).to(prompt_ids)
    starts = (prompt_ids[0] == config.image_start_token_id).nonzero()[: len(sources), 0] + 1
    places = [(first, source.grid) for first, source in zip(starts.tolist(), sources, strict=True)]
    return prompt_ids.masked_scatter(placeholders, tokens), places
