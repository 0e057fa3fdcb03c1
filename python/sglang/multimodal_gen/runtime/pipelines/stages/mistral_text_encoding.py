"""Prompts to embeddings by a Mistral-3 model: one hidden state a token, no padding."""

import logging
from dataclasses import dataclass
from typing import Any

import torch

from sglang.multimodal_gen.runtime.pipelines.stages.checks import require_finite
from sglang.multimodal_gen.runtime.pipelines.stages.state import BatchState, TextEmbeds
from sglang.multimodal_gen.runtime.pipelines.stages.text_encoding import encode_prompts

logger = logging.getLogger(__name__)


@dataclass
class MistralTextEncodingStage:
    """Encodes each distinct prompt of the request once, alone, so batches do not change bits."""

    tokenizer: Any
    text_encoder: torch.nn.Module
    device: torch.device
    dtype: torch.dtype  # of the transformer that reads the embeddings
    name: str = "TextEncodingStage"

    def __call__(self, batch: BatchState) -> None:
        encode_prompts(batch, self.encode)

    def encode(self, prompt: str, max_sequence_length: int) -> TextEmbeds:
        """One prompt -> tokens [1, T, text width]: the hidden states before the last layer."""
        ids = self._token_ids(prompt, min(max_sequence_length, self.tokenizer.model_max_length))
        input_ids = torch.tensor([ids], device=self.device)
        hidden = self.text_encoder(input_ids=input_ids, output_hidden_states=True).hidden_states
        require_finite(self.name, "text embedding", hidden[-2])
        return TextEmbeds(hidden[-2].to(self.dtype))

    def _token_ids(self, prompt: str, max_length: int) -> list[int]:
        ids = self.tokenizer([prompt], truncation=True, max_length=max_length).input_ids[0]
        full_length = len(self.tokenizer([prompt], verbose=False).input_ids[0])
        if full_length > max_length:
            logger.warning(
                "The text encoder reads %d of the prompt's %d tokens; the rest is cut.",
                max_length,
                full_length,
            )
        if not ids:  # an empty prompt, and a tokenizer that adds no token of its own
            begin = self.tokenizer.bos_token_id
            return [0 if begin is None else begin]
        return ids
