"""Any text-to-image pipeline of diffusers behind the same requests and reports.

The weights load as strictly as ours do; the pipeline's own call makes each picture, alone, from a
generator with the picture's seed, so a picture equals that of `pipe(prompt, generator=...)`.
"""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sglang.multimodal_gen.configs.model_specs import OVERRIDES_KEY, ModelSpec, read_json
from sglang.multimodal_gen.configs.sampling_params import SamplingParams
from sglang.multimodal_gen.configs.server_args import ServerArgs
from sglang.multimodal_gen.configs.validation import rejected
from sglang.multimodal_gen.runtime.loader.component_loader import DTYPES, ComponentLoader
from sglang.multimodal_gen.runtime.loader.weights import CheckpointError
from sglang.multimodal_gen.runtime.pipelines.base import LoadProgress, Pipeline
from sglang.multimodal_gen.runtime.pipelines.diffusers_spec import (
    DENOISERS,
    PASSED,
    diffusers_spec,
    taken_parameters,
)
from sglang.multimodal_gen.runtime.pipelines.stages.checks import NonFiniteError
from sglang.multimodal_gen.runtime.pipelines.stages.denoising import HIGH_TIER
from sglang.multimodal_gen.runtime.pipelines.stages.state import BatchState, ImageState
from sglang.multimodal_gen.runtime.pipelines.step_clock import StepClock

OnStep = Callable[[Any, int, Any, dict[str, Any]], dict[str, Any]]

NO_SITES = "the diffusers backend has no fused sites"


class DiffusersPipelineError(RuntimeError):
    """A pipeline ended without the picture that was asked for."""


def build_diffusers(loader: ComponentLoader, args: ServerArgs, on_load: LoadProgress) -> Pipeline:
    """Load a folder of any pipeline class that diffusers has.

    Raises InvalidParameter for a class that it lacks or that needs more than a prompt, and for a
    setting that cannot act on it; CheckpointError for weights that are missing or do not fit.
    """
    args.check_acts_on_diffusers()
    index = read_json(loader.folder / "model_index.json")
    cls = _pipeline_class(index.get("_class_name"))
    precisions = {p: args.precision(p, loader.device.type) for p in ("dit", "vae", "text_encoder")}
    pipe = _load(cls, loader, dict(_models(loader, index, precisions, on_load)))
    spec = diffusers_spec(pipe).with_overrides(index.get(OVERRIDES_KEY, {}))
    found = (getattr(pipe, name, None) for name in DENOISERS)
    denoiser = next((module for module in found if module is not None), torch.nn.Module())
    return Pipeline(
        spec=spec,
        transformer=denoiser,
        stages=(DiffusersStage(pipe, spec, loader.device),),
        device=loader.device,
        attention_backend="diffusers",
        precisions=precisions,
        backend="diffusers",
    )


def _pipeline_class(name: object) -> type:
    import diffusers

    cls = getattr(diffusers, name, None) if isinstance(name, str) else None
    if not (isinstance(cls, type) and issubclass(cls, diffusers.DiffusionPipeline)):
        known = f"a pipeline class of diffusers {diffusers.__version__}"
        raise rejected("model_path", name, f"{known} in model_index.json", "check the checkpoint")
    return cls


def _models(
    loader: ComponentLoader,
    index: dict[str, Any],
    precisions: dict[str, str],
    on_load: LoadProgress,
) -> Iterator[tuple[str, torch.nn.Module]]:
    """Every component that is a model, loaded strictly; diffusers itself only logs what lacks."""
    entries = {k: v for k, v in index.items() if isinstance(v, list) and len(v) == 2 and all(v)}
    for i, (name, (library, class_name)) in enumerate(entries.items()):
        on_load(name, i, len(entries))
        if library in ("diffusers", "transformers"):
            cls = getattr(importlib.import_module(library), class_name, None)
            if isinstance(cls, type) and issubclass(cls, torch.nn.Module):
                ours = library == "diffusers"
                load = loader.diffusers_model if ours else loader.transformers_model
                dtype = DTYPES[precisions[_part(name, library)]]
                yield name, load(name, cls, dtype, loader.device)
    on_load("ready", len(entries), len(entries))


