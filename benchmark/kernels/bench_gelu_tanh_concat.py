"""gelu_tanh_concat: one kernel against eager's GELU and concatenation."""

from collections.abc import Iterator

import torch
from timing import BenchRow, bench_row, compiled

from sglang.kernels.ops.diffusion.gelu_tanh_concat import (
    gelu_tanh_concat,
    gelu_tanh_concat_reference,
)

FLUX_ROWS = (4608, 1536, 768, 16896, 77)  # 1024^2, 512^2, 256^2, 2048^2 with 512 text rows, odd
HIDDEN, MLP = 3072, 12288


def rows() -> Iterator[BenchRow]:
    """FLUX.1's single-stream block at its picture sizes, batches, and tiny rows."""
    for count in FLUX_ROWS:
        yield _row((1, count, HIDDEN), MLP, with_compile=count == FLUX_ROWS[0])
    yield _row((2, 4608, HIDDEN), MLP, with_compile=False)
    yield _row((1, 1, 64), 64, with_compile=False)
    yield _row((1, 4608, HIDDEN), MLP, with_compile=False, dtype=torch.float16)


def _row(
    shape: tuple[int, ...], mlp_width: int, with_compile: bool, dtype: torch.dtype = torch.bfloat16
) -> BenchRow:
    attn = torch.randn(shape, device="cuda", dtype=dtype)
    mlp = torch.randn(*shape[:2], mlp_width, device="cuda", dtype=dtype)

    def eager() -> torch.Tensor:
        return gelu_tanh_concat_reference(attn, mlp)

    def fused() -> torch.Tensor:
        return gelu_tanh_concat(attn, mlp)

    bytes_moved = 2 * attn.element_size() * (attn.numel() + mlp.numel())
    compile_fn = compiled(eager) if with_compile else None
    full_shape = (*shape, mlp_width)
    return bench_row("gelu_tanh_concat", full_shape, dtype, eager, fused, bytes_moved, compile_fn)
