"""q and k LayerNorm + rotation of the image tokens against eager, on views of a packed q|k|v."""

from collections.abc import Iterator

import torch
from timing import BenchRow, bench_row, compiled

from sglang.kernels.ops.diffusion.triton.qk_layernorm_rope import (
    fused_qk_layernorm_rope,
    qk_layernorm_rope_reference,
)

EPS = 1e-5
# ((B, tokens, H, D), text tokens): GLM-Image at 1024^2, its CFG batch, 512^2, 2048^2, a split, odd
CASES = (
    ((1, 4360, 32, 128), 264), ((2, 4360, 32, 128), 264), ((1, 1288, 32, 128), 264),
    ((1, 16648, 32, 128), 264), ((1, 4360, 8, 128), 264), ((2, 37, 3, 64), 5), ((1, 1, 1, 16), 0),
)  # fmt: skip


def rows() -> Iterator[BenchRow]:
    """The first case also with torch.compile and in float16."""
    for shape, text in CASES:
        yield _row(shape, text, with_compile=shape == CASES[0][0])
    yield _row(*CASES[0], dtype=torch.float16)


def _row(
    shape: tuple[int, int, int, int],
    text: int,
    with_compile: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> BenchRow:
    batch, tokens, heads, head_dim = shape
    qkv = torch.randn(batch, tokens, 3 * heads * head_dim, device="cuda", dtype=dtype)
    q, k, _ = (x.unflatten(-1, (heads, head_dim)) for x in qkv.chunk(3, dim=-1))
    angles = torch.rand(tokens - text, head_dim // 2, device="cuda").mul(700)
    cos, sin = angles.cos(), angles.sin()
    args = (q, k, torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1), text, EPS)

    def eager() -> tuple[torch.Tensor, torch.Tensor]:
        return qk_layernorm_rope_reference(*args)

    def fused() -> tuple[torch.Tensor, torch.Tensor]:
        return fused_qk_layernorm_rope(*args)

    bytes_moved = q.element_size() * 4 * q.numel() + 8 * angles.numel()
    compile_fn = compiled(eager) if with_compile else None
    return bench_row("qk_layernorm_rope", shape, dtype, eager, fused, bytes_moved, compile_fn)
