"""Bit-exact, fast image generation. The public names load on first use, torch with the engine."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.multimodal_gen.configs.sampling_params import SamplingParams
    from sglang.multimodal_gen.runtime.entrypoints.diff_generator import (
        DiffGenerator,
        GenerationResult,
    )

__all__ = ["DiffGenerator", "GenerationResult", "SamplingParams"]

_HOME = {
    "DiffGenerator": "sglang.multimodal_gen.runtime.entrypoints.diff_generator",
    "GenerationResult": "sglang.multimodal_gen.runtime.entrypoints.diff_generator",
    "SamplingParams": "sglang.multimodal_gen.configs.sampling_params",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
