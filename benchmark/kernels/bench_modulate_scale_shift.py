"""modulate_scale_shift: one kernel against eager's add, multiply and add."""

from collections.abc import Iterator

import torch
from timing import BenchRow, bench_row, compiled

from sglang.kernels.ops.diffusion.modulate_scale_shift import (
    modulate_scale_shift,
    modulate_scale_shift_reference,
)

DIGEST_SHAPES = ((1, 4096, 3072), (1, 512, 3072), (1, 4608, 3072))
# FLUX.1 at 256^2, 512^2 and 2048^2, ERNIE-Image, GLM-Image, batches and odd row counts
OTHER_SHAPES = (
    (1, 256, 3072),
    (1, 1024, 3072),
    (1, 16384, 3072),
    (1, 4216, 4096),
    (2, 4096, 3072),
    (3, 17, 64),
    (1, 77, 2240),
    (1, 1, 64),
)


def rows() -> Iterator[BenchRow]:
    """Chunk views of one projection for B = 1, as adaLN gives them; contiguous rows for batches."""
    for shape in DIGEST_SHAPES + OTHER_SHAPES:
        yield _row(shape, with_compile=shape in DIGEST_SHAPES)
    yield _row(DIGEST_SHAPES[0], with_compile=False, dtype=torch.float16)


def _row(
    shape: tuple[int, ...], with_compile: bool, dtype: torch.dtype = torch.bfloat16
) -> BenchRow:
    batch, _, width = shape
    x = torch.randn(shape, device="cuda", dtype=dtype)
    projection = torch.randn(batch, 6 * width, device="cuda", dtype=dtype)
    shift, scale = (
        row if batch == 1 else row.contiguous() for row in projection.chunk(6, dim=1)[:2]
    )

    def eager() -> torch.Tensor:
        return modulate_scale_shift_reference(x, scale, shift)

    def fused() -> torch.Tensor:
        return modulate_scale_shift(x, scale, shift)

    bytes_moved = x.element_size() * (2 * x.numel() + scale.numel() + shift.numel())
    compile_fn = compiled(eager) if with_compile else None
    return bench_row("modulate_scale_shift", shape, dtype, eager, fused, bytes_moved, compile_fn)
