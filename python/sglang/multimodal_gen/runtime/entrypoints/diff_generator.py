"""The Python entry point: load a model once, generate pictures from it."""

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from PIL import Image

from sglang.multimodal_gen.configs.rules import Choice, Folder, Number, Text
from sglang.multimodal_gen.configs.sampling_params import SamplingParams
from sglang.multimodal_gen.configs.server_args import ServerArgs
from sglang.multimodal_gen.configs.validation import InvalidParameter
from sglang.multimodal_gen.report import build_report
from sglang.multimodal_gen.runtime.entrypoints.image_files import (
    OutputError,
    check_writable_folder,
    save_images,
)
from sglang.multimodal_gen.runtime.entrypoints.progress import make_display
from sglang.multimodal_gen.runtime.managers.messages import GenerateResponse, ImageOutput
from sglang.multimodal_gen.runtime.managers.scheduler import Scheduler
from sglang.multimodal_gen.runtime.managers.scheduler_client import SchedulerClient
from sglang.multimodal_gen.runtime.managers.worker import Worker

logger = logging.getLogger(__name__)
_LORA_RULES = {
    "nickname": Text(200),
    "path": Folder(),
    "strength": Number(-100, 100),
    "target": Choice(("all", "transformer")),
}


@dataclass
class GenerationResult:
    """One picture, with all that is needed to make it again."""

    image: Image.Image
    frames: np.ndarray | None  # uint8 [height, width, 3], with return_frames=True
    prompt: str
    revised_prompt: str | None  # what a prompt enhancer made of it
    seed: int
    size: tuple[int, int]  # width, height
    output_file_path: str | None
    generation_time: float  # seconds of the whole request
    peak_memory_mb: float
    report: dict[str, Any]


class DiffGenerator:
    """A loaded model. Use as a context manager, or call `close`."""

    def __init__(self, args: ServerArgs) -> None:
        logging.getLogger("sglang").setLevel(args.log_level.upper())
        self.server_args = args
        with make_display() as display:
            self._worker: Worker | None = Worker(args, display)
        self._client = SchedulerClient(Scheduler(self._worker))

    @classmethod
    def from_pretrained(
        cls,
        model_path: str | Path | None = None,
        *,
        num_gpus: int = ServerArgs.num_gpus,
        local_mode: bool = ServerArgs.local_mode,
        **server_args: Any,
    ) -> "DiffGenerator":
        """Load a model: a folder in diffusers layout, a hub id, or (None) the bundled model.

        The keywords are the fields of `ServerArgs`. Raises ValueError naming a bad or unknown
        keyword, a folder that is no checkpoint, or the weights that are missing or do not fit.
        """
        return cls(
            ServerArgs.from_kwargs(
                model_path=model_path, num_gpus=num_gpus, local_mode=local_mode, **server_args
            )
        )

    def generate(
        self,
        prompt: str | list[str] | None = None,
        *,
        sampling_params_kwargs: dict[str, Any] | None = None,
        **sampling_params: Any,
    ) -> GenerationResult | list[GenerationResult]:
        """Make the pictures of one request.

        Both keyword forms name the fields of `SamplingParams`. One picture gives one result,
        several a list in prompt order. Raises ValueError for a bad field; OutputError when a file
        cannot be written, with the finished pictures in its `results`; and whatever the engine
        raised.
        """
        worker = self._open_worker("generate")
        asked = SamplingParams.from_kwargs(
            **_merge(prompt, sampling_params_kwargs or {}, sampling_params)
        )
        params = asked.resolve(worker.spec)
        if params.profile:
            check_writable_folder("output_path", Path(params.output_path))
        start = time.perf_counter()
        with make_display() as display:
            response = self._client.generate(params, display)
        seconds = time.perf_counter() - start
        results = [self._result(i, response, params, seconds) for i in response.images]
        self._warn_unmounted(results[0].report)
        if params.save_output:
            _save(results, params)
        return results if params.num_images > 1 else results[0]

    def set_lora(
        self, nickname: str, path: str | Path, strength: float = 1.0, target: str = "all"
    ) -> None:
        """Merge a LoRA (a safetensors file, or a folder with one) into the transformer's weights,
        beside those of other nicknames; the same nickname replaces.

        `target` "all" and "transformer" mean the same. Raises ValueError naming what does not fit
        this model; then nothing has changed.
        """
        for name, value in (("nickname", nickname), ("strength", strength), ("target", target)):
            _LORA_RULES[name].check(name, value)
        checked = _LORA_RULES["path"].check("path", path)
        worker = self._open_worker("set_lora")
        self._client.between_requests(lambda: worker.set_lora(nickname, checked, float(strength)))

    def unmerge_lora(self) -> None:
        """Take all LoRAs away: the weights have their original bytes again."""
        self._client.between_requests(self._open_worker("unmerge_lora").unmerge_lora)

    def list_loras(self) -> list[dict[str, Any]]:
        """Nickname, path, strength and number of weights of each merged LoRA, the first first."""
        return list(self._open_worker("list_loras").pipeline.loras)

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        return self._open_worker("device").device

    @property
    def transformer(self) -> torch.nn.Module:
        """The loaded DiT, for inspection."""
        return self._open_worker("transformer").pipeline.transformer

    def _open_worker(self, what: str) -> Worker:
        if self._worker is None:
            raise RuntimeError(f"{what}: this generator is closed; load another one")
        return self._worker

    def close(self) -> None:
        """Free the memory and end the processes; the generator cannot be used afterwards."""
        if self._worker is not None:
            self._worker.close()
        self._worker = self._client = None

    def __enter__(self) -> "DiffGenerator":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _result(
        self, image: ImageOutput, response: GenerateResponse, params: SamplingParams, seconds: float
    ) -> GenerationResult:
        return GenerationResult(
            image=Image.fromarray(image.pixels),
            frames=image.pixels if params.return_frames else None,
            prompt=image.prompt,
            revised_prompt=image.revised_prompt,
            seed=image.seed,
            size=(params.width, params.height),
            output_file_path=None,
            generation_time=seconds,
            peak_memory_mb=response.peak_memory_mb,
            report=build_report(image, response, params, self._worker.pipeline),
        )

    def _warn_unmounted(self, report: dict[str, Any]) -> None:
        if report["quality"] == "compiled":
            logger.warning(
                "the transformer is compiled: the picture is not bit for bit the %s one",
                report["requested_quality"],
            )
        elif report["quality"] != report["requested_quality"]:
            logger.warning(
                "quality=%s was asked for, but none of its fusions runs on %s: the picture is %s",
                report["requested_quality"],
                self._worker.device,
                report["quality"],
            )


def _merge(
    prompt: str | list[str] | None, first: dict[str, Any], second: dict[str, Any]
) -> dict[str, Any]:
    merged = {**first, **second}
    given_twice = sorted(first.keys() & second.keys())
    if prompt is not None:
        given_twice += ["prompt"] if "prompt" in merged else []
        merged["prompt"] = prompt
    if given_twice:
        raise InvalidParameter(given_twice[0], "given twice; expected it once")
    return merged


def _save(results: list[GenerationResult], params: SamplingParams) -> None:
    try:
        paths = save_images([r.image for r in results], params.expand(), params)
    except OutputError as error:
        error.results = tuple(results)
        raise
    for result, path in zip(results, paths, strict=True):
        result.output_file_path = str(path)
