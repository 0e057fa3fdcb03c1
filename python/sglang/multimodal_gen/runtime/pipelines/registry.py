"""Pipeline class name of model_index.json -> the function that builds it."""

from sglang.multimodal_gen.runtime.pipelines.flux import build_flux

PIPELINES = {"FluxPipeline": build_flux}
