"""The process-wide switches that change bits: set for each request, the caller's restored after."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch


@contextmanager
def numeric_switches(device: torch.device) -> Iterator[None]:
    """Inside, whatever the caller has set: float32 matmuls and convolutions in IEEE precision (no
    TF32, no bf16 passes), no cuDNN autotuning (its choice may differ between runs), reduced-
    precision reductions in half GEMMs as torch has them by default, no autocast, float32 and the
    CPU as defaults for new tensors.
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


def _wanted() -> list[tuple[object, str, object]]:
    backends = torch.backends
    # The older allow_tf32 flags raise once a caller has used these.
    precise = [backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn.matmul]
    return [
        *((holder, "fp32_precision", "ieee") for holder in (*precise, backends.mkldnn.conv)),
        (backends.cudnn, "benchmark", False),
        (backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", True),
        (backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", True),
    ]


def _cpu_by_default() -> "torch.device | nullcontext[None]":
    # The context costs every torch call a Python dispatch, so only where it changes something.
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")
