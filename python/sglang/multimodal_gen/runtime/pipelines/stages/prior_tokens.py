"""GLM-Image's prior: an autoregressive model names one token for each 32x32 pixels."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sglang.multimodal_gen.configs.validation import rejected
from sglang.multimodal_gen.runtime.models.glm_image_ar import GlmImageDecoder, Grid
from sglang.multimodal_gen.runtime.models.glm_image_ar_sampling import NoiseRows
from sglang.multimodal_gen.runtime.models.glm_image_sources import (
    SourceTokens,
    place_sources,
    read_sources,
)
from sglang.multimodal_gen.runtime.pipelines.stages.state import (
    BatchState,
    ConditionState,
    ImageState,
)

if TYPE_CHECKING:
    from PIL.Image import Image

PIXELS_A_TOKEN = 32  # fixed by the processor
UPSAMPLING = 2  # the transformer's tokens are 16x16 pixels
PROGRESS_EVERY = 32  # tokens


class PriorTokensError(RuntimeError):
    """The prior cannot be drawn: the model ended it early or left the codebook."""


@dataclass
class GlmImageARStage:
    """Names the prior of each image with the image's own generator, as its seed alone decides.

    A small preview is named first and guides the picture's tokens; only the latter go on. With
    condition images these guide it instead: their own tokens stand in the prompt.
    """

    processor: Any  # GlmImageProcessor
    model: torch.nn.Module  # GlmImageForConditionalGeneration
    decoder: GlmImageDecoder
    codebook: int  # size of the transformer's codebook
    device: torch.device
    name: str = "GlmImageAR"

    def __call__(self, batch: BatchState) -> None:
        pictures = [picture.to_pil() for picture in batch.params.image or ()]
        sources: list[SourceTokens] = []
        for index, image in enumerate(batch.images):
            inputs = self.read(image.prompt, batch.params.height, batch.params.width, pictures)
            if pictures and not sources:
                given = (inputs["pixel_values"], inputs["image_grid_thw"][: len(pictures)])
                sources = read_sources(self.model, *(tensor.to(self.device) for tensor in given))
                batch.conditions = list(map(self.condition, sources))
            label = f"prior {index + 1}/{len(batch.images)}"
            grids = grids_to_name(inputs, len(pictures))
            tokens = self.draw(inputs["input_ids"], grids, sources, image, batch, label)
            image.prior_ids = upsample(self.checked(tokens, grids), *grids[-1])

    @property
    def end_token(self) -> int:
        """The token that ends an image."""
        return self.model.config.image_end_token_id

    def read(
        self, prompt: str, height: int, width: int, pictures: Sequence["Image"] = ()
    ) -> Mapping[str, torch.Tensor]:
        """What the processor makes of a prompt and its condition images."""
        expected = "text without the model's own image tokens"
        if self.processor.image_token in prompt:
            raise rejected("prompt", prompt, expected, "remove them from the prompt")
        content = [{"type": "image"}] * len(pictures) + [{"type": "text", "text": prompt}]
        message = {"role": "user", "content": content}
        text = self.processor.apply_chat_template([message], tokenize=False)
        inputs = self.processor(
            images=list(pictures) or None,
            text=[text],
            target_h=height,
            target_w=width,
            return_tensors="pt",
        )
        if (inputs["input_ids"] == self.end_token).sum() != len(pictures):
            raise rejected("prompt", prompt, expected, "remove them from the prompt")
        return inputs

    def condition(self, source: SourceTokens) -> ConditionState:
        """A condition image for the transformer, which has four tokens for one of the prior's."""
        if int(source.tokens.max()) >= self.codebook:
            raise PriorTokensError(
                f"{self.name}: an image became token {int(source.tokens.max())}, expected 0 to"
                f" {self.codebook - 1}; the checkpoint's quantiser and transformer do not fit"
            )
        rows, columns = source.grid
        size = (rows * PIXELS_A_TOKEN, columns * PIXELS_A_TOKEN)
        return ConditionState(upsample(source.tokens, rows, columns), size)

    def draw(
        self,
        ids: torch.Tensor,
        grids: list[Grid],
        sources: list[SourceTokens],
        image: ImageState,
        batch: BatchState,
        label: str,
    ) -> torch.Tensor:
        """The tokens of all grids, int64 [N]."""
        ids, places = place_sources(ids.to(self.device), sources, self.model.config)
        count = sum(rows * columns for rows, columns in grids)
        generator = torch.Generator(batch.params.generator_device).manual_seed(image.request.seed)
        noise = NoiseRows(generator, count, self.decoder.vocabulary, self.device)

        def on_token(done: int) -> None:
            if done % PROGRESS_EVERY == 0 or done == count:
                batch.on_progress(label, done, count)

        return self.decoder.generate(ids, grids, noise, on_token, places)

    def checked(self, tokens: torch.Tensor, grids: list[Grid]) -> torch.Tensor:
        """The picture's tokens, int64 [rows * columns], each in the codebook."""
        rows, columns = grids[-1]
        picture = tokens[-rows * columns :]
        ended = (tokens == self.end_token).nonzero()
        if len(ended):
            raise PriorTokensError(
                f"{self.name}: the model ended the picture after {int(ended[0])} of {len(tokens)}"
                " tokens, expected all of them; try another seed"
            )
        if int(picture.max()) >= self.codebook:
            raise PriorTokensError(
                f"{self.name}: got token {int(picture.max())}, expected 0 to {self.codebook - 1};"
                " try another seed"
            )
        return picture


def grids_to_name(inputs: Mapping[str, torch.Tensor], conditions: int) -> list[Grid]:
    """The grids in the order in which they are named: the preview's, where there is one, then the
    picture's. Those of the condition images come before both and are given."""
    grids = inputs["image_grid_thw"][conditions:].tolist()
    return [(rows, columns) for _, rows, columns in grids][::-1]


def upsample(tokens: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """int64 [rows * columns] -> [1, 4 * rows * columns]: each token becomes 2x2."""
    grid = tokens.view(rows, columns)
    for axis in (0, 1):
        grid = grid.repeat_interleave(UPSAMPLING, dim=axis)
    return grid.reshape(1, -1)
