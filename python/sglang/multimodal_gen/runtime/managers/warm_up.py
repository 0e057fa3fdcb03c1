"""Pictures that the engine makes for itself: before it is ready, and after failures."""

import torch

from sglang.multimodal_gen.configs.model_specs import ModelSpec
from sglang.multimodal_gen.configs.sampling_params import SamplingParams

STEPS = 4  # the first verifies sites, the second is timed, the third captured, the fourth replayed
PROMPT = "a red apple"


def canary(spec: ModelSpec) -> SamplingParams:
    """A small picture: shows in little time that model and device work."""
    side = 8 * spec.size_multiple
    asked = SamplingParams(
        prompt=PROMPT, width=side, height=side, num_inference_steps=STEPS, use_pe=False
    )
    return asked.fit(spec)


def warm_up_requests(spec: ModelSpec, device: torch.device) -> list[SamplingParams]:
    """What builds every kernel and verifies every fused site before the first real request.

    On a GPU that takes the model's default size, as sites are verified shape by shape, in both
    tiers. A CPU has neither kernels nor sites: there a small picture loads all code.
    """
    if device.type != "cuda":
        return [canary(spec)]
    return [
        SamplingParams(prompt=PROMPT, num_inference_steps=STEPS, use_pe=False, quality=quality).fit(
            spec
        )
        for quality in ("high", "lossless")
    ]
