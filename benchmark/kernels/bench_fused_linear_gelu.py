"""fused_linear_gelu: cuBLASLt's GELU epilogue against GEMM, then GELU."""

from collections.abc import Iterator

import torch
from timing import BenchRow, bench_row, compiled

from sglang.kernels.ops.diffusion.fused_linear_gelu import (
    fused_linear_gelu_reference,
    fused_linear_gelu_tanh,
)

HIDDEN, FEED_FORWARD = 3072, 12288
DIGEST_ROWS = (4096, 512, 4608)  # FLUX.1 at 1024x1024: image, text, both
OTHER_ROWS = (256, 768, 1024, 1536, 6912, 8192, 1, 77, 300)  # 256^2, 512^2, 1280^2, most, odd


def rows() -> Iterator[BenchRow]:
    """The up-projection of a FLUX.1 block; compile is timed at the digest's shapes only."""
    weight = torch.randn(FEED_FORWARD, HIDDEN, device="cuda", dtype=torch.bfloat16) / HIDDEN**0.5
    bias = torch.randn(FEED_FORWARD, device="cuda", dtype=torch.bfloat16)
    for count in DIGEST_ROWS + OTHER_ROWS:
        x = torch.randn(1, count, HIDDEN, device="cuda", dtype=torch.bfloat16)
        yield _row(x, weight, bias, with_compile=count in DIGEST_ROWS)


def _row(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, with_compile: bool) -> BenchRow:
    def eager() -> torch.Tensor:
        return fused_linear_gelu_reference(x, weight, bias)

    def fused() -> torch.Tensor:
        return fused_linear_gelu_tanh(x, weight, bias)

    shape = (*x.shape, weight.shape[0])
    compile_fn = compiled(eager) if with_compile else None
    # bound by arithmetic: no copy ceiling to compare with
    return bench_row("fused_linear_gelu", shape, x.dtype, eager, fused, None, compile_fn)
