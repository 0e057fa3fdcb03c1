"""GLM-Image's prior: an autoregressive model names one token for each 32x32 pixels."""

from dataclasses import dataclass
from typing import Any

import torch

from sglang.multimodal_gen.configs.validation import rejected
from sglang.multimodal_gen.runtime.models.glm_image_ar import GlmImageDecoder, Grid
from sglang.multimodal_gen.runtime.models.glm_image_ar_sampling import exponential_noise
from sglang.multimodal_gen.runtime.pipelines.stages.state import BatchState, ImageState

PIXELS_A_TOKEN = 32  # fixed by the processor
UPSAMPLING = 2  # the transformer's tokens are 16x16 pixels
PROGRESS_EVERY = 32  # tokens


class PriorTokensError(RuntimeError):
    """The prior cannot be drawn: the model ended it early or left the codebook."""


@dataclass
class GlmImageARStage:
    """Names the prior of each image with the image's own generator, as its seed alone decides.

    A small preview is named first and guides the picture's tokens; only the latter go on.
    """

    processor: Any  # GlmImageProcessor
    decoder: GlmImageDecoder
    codebook: int  # size of the transformer's codebook
    end_token: int
    device: torch.device
    name: str = "GlmImageAR"

    def __call__(self, batch: BatchState) -> None:
        for index, image in enumerate(batch.images):
            ids, grids = self.read(image.prompt, batch.params.height, batch.params.width)
            label = f"prior {index + 1}/{len(batch.images)}"
            tokens = self.draw(ids, grids, image, batch, label)
            image.prior_ids = upsample(self.checked(tokens, grids), *grids[-1])

    def read(self, prompt: str, height: int, width: int) -> tuple[torch.Tensor, list[Grid]]:
        """(ids int64 [1, T], the grids to name: the preview's, then the picture's)."""
        expected = "text without the model's own image tokens"
        if self.processor.image_token in prompt:
            raise rejected("prompt", prompt, expected, "remove them from the prompt")
        message = {"role": "user", "content": [{"type": "text", "text": prompt}]}
        text = self.processor.apply_chat_template([message], tokenize=False)
        inputs = self.processor(text=[text], target_h=height, target_w=width, return_tensors="pt")
        ids = inputs["input_ids"]
        if (ids == self.end_token).any():
            raise rejected("prompt", prompt, expected, "remove them from the prompt")
        grids = [(rows, columns) for _, rows, columns in inputs["image_grid_thw"].tolist()]
        return ids.to(self.device), grids[::-1]

    def draw(
        self, ids: torch.Tensor, grids: list[Grid], image: ImageState, batch: BatchState, label: str
    ) -> torch.Tensor:
        """The tokens of all grids, int64 [N]."""
        count = sum(rows * columns for rows, columns in grids)
        generator = torch.Generator(batch.params.generator_device).manual_seed(image.request.seed)
        noise = exponential_noise(generator, count, self.decoder.vocabulary)

        def on_token(done: int) -> None:
            if done % PROGRESS_EVERY == 0 or done == count:
                batch.on_progress(label, done, count)

        return self.decoder.generate(ids, grids, noise.to(self.device), on_token)

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


def upsample(tokens: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """int64 [rows * columns] -> [1, 4 * rows * columns]: each token becomes 2x2."""
    grid = tokens.view(rows, columns)
    for axis in (0, 1):
        grid = grid.repeat_interleave(UPSAMPLING, dim=axis)
    return grid.reshape(1, -1)
