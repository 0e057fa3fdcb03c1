"""fused_ln_modulate: the folded LayerNorm against LayerNorm, then the bit-exact modulate."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from timing import BenchRow, bench_row, compiled

from sglang.kernels.ops.diffusion.fused_ln_modulate import fused_ln_modulate
from sglang.kernels.ops.diffusion.modulate_scale_shift import modulate_scale_shift

HIDDEN, EPS = 3072, 1e-6
DIGEST_ROWS = (4096, 512)  # FLUX.1 at 1024x1024: image, text
OTHER_ROWS = (4608, 256, 1024, 16384, 257, 300)  # joint, 256^2, 512^2, 2048^2, odd


def rows() -> Iterator[BenchRow]:
    """Eager here is what the digest compares with: a plain LayerNorm and the fused modulate."""
    projection = torch.randn(1, 6 * HIDDEN, device="cuda", dtype=torch.bfloat16)
    shift, scale = projection.chunk(6, dim=1)[:2]
    for count in DIGEST_ROWS + OTHER_ROWS:
        x = torch.randn(1, count, HIDDEN, device="cuda", dtype=torch.bfloat16)
        yield _row(x, scale, shift, with_compile=count in DIGEST_ROWS)


def _row(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, with_compile: bool) -> BenchRow:
    def eager() -> torch.Tensor:
        return modulate_scale_shift(F.layer_norm(x, (HIDDEN,), eps=EPS), scale, shift)

    def fused() -> torch.Tensor:
        return fused_ln_modulate(x, scale, shift, EPS)

    bytes_moved = x.element_size() * (2 * x.numel() + 2 * HIDDEN)
    compile_fn = compiled(eager) if with_compile else None
    return bench_row(
        "fused_ln_modulate", tuple(x.shape), x.dtype, eager, fused, bytes_moved, compile_fn
    )
