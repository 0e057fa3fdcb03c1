"""A stand-in for GLM-Image's processor for `load_format="dummy"`: real shapes, no vocabulary."""

import math
from typing import Any

import torch

from sglang.multimodal_gen.runtime.loader.dummy import BYTE_OFFSET

TOKEN_PIXELS = 32
PREVIEW_SIDE = 16  # tokens a side of a square preview


class GlmByteProcessor:
    """Byte-level ids and the grids of the picture, with the calls of a `GlmImageProcessor`."""

    image_token = "<|image|>"

    def __init__(self, image_start_token: int) -> None:
        self._image_start_token = image_start_token

    def apply_chat_template(self, conversation: list[dict[str, Any]], tokenize: bool) -> str:
        """The text parts of the conversation, one after another."""
        assert not tokenize, "the stand-in only renders"
        parts = [part for message in conversation for part in message["content"]]
        return "".join(part["text"] for part in parts)

    def __call__(
        self, text: list[str], target_h: int, target_w: int, return_tensors: str
    ) -> dict[str, torch.Tensor]:
        """`input_ids` [1, T] and `image_grid_thw` [2, 3] (picture, preview) of one text."""
        rows, columns = target_h // TOKEN_PIXELS, target_w // TOKEN_PIXELS
        longer = math.sqrt(rows / columns)
        preview = (int(longer * PREVIEW_SIDE), int(PREVIEW_SIDE / longer))
        layout = f"{text[0]}[{rows} {columns}][{preview[0]} {preview[1]}]"
        ids = [byte + BYTE_OFFSET for byte in layout.encode("utf-8")]
        return {
            "input_ids": torch.tensor([[*ids, self._image_start_token]]),
            "image_grid_thw": torch.tensor([[1, rows, columns], [1, *preview]]),
        }
