"""Programmatic dependent launch: a kernel starts while the one before it drains.

A decode step is some 300 short kernels in a row, and each would begin with an idle GPU. Launched
dependently (sm_90 and newer), a kernel's programs start as soon as those of the kernel before have
all begun, may fetch what no kernel writes (weights), and then wait for that kernel's last write.

The contract of a kernel with the constant `PDL`: every program calls `begin(PDL)` once, before it
reads or writes anything another kernel writes or reads. Then the kernels behave as in a plain
stream, because the waits chain: whoever is past its wait knows that all earlier kernels ended.
To `prefetch` is not to read: later writes reach the L2 as well. A load before the wait would keep
a stale line in L1, even for a second load after it.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch

MIN_CAPABILITY = (9, 0)


_wanted = True


def launch_options(device: torch.device) -> dict[str, Any]:
    """The launch keywords of a kernel that has the constant `PDL`, on this device."""
    if _wanted and device.type == "cuda" and _supported(device):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@functools.cache
def _supported(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= MIN_CAPABILITY


@contextlib.contextmanager
def dependent_launch(wanted: bool) -> Iterator[None]:
    """Launch dependently, or not, in a `with` block; process-wide. It never changes a result."""
    global _wanted
    previous, _wanted = _wanted, wanted
    try:
        yield
    finally:
        _wanted = previous
