"""Pipeline class name of model_index.json -> the functions that build it."""

from sglang.multimodal_gen.runtime.pipelines.ernie_image import (
    build_ernie_image,
    load_ernie_denoising,
)
from sglang.multimodal_gen.runtime.pipelines.flux import build_flux, load_flux_denoising
from sglang.multimodal_gen.runtime.pipelines.glm_image import (
    build_glm_image,
    load_glm_denoising,
)

PIPELINES = {
    "FluxPipeline": build_flux,
    "ErnieImagePipeline": build_ernie_image,
    "GlmImagePipeline": build_glm_image,
}
# What the ranks besides the first load: the transformer and its loop.
DENOISING = {
    "FluxPipeline": load_flux_denoising,
    "ErnieImagePipeline": load_ernie_denoising,
    "GlmImagePipeline": load_glm_denoising,
}
