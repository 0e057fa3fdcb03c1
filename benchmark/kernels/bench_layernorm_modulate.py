"""layernorm_modulate: LayerNorm with modulation, and LayerNorm of q and k heads, against eager."""

from collections.abc import Iterator

import torch
from timing import BenchRow, bench_row, compiled

from sglang.kernels.ops.diffusion.triton.layernorm_modulate import (
    fused_layernorm_modulate,
    fused_qk_head_layernorm,
    layernorm_modulate_reference,
    qk_head_layernorm_reference,
)

EPS = 1e-5
DIGEST_SHAPES = ((1, 4096, 4096), (1, 4096, 3072), (1, 512, 3072), (1, 4608, 3072))
# 256^2, 512^2 and 2048^2 of FLUX.1, GLM-Image's text rows, batches, odd ones
OTHER_SHAPES = (
    (1, 256, 3072), (1, 1024, 3072), (1, 16384, 3072), (1, 264, 4096), (2, 1140, 4096),
    (2, 301, 4096), (3, 17, 2240), (1, 4216, 2048), (1, 4216, 8192), (1, 1, 2560), (1, 7, 64),
)  # fmt: skip
DIGEST_HEADS = ((1, 4360, 32, 128),)
OTHER_HEADS = ((1, 1288, 32, 128), (2, 37, 3, 40), (1, 129, 5, 64), (1, 2, 32, 128))


def rows() -> Iterator[BenchRow]:
    """Both ops at the digest's shapes (with torch.compile beside) and at others."""
    for shape in DIGEST_SHAPES + OTHER_SHAPES:
        yield _modulate_row(shape, with_compile=shape in DIGEST_SHAPES)
    yield _modulate_row(DIGEST_SHAPES[0], with_compile=False, dtype=torch.float16)
    for shape in DIGEST_HEADS + OTHER_HEADS:
        yield _heads_row(shape, with_compile=shape in DIGEST_HEADS)


def _modulate_row(
    shape: tuple[int, int, int], with_compile: bool, dtype: torch.dtype = torch.bfloat16
) -> BenchRow:
    batch, _, hidden = shape
    x = torch.randn(shape, device="cuda", dtype=dtype)
    projection = torch.randn(batch, 12 * hidden, device="cuda", dtype=dtype)
    shift, scale = projection.chunk(12, dim=1)[:2]

    def eager() -> torch.Tensor:
        return layernorm_modulate_reference(x, scale, shift, EPS)

    def fused() -> torch.Tensor:
        return fused_layernorm_modulate(x, scale, shift, EPS)

    bytes_moved = x.element_size() * (2 * x.numel() + 2 * scale.numel())
    compile_fn = compiled(eager) if with_compile else None
    return bench_row("layernorm_modulate", shape, dtype, eager, fused, bytes_moved, compile_fn)


def _heads_row(shape: tuple[int, int, int, int], with_compile: bool) -> BenchRow:
    q, k = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def eager() -> tuple[torch.Tensor, torch.Tensor]:
        return qk_head_layernorm_reference(q, k, EPS)

    def fused() -> tuple[torch.Tensor, torch.Tensor]:
        return fused_qk_head_layernorm(q, k, EPS)

    bytes_moved = 4 * q.numel() * q.element_size()
    compile_fn = compiled(eager) if with_compile else None
    return bench_row("qk_head_layernorm", shape, q.dtype, eager, fused, bytes_moved, compile_fn)