def _part(name: str, library: str) -> str:
    if library == "transformers":
        return "text_encoder"
    return "vae" if name.startswith(("vae", "vq")) else "dit"


def _load(cls: type, loader: ComponentLoader, models: dict[str, torch.nn.Module]) -> Any:
    path: Path = loader.folder
    try:
        pipe = cls.from_pretrained(path, local_files_only=True, use_safetensors=True, **models)
    except (OSError, RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise CheckpointError(f"{path}: cannot load {cls.__name__}: {error}") from error
    except ImportError as error:  # of a package that only this pipeline needs
        raise CheckpointError(f"{path}: {cls.__name__} needs a package: {error}") from error
    pipe.set_progress_bar_config(disable=True)
    return pipe.to(loader.device)


@dataclass
class DiffusersStage:
    """Calls the pipeline once an image."""

    pipe: Any
    spec: ModelSpec
    device: torch.device
    name: str = "DiffusersStage"

    def __call__(self, batch: BatchState) -> None:
        if batch.params.quality == "high":
            batch.mounted = dict.fromkeys(HIGH_TIER, NO_SITES)
        for index, image in enumerate(batch.images):
            label = f"denoise {index + 1}/{len(batch.images)}"
            clock = StepClock(self.device)  # the first step counts what comes before it, too
            on_step = self._step_callback(batch, label, clock)
            output = self.pipe(**self.call_arguments(image, batch.params, on_step))
            image.step_seconds = clock.seconds()
            image.pixels = self.checked(output, batch.params)

    @staticmethod
    def _step_callback(batch: BatchState, label: str, clock: StepClock) -> OnStep:
        """Whoever hears of progress may raise: that ends the pipeline's call within the step."""

        def on_step(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            clock.tick()
            total = getattr(pipe, "num_timesteps", 0) or batch.params.num_inference_steps
            batch.on_progress(label, step + 1, total)
            return tensors

        return on_step

    def call_arguments(
        self, image: ImageState, params: SamplingParams, on_step: OnStep
    ) -> dict[str, Any]:
        """The keywords that the pipeline takes; what the request leaves open is left out."""
        generator = torch.Generator(params.generator_device).manual_seed(image.request.seed)
        values = {name: getattr(params, name) for name in PASSED}
        if not (self.spec.has_guidance_embedding or self.spec.guidance_scale_is_cfg):
            del values["guidance_scale"]
        values |= {"prompt": image.prompt, "generator": generator, "output_type": "np"}
        values["callback_on_step_end"] = on_step
        taken = taken_parameters(self.pipe)
        return {key: v for key, v in values.items() if key in taken and v is not None}

    def checked(self, output: Any, params: SamplingParams) -> np.ndarray:
        """uint8 [height, width, 3], rounded as diffusers rounds for PIL."""
        images = getattr(output, "images", None)
        if images is None or len(images) != 1:
            got = type(output).__name__ if images is None else f"{len(images)} images"
            raise DiffusersPipelineError(f"{self.name}: got {got}, expected one image")
        if any(getattr(output, "nsfw_content_detected", None) or ()):
            raise DiffusersPipelineError(
                f"{self.name}: the checkpoint's safety checker withheld the picture; try another"
                " prompt or seed"
            )
        pixels = np.asarray(images[0])
        if pixels.shape != (params.height, params.width, 3):
            raise DiffusersPipelineError(
                f"{self.name}: got a picture of shape {pixels.shape}, expected height"
                f" {params.height}, width {params.width} and 3 channels; ask for another size"
            )
        if not np.isfinite(pixels).all():
            raise NonFiniteError(
                f"{self.name}: the decoded image holds NaN or infinite values, expected none;"
                " check the checkpoint's weights and the precision"
            )
        return (pixels * 255).round().astype(np.uint8)
