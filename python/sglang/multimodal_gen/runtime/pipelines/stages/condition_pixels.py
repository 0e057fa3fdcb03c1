"""A picture of the request as the VAE reads it."""

import torch

from sglang.multimodal_gen.configs.condition_image import ConditionImage


def vae_pixels(picture: ConditionImage, height: int, width: int) -> torch.Tensor:
    """float32 [1, 3, height, width] in -1..1 on the CPU: stretched by Lanczos where it differs."""
    from diffusers.image_processor import VaeImageProcessor

    # A scale of 1: the sizes are multiples of the VAE's already.
    processor = VaeImageProcessor(vae_scale_factor=1)
    return processor.preprocess(picture.to_pil(), height=height, width=width)
