"""Pipeline class name of model_index.json -> the function that builds it."""

from sglang.multimodal_gen.runtime.pipelines.flux import build_flux
from sglang.multimodal_gen.runtime.pipelines.glm_image import build_glm_image

PIPELINES = {
    "FluxPipeline": build_flux,
    "GlmImagePipeline": build_glm_image,
}
