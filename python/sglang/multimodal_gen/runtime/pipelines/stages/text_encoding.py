"""Prompts to embeddings: CLIP gives the pooled vector, T5 the token sequence."""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sglang.multimodal_gen.runtime.pipelines.stages.checks import require_finite
from sglang.multimodal_gen.runtime.pipelines.stages.state import BatchState, TextEmbeds

logger = logging.getLogger(__name__)


@dataclass
class TextEncodingStage:
    """Encodes each distinct prompt of the request once, alone, so batches do not change bits."""

    tokenizer: Any  # CLIP tokenizer
    text_encoder: torch.nn.Module
    tokenizer_2: Any  # T5 tokenizer
    text_encoder_2: torch.nn.Module
    device: torch.device
    dtype: torch.dtype  # of the transformer that reads the embeddings
    name: str = "TextEncodingStage"

    def __call__(self, batch: BatchState) -> None:
        encode_prompts(batch, self.encode)

    def encode(self, prompt: str, max_sequence_length: int) -> TextEmbeds:
        """One prompt -> tokens [1, max_sequence_length, D2] and pooled [1, D1]."""
        clip_ids = tokenize(self.tokenizer, prompt, self.tokenizer.model_max_length, "CLIP")
        pooled = self.text_encoder(clip_ids.to(self.device)).pooler_output
        t5_ids = tokenize(self.tokenizer_2, prompt, max_sequence_length, "T5")
        tokens = self.text_encoder_2(t5_ids.to(self.device))[0]
        require_finite(self.name, "CLIP embedding", pooled)
        require_finite(self.name, "T5 embedding", tokens)
        return TextEmbeds(tokens.to(self.dtype), pooled.to(self.dtype))


def encode_prompts(batch: BatchState, encode: Callable[[str, int], TextEmbeds]) -> None:
    """Fill the images' embeddings by `encode(prompt, max_sequence_length)`, once a text."""
    encode_once = functools.cache(encode)
    length = batch.params.max_sequence_length
    for image in batch.images:
        image.text = encode_once(image.prompt, length)
        if batch.true_cfg:
            image.negative_text = encode_once(image.request.negative_prompt, length)


def tokenize(tokenizer: Any, prompt: str, max_length: int, encoder: str) -> torch.Tensor:
    """Token ids int64 [1, max_length], padded; a cut prompt is reported with what was kept."""
    ids = tokenizer(
        [prompt], padding="max_length", max_length=max_length, truncation=True, return_tensors="pt"
    ).input_ids
    full_length = len(tokenizer([prompt], verbose=False).input_ids[0])
    if full_length > max_length:
        logger.warning(
            "The %s encoder reads %d of the prompt's %d tokens; the rest is cut for it alone.",
            encoder,
            max_length,
            full_length,
        )
    return ids
