"""RMSNorm that says which kernel runs it: two kernels differ in 3 elements per million."""

import functools
import logging

import torch
from torch import nn

from sglang.kernels.ops.diffusion.triton.rmsnorm_scale_shift_bitexact import rmsnorm_reference

logger = logging.getLogger(__name__)

# Best first; aten is always there. -> the arithmetic that the fused kernels know it by.
ARITHMETIC_OF_BACKEND = {"sgl_kernel": "flashinfer", "flashinfer": "flashinfer", "aten": "aten"}
PROBED_HIDDEN = 4096  # ERNIE-Image's


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis of `hidden` elements."""

    def __init__(self, hidden: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.eps = eps

    @property
    def backend(self) -> str:
        """The kernel that runs where the weight lies: "sgl_kernel", "flashinfer" or "aten"."""
        if torch.compiler.is_compiling():
            return "aten"  # a foreign kernel would break the graph, and a probe be traced
        return find_backend(self.weight.device, self.weight.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., hidden] of the weight's dtype; returns the same shape."""
        return rms_norm(x, self.weight, self.eps, self.backend)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, backend: str) -> torch.Tensor:
    """RMSNorm of x [..., H] by the named kernel. weight [H], of x's dtype."""
    if backend != "sgl_kernel":
        return rmsnorm_reference(x, weight, eps, backend)
    from sgl_kernel import rmsnorm

    return rmsnorm(x.reshape(-1, x.shape[-1]), weight, eps).view(x.shape)


@functools.cache
def find_backend(device: torch.device, dtype: torch.dtype) -> str:
    """The first kernel of `ARITHMETIC_OF_BACKEND` that runs here; tried once on two rows.

    Only half precision on CUDA has a choice. A package that is there but does not run is warned of.
    """
    if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        for backend in ("sgl_kernel", "flashinfer"):
            if _runs(backend, device, dtype):
                return backend
    return "aten"


def _runs(backend: str, device: torch.device, dtype: torch.dtype) -> bool:
    rows = torch.ones(2, PROBED_HIDDEN, device=device, dtype=dtype)
    try:
        return bool((rms_norm(rows, rows[0], 1e-6, backend) == 1).all())
    except ModuleNotFoundError:
        return False
    except Exception as error:  # of a foreign package: a missing compiler, an unknown GPU, ...
        logger.warning(
            "RMSNorm does not run by %s (%s: %s); trying the next kernel",
            backend,
            type(error).__name__,
            error,
        )
        return False
