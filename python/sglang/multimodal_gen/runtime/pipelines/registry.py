"""Pipeline class name of model_index.json -> the function that builds it."""

from sglang.multimodal_gen.runtime.pipelines.ernie_image import build_ernie_image
from sglang.multimodal_gen.runtime.pipelines.flux import build_flux
from sglang.multimodal_gen.runtime.pipelines.glm_image import build_glm_image

PIPELINES = {
    "FluxPipeline": build_flux,
    "ErnieImagePipeline": build_ernie_image,
    "GlmImagePipeline": build_glm_image,
}
