"""The process-wide switches that change bits: set for each request, the caller's restored after."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from operator import attrgetter

import torch

# Of torch.backends; the report names them. The older allow_tf32 flags raise once a caller has used
# the newer fp32_precision.
SWITCHES: dict[str, str | bool] = {
    "cuda.matmul.fp32_precision": "ieee",
    "cudnn.conv.fp32_precision": "ieee",
    "mkldnn.matmul.fp32_precision": "ieee",
    "mkldnn.conv.fp32_precision": "ieee",
    "cuda.matmul.allow_bf16_reduced_precision_reduction": True,
    "cuda.matmul.allow_fp16_reduced_precision_reduction": True,
    "cuda.matmul.allow_fp16_accumulation": False,
    "cudnn.enabled": True,
    "cudnn.benchmark": False,
    "cudnn.deterministic": False,
}


@contextmanager
def numeric_switches(device: torch.device) -> Iterator[None]:
    """Inside, whatever the caller has set: float32 matmuls and convolutions in IEEE precision (no
    TF32, no bf16 passes), no cuDNN autotuning (its choice may differ between runs), cuDNN and the
    accumulation of half GEMMs as torch has them by default, no autocast, float32 and the CPU as
    defaults for new tensors.
    """
    previous = [getattr(holder, name) for holder, name, _ in _wanted()]
    default_dtype = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float32)
        for holder, name, value in _wanted():
            setattr(holder, name, value)
        with torch.autocast(device.type, enabled=False), _cpu_by_default():
            yield
    finally:
        torch.set_default_dtype(default_dtype)
        for (holder, name, _), value in zip(_wanted(), previous, strict=True):
            setattr(holder, name, value)


def _wanted() -> Iterator[tuple[object, str, str | bool]]:
    for path, value in SWITCHES.items():
        holder, _, name = path.rpartition(".")
        yield attrgetter(holder)(torch.backends), name, value


def _cpu_by_default() -> "torch.device | nullcontext[None]":
    # The context costs every torch call a Python dispatch, so only where it changes something.
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")
