"""gelu_mul: one kernel against eager's GELU and product, on halves of a packed projection."""

from collections.abc import Iterator

import torch
from timing import BenchRow, bench_row, compiled

from sglang.kernels.ops.diffusion.gelu_mul import gelu_mul, gelu_mul_reference

FFN = 12288
# ERNIE-Image at 1024^2 with 120 text tokens, its CFG batch, 512^2, 2048^2, 256^2, and odd rows
SHAPES = (
    (1, 4216, FFN), (2, 4216, FFN), (1, 1144, FFN), (1, 16504, FFN), (1, 376, FFN), (1, 77, FFN),
    (3, 17, 64), (1, 1, 64),
)  # fmt: skip


def rows() -> Iterator[BenchRow]:
    """Packed halves, as the model has them; the first shape also apart and in float16."""
    for shape in SHAPES:
        yield _row(shape, packed=True, with_compile=shape == SHAPES[0])
    yield _row(SHAPES[0], packed=False)
    yield _row(SHAPES[0], packed=True, dtype=torch.float16)


def _row(
    shape: tuple[int, int, int],
    packed: bool,
    with_compile: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> BenchRow:
    batch, count, width = shape
    projection = torch.randn(batch, count, 2 * width, device="cuda", dtype=dtype)
    up, gate = projection.chunk(2, dim=-1)
    if not packed:
        up, gate = up.contiguous(), gate.contiguous()

    def eager() -> torch.Tensor:
        return gelu_mul_reference(up, gate)

    def fused() -> torch.Tensor:
        return gelu_mul(up, gate)

    name = "gelu_mul" if packed else "gelu_mul of two tensors"
    bytes_moved = 3 * up.element_size() * up.numel()
    compile_fn = compiled(eager) if with_compile else None
    return bench_row(name, shape, dtype, eager, fused, bytes_moved, compile_fn)
