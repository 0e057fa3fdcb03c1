"""gated_layernorm_modulate: gated residual sum, LayerNorm and modulation, against eager.

The eager chain is aten's; the bytes are two reads and two writes of `[B, S, D]`, and the rows.
"""

from collections.abc import Iterator

import torch
from timing import BenchRow, bench_row, compiled

from sglang.kernels.ops.diffusion.triton.gated_layernorm_modulate import (
    fused_gated_layernorm_modulate,
    gated_layernorm_modulate_reference,
)

EPS = 1e-6
# FLUX.1's image, joint and text rows, GLM-Image's image rows at 1024x1024
MODEL_SHAPES = ((1, 4096, 3072), (1, 4608, 3072), (1, 512, 3072), (1, 4096, 4096))
# GLM-Image's text rows, FLUX.1 at 2048x2048
OTHER_SHAPES = ((1, 264, 4096), (1, 16384, 3072))


def rows() -> Iterator[BenchRow]:
    """The models' shapes, with torch.compile beside, and others."""
    for shape in MODEL_SHAPES + OTHER_SHAPES:
        yield _row(shape, with_compile=shape in MODEL_SHAPES)
    yield _row(MODEL_SHAPES[0], with_compile=False, dtype=torch.float16)


def _row(
    shape: tuple[int, int, int], with_compile: bool, dtype: torch.dtype = torch.bfloat16
) -> BenchRow:
    batch, _, hidden = shape
    residual, update = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(2))
    projection = torch.randn(batch, 12 * hidden, device="cuda", dtype=dtype)
    gate, scale, shift = projection.chunk(12, dim=1)[:3]
    args = (residual, update, gate, scale, shift, EPS)

    def eager() -> tuple[torch.Tensor, ...]:
        return gated_layernorm_modulate_reference(*args)

    def fused() -> tuple[torch.Tensor, ...]:
        return fused_gated_layernorm_modulate(*args)

    bytes_moved = residual.element_size() * (4 * residual.numel() + 3 * gate.numel())
    compile_fn = compiled(eager) if with_compile else None
    return bench_row(
        "gated_layernorm_modulate", shape, dtype, eager, fused, bytes_moved, compile_fn
    )
