"""What really ran: tier, fused sites, backends, times, hashes, versions."""

import functools
import hashlib
from collections.abc import Mapping
from importlib import metadata
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from sglang.kernels.ops.diffusion.bitexact_gate import all_gates
from sglang.multimodal_gen.configs.condition_image import ConditionImage
from sglang.multimodal_gen.configs.sampling_params import SamplingParams
from sglang.multimodal_gen.runtime.managers.messages import GenerateResponse, ImageOutput
from sglang.multimodal_gen.runtime.managers.numeric_switches import SWITCHES
from sglang.multimodal_gen.runtime.pipelines.base import Pipeline

DISTRIBUTION = "sglang-multimodal-gen"


def build_report(
    image: ImageOutput, response: GenerateResponse, params: SamplingParams, pipeline: Pipeline
) -> dict[str, Any]:
    """A JSON-able report of one image. Times in seconds, memory in MiB."""
    return {
        "prompt": image.prompt,
        "revised_prompt": image.revised_prompt,
        "seed": image.seed,
        "seeds": [other.seed for other in response.images],
        "size": [params.width, params.height],
        "num_inference_steps": params.num_inference_steps,
        "guidance_scale": params.guidance_scale,
        "true_cfg_scale": params.true_cfg_scale,
        "strength": params.strength,
        "loras": list(pipeline.loras),
        "condition_images": [_described(picture) for picture in params.image or ()],
        "sha256": pixel_hash(image.pixels),
        "requested_quality": params.quality,
        "quality": effective_quality(params.quality, response.mounted, pipeline.compiled),
        "layout": str(pipeline.layout),
        "num_gpus": pipeline.layout.world,
        "exactness": pipeline.layout.exactness,
        "sites": list(response.sites),
        "backend": pipeline.backend,
        "attention_backend": pipeline.attention_backend,
        "norm_backend": pipeline.norm_backend,
        "precisions": pipeline.precisions,
        "numeric_switches": dict(SWITCHES),
        "stage_seconds": response.stage_seconds,
        "step_seconds": list(image.step_seconds),
        "peak_memory_mb": round(response.peak_memory_mb, 1),
        "versions": versions(),
    }


def pixel_hash(pixels: np.ndarray) -> str:
    """sha256 of the uint8 pixels, row by row, without any file format around them."""
    return hashlib.sha256(np.ascontiguousarray(pixels).tobytes()).hexdigest()


def _described(picture: ConditionImage) -> dict[str, Any]:
    """A picture of the request, so that the result can be made again."""
    digest = hashlib.sha256(picture.rgb).hexdigest()
    return {"size": [picture.width, picture.height], "sha256": digest}


def effective_quality(requested: str, mounted: dict[str, str | None], compiled: bool) -> str:
    """`high` only when a fusion of that tier was mounted; otherwise every site stayed lossless.

    A compiled transformer rounds as the compiler likes, which is neither: `compiled`.
    """
    if compiled:
        return "compiled"
    if requested == "high" and None not in mounted.values():
        return "lossless"
    return requested


def fused_sites(
    mounted: dict[str, str | None], marked: Mapping[str, int] = MappingProxyType({})
) -> tuple[dict[str, Any], ...]:
    """One row a kind of fused site that ran since the counters were reset, both tiers.

    `count` is the calls of a lossless site, and of a fusion of the high tier the modules in
    `marked` that it is mounted on, or could be.
    """
    rows = [
        {
            "op": state.name,
            "status": state.status,
            "reason": state.reason,
            "count": state.fused_calls + state.eager_calls,
            "fused_calls": state.fused_calls,
            "eager_calls": state.eager_calls,
        }
        for state in (gate.state() for gate in all_gates())
        if state.fused_calls or state.eager_calls
    ]
    rows += [
        {
            "op": name,
            "status": "eager" if reason else "mounted",
            "reason": reason,
            "count": marked.get(name, 0),
        }
        for name, reason in mounted.items()
    ]
    return tuple(rows)


def versions() -> dict[str, str | int | None]:
    """What decides the bits; None for what is not installed."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    packages = ("torch", "triton", "diffusers", "transformers", "cuda-core", DISTRIBUTION)
    found = {name: _version(name) for name in packages}
    threads = torch.get_num_threads()  # on a CPU they decide the order of sums
    return {**found, "cuda": torch.version.cuda, "gpu": gpu, "torch_threads": threads}


@functools.cache
def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
