"""Prompts rewritten by the checkpoint's language model (`pe`), where the request asks for it."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sglang.multimodal_gen.runtime.pipelines.stages.state import BatchState, ImageState

TEMPERATURE, TOP_P = 0.6, 0.95
MAX_NEW_TOKENS = 4096  # where the tokenizer names no length, a text that never ends would hang
PROGRESS_EVERY = 16  # tokens


@dataclass
class PromptEnhancementStage:
    """Gives each image the prompt that its own seed makes of the request's.

    The draws come from a generator seeded with the image's seed, on the request's generator device,
    so that image i is also here what the single-image request with its seed gives.
    """

    enhancer: torch.nn.Module  # a causal language model of transformers
    tokenizer: Any
    device: torch.device
    name: str = "PromptEnhancementStage"

    def __call__(self, batch: BatchState) -> None:
        if not batch.params.use_pe:
            return
        for index, image in enumerate(batch.images):
            self._revise(image, batch, f"enhance {index + 1}/{len(batch.images)}")

    def _revise(self, image: ImageState, batch: BatchState, label: str) -> None:
        params, asked = batch.params, image.request
        generator = torch.Generator(params.generator_device).manual_seed(asked.seed)
        limit = self.max_new_tokens

        def on_token(done: int) -> None:
            if done % PROGRESS_EVERY == 0:
                batch.on_progress(label, done, limit)

        image.revised_prompt = self.enhance(
            asked.prompt, params.width, params.height, generator, on_token
        )
        batch.on_progress(label, limit, limit)  # it may end long before the limit

    @property
    def max_new_tokens(self) -> int:
        """Of one answer."""
        return min(self.tokenizer.model_max_length, MAX_NEW_TOKENS)

    def enhance(
        self,
        prompt: str,
        width: int,
        height: int,
        generator: torch.Generator,
        on_token: Callable[[int], None],
    ) -> str:
        """The prompt as the enhancer rewrites it for a picture of this size."""
        asked = {"prompt": prompt, "width": width, "height": height}
        message = {"role": "user", "content": json.dumps(asked, ensure_ascii=False)}
        # The template itself ends with the words after which the answer begins.
        text = self.tokenizer.apply_chat_template(
            [message], tokenize=False, add_generation_prompt=False
        )
        inputs = self.tokenizer(text, return_tensors="pt", verbose=False).to(self.device)
        ids = self.enhancer.generate(
            **inputs,
            max_new_tokens=self.max_new_tokens,
            do_sample=True,
            temperature=TEMPERATURE,
            top_p=TOP_P,
            pad_token_id=self.tokenizer.pad_token_id,
            eos_token_id=self.tokenizer.eos_token_id,
            custom_generate=sample_tokens,
            generator=generator,
            on_token=on_token,
        )
        answer = ids[0, inputs["input_ids"].shape[1] :]
        return self.tokenizer.decode(answer, skip_special_tokens=True).strip()


def sample_tokens(
    model: torch.nn.Module,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    generator: torch.Generator,
    on_token: Callable[[int], None],
    **model_kwargs: Any,
) -> torch.Tensor:
    """The decoding loop of transformers' `generate`, drawing from `generator`; `on_token` hears of
    each token, by how many there are.

    input_ids [1, T] int64; returns [1, T + new tokens]. `generate` itself draws from the global
    generator; with the same draws the tokens are the same.
    """
    cache = {k: v for k, v in model_kwargs.items() if k in ("cache", "past_key_values")}
    tokens, given = input_ids, input_ids.shape[1]
    while True:
        logits = model(input_ids=tokens, use_cache=True, logits_to_keep=1, **cache).logits
        scores = logits_processor(input_ids, logits[:, -1].float())
        odds = scores.softmax(dim=-1).to(generator.device)
        tokens = torch.multinomial(odds, 1, generator=generator).to(input_ids.device)
        input_ids = torch.cat([input_ids, tokens], dim=-1)
        on_token(input_ids.shape[1] - given)
        if stopping_criteria(input_ids, None).all():
            return input_ids
