"""linear_gelu_bitexact: GEMM, GELU and concatenation in one kernel against eager's three."""

from collections.abc import Iterator

import torch
from timing import BenchRow, bench_row, compiled

from sglang.kernels.ops.diffusion.linear_gelu_bitexact import (
    can_use_linear_gelu_bitexact,
    linear_gelu_bitexact_cuda,
    linear_gelu_bitexact_reference,
)

FLUX, GLM = (3072, 12288), (4096, 16384)
FLUX_ROWS, FLUX_JOINT_ROWS, GLM_ROWS = 4096, 4608, 4096  # at 1024x1024
# where it is worth it: few rows and ragged ones, then larger pictures
OTHER_ROWS = (1024, 1100, 1152, 1288, 1536, 2048, 2304, 3001, 6912, 8192)


def rows() -> Iterator[BenchRow]:
    """FLUX.1's single-stream block (with attn) and image stream, GLM-Image's feed-forward."""
    yield _row(FLUX_JOINT_ROWS, *FLUX, attn_width=3072, with_compile=True)
    yield _row(FLUX_JOINT_ROWS, *FLUX, attn_width=3072, dtype=torch.float16)
    yield _row(FLUX_ROWS, *FLUX)
    yield _row(GLM_ROWS, *GLM)
    for count in OTHER_ROWS:
        yield from _row_where_taken(count, *FLUX, attn_width=3072)
        yield from _row_where_taken(count, *FLUX)
        yield from _row_where_taken(count, *GLM)


def _row_where_taken(count: int, depth: int, width: int, attn_width: int = 0) -> Iterator[BenchRow]:
    if can_use_linear_gelu_bitexact(*_inputs(count, depth, width, attn_width, torch.bfloat16)):
        yield _row(count, depth, width, attn_width)


def _inputs(
    count: int, depth: int, width: int, attn_width: int, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """x, weight and bias; attn behind them where it has a width."""
    sizes = [(1, count, depth), (width, depth), (width,), (1, count, attn_width)]
    x, weight, bias, attn = (torch.randn(size, device="cuda", dtype=dtype) for size in sizes)
    weight *= depth**-0.5
    return (x, weight, bias, attn) if attn_width else (x, weight, bias)


def _row(
    count: int,
    depth: int,
    width: int,
    attn_width: int = 0,
    with_compile: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> BenchRow:
    tensors = _inputs(count, depth, width, attn_width, dtype)

    def eager() -> torch.Tensor:
        return linear_gelu_bitexact_reference(*tensors)

    def fused() -> torch.Tensor:
        return linear_gelu_bitexact_cuda(*tensors)

    name = "linear_gelu_bitexact behind attn" if attn_width else "linear_gelu_bitexact"
    compile_fn = compiled(eager) if with_compile else None
    # bound by arithmetic: no copy ceiling to compare with
    return bench_row(name, (1, count, depth, width), dtype, eager, fused, None, compile_fn)
