"""Device side of `dependent_launch.py`."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def begin(PDL: tl.constexpr) -> None:
    """Let the next kernel's programs start, then wait for the kernels before this one."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
