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


@triton.jit
def prefetch(ptrs: tl.tensor) -> None:
    """Bring the lines of these addresses into L2. One address a line of 128 bytes is enough."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [ptrs], tl.int32, is_pure=False, pack=1
    )
