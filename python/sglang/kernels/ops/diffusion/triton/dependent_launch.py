"""Programmatic dependent launch: a kernel starts while the one before it drains.

A decode step is some 300 short kernels in a row, and each would begin with an idle GPU. Launched
dependently (sm_90 and newer), a kernel's programs start as soon as those of the kernel before have
all begun, may fetch what no kernel writes (weights), and then wait for that kernel's last write.

The contract of a kernel with the constant `PDL`: every program calls `begin(PDL)` once, before it
reads or writes anything another kernel writes or reads. Then the kernels behave as in a plain
stream, because the waits chain: whoever is past its wait knows that all earlier kernels ended.
"""

import functools
from typing import Any

import torch

MIN_CAPABILITY = (9, 0)


@functools.cache
def launch_options(device: torch.device) -> dict[str, Any]:
    """The launch keywords of a kernel that has the constant `PDL`, on this device."""
    pdl = device.type == "cuda" and torch.cuda.get_device_capability(device) >= MIN_CAPABILITY
    return {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}
