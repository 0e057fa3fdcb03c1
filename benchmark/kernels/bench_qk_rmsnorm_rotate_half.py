"""q and k RMSNorm + half-split rotation against eager, on views of a packed q|k|v projection."""

from collections.abc import Iterator

import torch
from timing import BenchRow, bench_row, compiled

from sglang.kernels.ops.diffusion.triton.qk_rmsnorm_rotate_half import (
    fused_qk_rmsnorm_rotate_half,
    qk_rmsnorm_rotate_half_reference,
)

EPS = 1e-6
# ERNIE-Image at 1024^2 with 120 text tokens, its CFG batch, 512^2, 2048^2, heads of a split, odd
SHAPES = (
    (1, 4216, 32, 128), (2, 4216, 32, 128), (1, 1144, 32, 128), (1, 16504, 32, 128),
    (1, 4216, 8, 128), (1, 4216, 24, 128), (2, 37, 3, 64), (1, 1, 1, 16),
)  # fmt: skip


def rows() -> Iterator[BenchRow]:
    """The first shape also with torch.compile and in float16."""
    for shape in SHAPES:
        yield _row(shape, with_compile=shape == SHAPES[0])
    yield _row(SHAPES[0], dtype=torch.float16)


def _row(
    shape: tuple[int, int, int, int],
    with_compile: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> BenchRow:
    batch, tokens, heads, head_dim = shape
    qkv = torch.randn(batch, tokens, 3 * heads * head_dim, device="cuda", dtype=dtype)
    q, k, _ = (x.unflatten(-1, (heads, head_dim)) for x in qkv.chunk(3, dim=-1))
    weights = torch.randn(2, head_dim, device="cuda", dtype=dtype)
    angles = torch.rand(tokens, 1, head_dim // 2, device="cuda").mul(700).repeat_interleave(2, -1)
    args = (q, k, *weights, angles.cos().to(dtype), angles.sin().to(dtype), EPS)

    def eager() -> tuple[torch.Tensor, torch.Tensor]:
        return qk_rmsnorm_rotate_half_reference(*args)

    def fused() -> tuple[torch.Tensor, torch.Tensor]:
        return fused_qk_rmsnorm_rotate_half(*args)

    bytes_moved = q.element_size() * (4 * q.numel() + 2 * tokens * head_dim)
    compile_fn = compiled(eager) if with_compile else None
    return bench_row("qk_rmsnorm_rotate_half", shape, dtype, eager, fused, bytes_moved, compile_fn)
