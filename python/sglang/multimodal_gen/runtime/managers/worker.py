"""Owns the device and the pipeline; turns a request into images."""

import weakref
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial

import torch

from sglang.kernels.ops.diffusion.bitexact_gate import all_gates, fast_paths
from sglang.multimodal_gen.configs.model_specs import ModelSpec, choose_backend, read_model_spec
from sglang.multimodal_gen.configs.server_args import ServerArgs
from sglang.multimodal_gen.configs.validation import rejected
from sglang.multimodal_gen.report import fused_sites
from sglang.multimodal_gen.runtime.distributed.parallel_state import SINGLE
from sglang.multimodal_gen.runtime.layers.layerwise_offload import blocks_of, is_offloaded
from sglang.multimodal_gen.runtime.loader.component_loader import ComponentLoader, quiet_libraries
from sglang.multimodal_gen.runtime.loader.lora import lora_file
from sglang.multimodal_gen.runtime.loader.lora_merge import MergedLoras
from sglang.multimodal_gen.runtime.loader.model_folder import find_model_folder
from sglang.multimodal_gen.runtime.managers.messages import (
    EmitProgress,
    GenerateRequest,
    GenerateResponse,
    ImageOutput,
    Progress,
)
from sglang.multimodal_gen.runtime.managers.numeric_switches import numeric_switches
from sglang.multimodal_gen.runtime.managers.previews import PreviewMaker
from sglang.multimodal_gen.runtime.managers.rank_launch import (
    await_loaded,
    check_devices,
    find_layout,
    start_ranks,
)
from sglang.multimodal_gen.runtime.pipelines.base import LoadProgress, Pipeline
from sglang.multimodal_gen.runtime.pipelines.diffusers_pipeline import build_diffusers
from sglang.multimodal_gen.runtime.pipelines.parallel_denoising import lead_ranks
from sglang.multimodal_gen.runtime.pipelines.registry import PIPELINES
from sglang.multimodal_gen.runtime.pipelines.stages.denoising import count_tier_sites
from sglang.multimodal_gen.runtime.pipelines.stages.state import (
    BatchState,
    ImageState,
    ProgressCallback,
)
from sglang.multimodal_gen.runtime.profiling import RequestProfiler

DEFAULT_LORA = "default"  # nickname of the one that `lora_path` names
Builder = Callable[[ComponentLoader, ServerArgs, LoadProgress], Pipeline]


