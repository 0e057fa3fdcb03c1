"""What a diffusers pipeline takes and defaults to, read from its signature and its components."""

import inspect
from typing import Any

from sglang.multimodal_gen.configs.model_specs import ModelSpec
from sglang.multimodal_gen.configs.sampling_params import MAX_SIDE
from sglang.multimodal_gen.configs.validation import rejected

PASSED = (
    "negative_prompt",
    "width",
    "height",
    "num_inference_steps",
    "guidance_scale",
    "true_cfg_scale",
    "max_sequence_length",
)
OTHER_MEDIA = ("num_frames", "video_length", "audio_end_in_s", "audio_duration_in_s")
DENOISERS = ("unet", "transformer")
FALLBACK_SIDE = 1024  # pixels, where nothing names a size
FALLBACK_LATENT_PIXELS = 8


def taken_parameters(pipe: Any) -> dict[str, Any]:
    """Name -> default of everything that the pipeline's call takes."""
    signature = inspect.signature(type(pipe).__call__)
    return {name: p.default for name, p in signature.parameters.items() if name != "self"}


def diffusers_spec(pipe: Any) -> ModelSpec:
    """The spec of a loaded pipeline. Raises InvalidParameter for one that makes no pictures of a
    prompt alone."""
    name, taken = type(pipe).__name__, taken_parameters(pipe)
    required = [key for key, default in taken.items() if default is inspect.Parameter.empty]
    others = set(required) - {"prompt", "args", "kwargs"} | {n for n in OTHER_MEDIA if n in taken}
    if "prompt" not in taken or others:
        why = f"a text-to-image pipeline; it wants {', '.join(sorted(others)) or 'no prompt'}"
        raise rejected("model_path", name, why)
    return ModelSpec(
        pipeline_class=name,
        num_inference_steps=taken.get("num_inference_steps") or ModelSpec.num_inference_steps,
        max_sequence_length=taken.get("max_sequence_length") or ModelSpec.max_sequence_length,
        max_sequence_length_limit=4096,  # the pipeline knows its own
        size_multiple=size_multiple(pipe),
        untaken=tuple(key for key in PASSED if key not in taken),
        **_default_size(pipe, taken),
        **_guidance(pipe, taken),
    )


def size_multiple(pipe: Any) -> int:
    """What a side must be a multiple of: what the pipeline's own image processor rounds to."""
    config = getattr(getattr(pipe, "image_processor", None), "config", None)
    return int(getattr(config, "vae_scale_factor", None) or _latent_pixels(pipe))


def _latent_pixels(pipe: Any) -> int:
    return getattr(pipe, "vae_scale_factor", None) or FALLBACK_LATENT_PIXELS


def _default_size(pipe: Any, taken: dict[str, Any]) -> dict[str, int]:
    configs = [getattr(getattr(pipe, name, None), "config", None) for name in DENOISERS]
    named = [getattr(pipe, "default_sample_size", None)]
    named += [getattr(config, "sample_size", None) for config in configs]
    latents = next((n for n in named if isinstance(n, int)), None)
    side = FALLBACK_SIDE if latents is None else min(latents * _latent_pixels(pipe), MAX_SIDE)
    return {name: taken.get(name) or side for name in ("width", "height")}


def _guidance(pipe: Any, taken: dict[str, Any]) -> dict[str, Any]:
    """`guidance_scale` is classifier-free guidance where the pipeline takes a negative prompt and
    no true_cfg_scale; beside a true_cfg_scale it is an embedded one, where the model has it."""
    scale = taken.get("guidance_scale")
    if "true_cfg_scale" in taken:
        config = getattr(getattr(pipe, "transformer", None), "config", None)
        embedded = "guidance_scale" in taken and bool(getattr(config, "guidance_embeds", False))
        return {
            "guidance_scale": scale,
            "has_guidance_embedding": embedded,
            "true_cfg_scale": taken["true_cfg_scale"],
        }
    is_cfg = scale is not None and "negative_prompt" in taken
    return {
        "guidance_scale": scale,
        "has_guidance_embedding": scale is not None,
        "guidance_scale_is_cfg": is_cfg,
        "true_cfg_scale": scale if is_cfg else 1.0,
        "cfg_needs_negative_prompt": False,  # without one it is the empty prompt, or zeros
    }
