"""The case of bench_denoise.py for ERNIE-Image: true CFG, 4216 joint tokens at 1024x1024.

This engine runs the two prompts one after the other. diffusers' pipeline pads the shorter to the
longer, masks the padding and runs both as one batch, with the attention its dispatch then chooses.
"""

import torch
from denoise_arms import DenoiseCase, classifier_free_guidance, negative_text

from sglang.multimodal_gen.configs.sampling_params import SamplingParams
from sglang.multimodal_gen.runtime.models.dits.ernie_image import (
    ErnieImageParams,
    ErnieImageTransformer2DModel,
)
from sglang.multimodal_gen.runtime.pipelines.stages.denoising import DenoisingStage
from sglang.multimodal_gen.runtime.pipelines.stages.patched_latents import (
    PatchedLatentPreparationStage,
)
from sglang.multimodal_gen.runtime.pipelines.stages.prompt_denoising import PromptDenoisingStage
from sglang.multimodal_gen.runtime.pipelines.stages.state import BatchState, ImageState, TextEmbeds
from sglang.multimodal_gen.runtime.pipelines.stages.static_timesteps import (
    StaticTimestepPreparationStage,
)

TEXT_TOKENS = 120  # with 4096 image tokens the joint length of the requirement's kernels
NEGATIVE_TOKENS = 1  # the empty prompt: the token that begins every text


class ErnieDenoiseCase(DenoiseCase):
    """ERNIE-Image with a long prompt and an empty negative one."""

    params_class = ErnieImageParams
    model_class = ErnieImageTransformer2DModel
    reference_name = "ErnieImageTransformer2DModel"
    reference_takes_backend = False

    def make_stage(self) -> DenoisingStage:
        return PromptDenoisingStage(self.transformer, False, self.device, parallel=self.parallel)

    def prepare(self, batch: BatchState) -> None:
        image, width = batch.images[0], self.config["text_in_dim"]
        image.text = TextEmbeds(self.random_text(TEXT_TOKENS, width))
        negative = TextEmbeds(self.random_text(NEGATIVE_TOKENS, width))
        image.negative_text = negative_text(batch, negative)
        channels, multiple = self.config["in_channels"], self.spec.size_multiple
        PatchedLatentPreparationStage(channels, multiple, self.dtype, self.device)(batch)
        StaticTimestepPreparationStage(self.schedule, self.device)(batch)

    def reference_velocity(
        self,
        transformer: torch.nn.Module,
        latents: torch.Tensor,
        timestep: torch.Tensor,
        image: ImageState,
        params: SamplingParams,
    ) -> torch.Tensor:
        prompts = [text.tokens[0] for text in (image.negative_text, image.text) if text is not None]
        both = transformer(
            hidden_states=torch.cat([latents] * len(prompts)),
            timestep=timestep.expand(len(prompts)).to(self.dtype),
            text_bth=torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True),
            text_lens=torch.tensor([len(prompt) for prompt in prompts], device=self.device),
            return_dict=False,
        )[0]
        if len(prompts) == 1:
            return both
        negative, velocity = both.chunk(2)
        return classifier_free_guidance(velocity, negative, params.true_cfg_scale)
