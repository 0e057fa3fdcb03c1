"""A stand-in for GLM-Image's processor for `load_format="dummy"`: real shapes, no vocabulary."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from sglang.multimodal_gen.runtime.loader.dummy import BYTE_OFFSET

if TYPE_CHECKING:
    from PIL.Image import Image

TOKEN_PIXELS = 32
PREVIEW_SIDE = 16  # tokens a side of a square preview
SIDES = {"shortest_edge": 512**2, "longest_edge": 2048**2}  # of condition images, squared


class GlmByteProcessor:
    """Byte-level ids and the grids of the picture, with the calls of a `GlmImageProcessor`.

    With the model's `config` also of condition images, through transformers' image processor.
    """

    image_token = "<|image|>"

    def __init__(self, image_start_token: int, config: Any = None) -> None:
        self._image_start_token = image_start_token
        self._config = config  # a GlmImageConfig

    def apply_chat_template(self, conversation: list[dict[str, Any]], tokenize: bool) -> str:
        """The text parts of the conversation, one after another."""
        assert not tokenize, "the stand-in only renders"
        parts = [part for message in conversation for part in message["content"]]
        return "".join(part["text"] for part in parts if part["type"] == "text")

    def __call__(
        self,
        text: list[str],
        target_h: int,
        target_w: int,
        return_tensors: str,
        images: Sequence["Image"] | None = None,
    ) -> dict[str, torch.Tensor]:
        """`input_ids` [1, T] and `image_grid_thw` of one text: [2, 3] (picture, preview), or with
        images [images + 1, 3] (each image, picture), and then their `pixel_values`."""
        rows, columns = target_h // TOKEN_PIXELS, target_w // TOKEN_PIXELS
        picture = torch.tensor([[1, rows, columns]])
        if images is not None:
            read = self._read(images)
            grids, layout = torch.cat([read["image_grid_thw"], picture]), f"[{rows} {columns}]"
            ids = self._ids(read["image_grid_thw"], text[0] + layout)
            return {**read, "input_ids": ids, "image_grid_thw": grids}
        longer = math.sqrt(rows / columns)
        preview = (int(longer * PREVIEW_SIDE), int(PREVIEW_SIDE / longer))
        layout = f"[{rows} {columns}][{preview[0]} {preview[1]}]"
        return {
            "input_ids": self._ids([], text[0] + layout),
            "image_grid_thw": torch.cat([picture, torch.tensor([[1, *preview]])]),
        }

    def _ids(self, image_grids: Sequence[torch.Tensor], text: str) -> torch.Tensor:
        config, ids = self._config, []
        for grid in image_grids:
            ids += [self._image_start_token]
            ids += [config.image_token_id] * int(grid.prod())
            ids += [config.image_end_token_id]
        ids += [byte + BYTE_OFFSET for byte in text.encode("utf-8")]
        return torch.tensor([[*ids, self._image_start_token]])

    def _read(self, images: Sequence["Image"]) -> dict[str, torch.Tensor]:
        from transformers.models.glm_image.image_processing_pil_glm_image import (
            GlmImageImageProcessorPil,
        )

        patch = self._config.vision_config.patch_size
        processor = GlmImageImageProcessorPil(
            patch_size=patch, merge_size=1, temporal_patch_size=1, size=SIDES
        )
        return dict(processor(images=list(images), return_tensors="pt"))
