"""How GLM-Image's prior chooses a token: `generate`'s rule, with noise that is drawn beforehand.

Shape legend: N tokens to name, V vocabulary of image tokens.
"""

from dataclasses import dataclass
from typing import Any

import torch

from sglang.kernels.ops.diffusion.triton.sample_token import choose_reference

# What of a generation_config.json acts here, and what is inert when a length is given.
_READ = {"do_sample", "temperature", "top_k", "top_p", "eos_token_id"}
_INERT = {"pad_token_id", "bos_token_id", "max_length", "max_new_tokens", "use_cache"}
_INERT |= {"transformers_version", "_from_model_config"}
_NEUTRAL = {"repetition_penalty": 1.0, "typical_p": 1.0, "num_beams": 1, "num_return_sequences": 1}
NOISE_BATCH = 16  # rows


@dataclass(frozen=True)
class SamplingRule:
    """How a token is chosen; the defaults are those of `generate` with `do_sample=True`."""

    temperature: float = 1.0
    top_k: int = 50  # 0: all
    top_p: float = 1.0

    @classmethod
    def from_generation_config(cls, config: Any) -> "SamplingRule":
        """Of a transformers GenerationConfig. Raises ValueError for a setting that would change
        the tokens and that this loop lacks."""
        acting = {k: v for k, v in config.to_diff_dict().items() if v not in (None, False)}
        unknown = sorted(
            name
            for name, value in acting.items()
            if name not in _READ | _INERT and value != _NEUTRAL.get(name)
        )
        if unknown:
            raise ValueError(
                f"generation_config.json: got {unknown}, which the prior's sampler lacks;"
                f" expected only {sorted(_READ)}; remove them from the file"
            )
        given = {name: getattr(config, name) for name in ("temperature", "top_k", "top_p")}
        return cls(**{name: value for name, value in given.items() if value is not None})


def exponential_noise(generator: torch.Generator, count: int, vocabulary: int) -> torch.Tensor:
    """float32 [count, vocabulary] on the generator's device, drawn row by row.

    `torch.multinomial` of one sample is the argmax of probability / noise over such a row, so a
    seed drawn here on the CPU means the same tokens on every machine.
    """
    noise = torch.empty(count, vocabulary, device=generator.device)
    for row in noise:
        row.exponential_(generator=generator)
    return noise


class NoiseRows:
    """`exponential_noise` on `device`, drawn as far as it is asked for.

    A host takes longer to draw a row than a GPU takes for an eighth of a token, so all rows at
    once would keep the GPU waiting; drawn in batches they hide behind the tokens before.
    """

    def __init__(
        self, generator: torch.Generator, count: int, vocabulary: int, device: torch.device
    ) -> None:
        self.rows = torch.empty(count, vocabulary, device=device)  # float32 [N, V]
        self._generator = generator
        self._drawn = 0

    def draw(self, count: int) -> None:
        """Have at least `count` rows drawn; the copy to a GPU is queued, not waited for."""
        count, (total, vocabulary) = min(count, len(self.rows)), self.rows.shape
        while self._drawn < count:
            size = min(NOISE_BATCH, total - self._drawn)
            batch = exponential_noise(self._generator, size, vocabulary)
            if self.rows.is_cuda and not batch.is_cuda:
                batch = batch.pin_memory()  # else the copy would wait for the GPU
            self.rows[self._drawn : self._drawn + size].copy_(batch, non_blocking=True)
            self._drawn += size


def choose_token(
    logits: torch.Tensor, rule: SamplingRule, noise: torch.Tensor | None
) -> torch.Tensor:
    """int64 [1] token of float32 logits [1, V]: the likeliest, or drawn with noise [1, V]."""
    return choose_reference(logits, noise, rule.temperature, rule.top_k, rule.top_p)
