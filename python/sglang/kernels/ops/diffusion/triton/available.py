"""Whether Triton kernels can run on a device; importable without triton."""

import functools
import importlib.util

import torch

MIN_CAPABILITY = (8, 0)  # the first with bf16 conversions in hardware


@functools.cache
def triton_runs_on(device: torch.device) -> bool:
    """True on a CUDA device of at least sm_80 when triton is installed."""
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    if importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= MIN_CAPABILITY


def aligned(tensor: torch.Tensor, alignment: int = 16) -> bool:
    """Whether the first element's address is a multiple of `alignment` bytes."""
    return tensor.data_ptr() % alignment == 0