class Worker:
    """Loads the model at construction. `execute` is called by one thread at a time."""

    def __init__(self, args: ServerArgs, emit: EmitProgress) -> None:
        folder = find_model_folder(args.model_path, args.load_format)
        if args.lora_path is not None:
            lora_file(args.lora_path)  # before the model, which takes longer
        self._fast_paths = args.fast_paths
        self._ranks, parallel = None, SINGLE
        self.device = resolve_device(args.device)
        build: Builder = build_diffusers
        if choose_backend(args.backend, folder) == "sglang":
            spec = read_model_spec(folder)
            layout = find_layout(args, spec, folder)
            check_devices(args, self.device)
            if layout.world > 1:
                self._ranks, parallel = start_ranks(args, layout, self.device, folder)
                weakref.finalize(self, self._ranks.close)  # for a caller who never closes
            build = partial(_build, spec)
        loader = ComponentLoader(folder, args.load_format == "dummy", self.device, parallel)
        try:
            self.pipeline = self._load(build, loader, args, emit)
        except BaseException:
            self.close()
            raise
        self.spec = self.pipeline.spec
        self._loras = MergedLoras(self.pipeline.transformer)
        self._tier_sites = count_tier_sites(self.pipeline.transformer)
        if args.lora_path is not None:
            self.set_lora(DEFAULT_LORA, args.lora_path, 1.0)

    def _load(
        self, build: Builder, loader: ComponentLoader, args: ServerArgs, emit: EmitProgress
    ) -> Pipeline:
        with numeric_switches(self.device), quiet_libraries():
            pipeline = build(loader, args, lambda *step: emit(Progress(*step)))
        if args.enable_torch_compile or args.regional_compile:
            _compile(pipeline.transformer, args.regional_compile)
            pipeline.compiled = True
        if self._ranks is not None:
            await_loaded(self._ranks)
            lead_ranks(pipeline, self._ranks)
        pipeline.layout = loader.parallel.layout
        return pipeline

    def close(self) -> None:
        """End the further ranks, if any; the worker cannot be used afterwards."""
        if self._ranks is not None:
            self._ranks.close()

    def set_lora(self, nickname: str, path: str, strength: float) -> None:
        """Merge a LoRA into the transformer. Raises InvalidParameter where that cannot be."""
        pipeline = self.pipeline
        if pipeline.backend != "sglang" or pipeline.layout.world > 1:
            expected = "None: LoRA needs this package's own model on one GPU"
            raise rejected("lora_path", path, expected)
        if is_offloaded(pipeline.transformer):
            raise rejected("lora_path", path, "None with dit_layerwise_offload")
        self._loras.merge(nickname, path, strength)
        pipeline.loras = tuple(lora.describe() for lora in self._loras)

    def unmerge_lora(self) -> None:
        """Take all LoRAs away."""
        self._loras.clear()
        self.pipeline.loras = ()

    def execute(self, request: GenerateRequest, emit: EmitProgress) -> GenerateResponse:
        """Run every stage over the request's images."""
        params = request.params
        if params.generator_device == "cuda" and not torch.cuda.is_available():
            raise rejected("generator_device", "cuda", "cpu on a machine without a CUDA GPU")
        images = [ImageState(image) for image in params.expand()]
        true_cfg = params.true_cfg_scale > 1 and params.negative_prompt is not None
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode())
            stack.enter_context(numeric_switches(self.device))
            stack.enter_context(nullcontext() if self._fast_paths else fast_paths(False))
            on_step = stack.enter_context(RequestProfiler(params, self.device)).on_step
            batch = BatchState(params, images, _progress(emit, on_step), true_cfg)
            if request.previews:
                batch.on_estimate = PreviewMaker(request, self.pipeline, emit)
            self._reset_counters()
            seconds = self.pipeline.run(batch)
        return GenerateResponse(
            request_id=request.request_id,
            images=tuple(map(_image_output, images)),
            stage_seconds=seconds,
            mounted=batch.mounted,
            sites=fused_sites(batch.mounted, self._tier_sites),
            peak_memory_mb=self._peak_memory_mb(),
        )

    def _reset_counters(self) -> None:
        for gate in all_gates():
            gate.reset_counters()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def _peak_memory_mb(self) -> float:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 2**20
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _build(
    spec: ModelSpec, loader: ComponentLoader, args: ServerArgs, on_load: LoadProgress
) -> Pipeline:
    return PIPELINES[spec.pipeline_class](loader, spec, args, on_load)


def _compile(transformer: torch.nn.Module, regional: bool) -> None:
    """At its first forward; `regional`: each of its blocks alone, equal ones once."""
    modules = blocks_of(transformer) if regional else [transformer]
    if not modules:
        raise rejected("regional_compile", True, "False: this model's transformer has no blocks")
    for module in modules:
        module.compile()


def resolve_device(name: str) -> torch.device:
    """`auto` is the current GPU where there is one. Raises ValueError for cuda without one."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise rejected("device", name, "cpu on a machine without a CUDA GPU", "use device='cpu'")
    return torch.device("cuda", torch.cuda.current_device())


def _image_output(image: ImageState) -> ImageOutput:
    asked = image.request
    return ImageOutput(
        index=asked.index,
        prompt=asked.prompt,
        seed=asked.seed,
        pixels=image.pixels,
        step_seconds=tuple(image.step_seconds),
        revised_prompt=image.revised_prompt,
    )


def _progress(emit: EmitProgress, on_step: Callable[[], None]) -> ProgressCallback:
    def advance(label: str, done: int, total: int) -> None:
        if label.startswith("denoise"):
            on_step()
        emit(Progress(label, done, total))

    return advance
