"""Quoted words of a prompt to embeddings: ByT5 reads what is to be written in the picture."""

import logging
import re
from dataclasses import dataclass
from typing import Any

import torch

from sglang.multimodal_gen.runtime.pipelines.stages.checks import require_finite
from sglang.multimodal_gen.runtime.pipelines.stages.state import BatchState, TextEmbeds
from sglang.multimodal_gen.runtime.pipelines.stages.text_encoding import encode_prompts

logger = logging.getLogger(__name__)

# Each kind of quotation mark in turn, as in training: the order decides the order of the texts.
QUOTED = (r"'([^']*)'", r"\u201c([^\u201c\u201d]*)\u201d", r'"([^"]*)"', r"「([^「」]*)」")


@dataclass
class GlyphEncodingStage:
    """Encodes the quoted texts of each distinct prompt, alone; the rest is for the prior."""

    tokenizer: Any  # ByT5Tokenizer
    text_encoder: torch.nn.Module  # T5EncoderModel
    device: torch.device
    dtype: torch.dtype  # of the transformer that reads the embeddings
    name: str = "GlyphEncodingStage"

    def __call__(self, batch: BatchState) -> None:
        negative = batch.params.negative_prompt
        if batch.true_cfg and negative and not glyph_texts(negative):
            logger.warning(
                "negative_prompt has no quoted text and so no effect: this model reads only the"
                " quoted words of it, which are then kept out of the picture"
            )
        encode_prompts(batch, self.encode)

    def encode(self, prompt: str, max_sequence_length: int) -> TextEmbeds:
        """One prompt -> the tokens of its quoted texts, [1, T, text_embed_dim].

        Each text keeps at most max_sequence_length tokens. Without quoted text: the empty one.
        """
        texts = glyph_texts(prompt) or [""]
        ids = self.tokenizer(texts, max_length=max_sequence_length, truncation=True).input_ids
        self._warn_of_cuts(texts, max_sequence_length)
        pad = self.tokenizer.pad_token_id
        # An even number of texts gets one more token in front, as in training.
        rows = [[pad] * ((len(texts) + 1) % 2) + row for row in ids]
        longest = max(map(len, rows))
        padded = torch.tensor([row + [pad] * (longest - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        padded, mask = padded.to(self.device), mask.to(self.device)
        states = self.text_encoder(padded, attention_mask=mask)[0]
        tokens = states[mask.bool()][None]
        require_finite(self.name, "glyph embedding", tokens)
        return TextEmbeds(tokens.to(self.dtype))

    def _warn_of_cuts(self, texts: list[str], max_length: int) -> None:
        for text in texts:
            length = len(text.encode()) + 1  # a byte a token, and the end
            if length > max_length:
                logger.warning(
                    "The glyph encoder reads %d of a quoted text's %d tokens; the rest is cut.",
                    max_length,
                    length,
                )


def glyph_texts(prompt: str) -> list[str]:
    """The texts that the prompt quotes, by kind of quotation mark."""
    return [text for pattern in QUOTED for text in re.findall(pattern, prompt)]
