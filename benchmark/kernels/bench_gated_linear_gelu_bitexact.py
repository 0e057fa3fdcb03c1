"""gated_linear_gelu_bitexact: both GEMMs, GELU and product in one kernel against eager's four."""

from collections.abc import Iterator

import torch
from timing import BenchRow, bench_row, compiled

from sglang.kernels.ops.diffusion.gated_linear_gelu_bitexact import (
    can_use_gated_linear_gelu_bitexact,
    gated_linear_gelu_bitexact_cuda,
    gated_linear_gelu_bitexact_reference,
)

HIDDEN, FEED_FORWARD = 4096, 12288
ERNIE_ROWS = 4216  # at 1024x1024 with 120 text tokens
# where it is worth it: few rows and ragged ones, then the CFG batch's and larger pictures'
OTHER_ROWS = (1024, 1100, 1144, 1152, 1288, 1536, 2048, 2304, 3001, 6912, 8192, 8432)


def rows() -> Iterator[BenchRow]:
    """ERNIE-Image's feed-forward, with float16 and compile at its own shape."""
    yield _row(_inputs(ERNIE_ROWS, torch.bfloat16), with_compile=True)
    yield _row(_inputs(ERNIE_ROWS, torch.float16))
    for count in OTHER_ROWS:
        tensors = _inputs(count, torch.bfloat16)
        if can_use_gated_linear_gelu_bitexact(*tensors):
            yield _row(tensors)


def _inputs(count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """x, gate and up."""
    sizes = [(1, count, HIDDEN), (FEED_FORWARD, HIDDEN), (FEED_FORWARD, HIDDEN)]
    x, *weights = (torch.randn(size, device="cuda", dtype=dtype) for size in sizes)
    return [x, *(weight * HIDDEN**-0.5 for weight in weights)]


def _row(tensors: list[torch.Tensor], with_compile: bool = False) -> BenchRow:
    def eager() -> torch.Tensor:
        return gated_linear_gelu_bitexact_reference(*tensors)

    def fused() -> torch.Tensor:
        return gated_linear_gelu_bitexact_cuda(*tensors)

    x, shape = tensors[0], (*tensors[0].shape, FEED_FORWARD)
    compile_fn = compiled(eager) if with_compile else None
    # bound by arithmetic: no copy ceiling to compare with
    return bench_row("gated_linear_gelu_bitexact", shape, x.dtype, eager, fused, None, compile_fn)
