"""residual_gate_add: one kernel against eager's multiply and add."""

from collections.abc import Iterator

import torch
from timing import BenchRow, bench_row, compiled

from sglang.kernels.ops.diffusion.residual_gate_add import (
    residual_gate_add,
    residual_gate_add_reference,
)

DIGEST_SHAPES = ((1, 4096, 3072), (1, 512, 3072), (1, 4608, 3072))
# FLUX.1 at 256^2, 512^2 and 2048^2, ERNIE-Image, GLM-Image, batches and odd row counts
OTHER_SHAPES = (
    (1, 256, 3072),
    (1, 1024, 3072),
    (1, 16384, 3072),
    (1, 4216, 4096),
    (1, 4096, 4096),
    (2, 4096, 3072),
    (3, 17, 64),
    (1, 77, 2240),
    (1, 1, 64),
)


def rows() -> Iterator[BenchRow]:
    """Row gates at every shape, a full gate at the first."""
    for shape in DIGEST_SHAPES + OTHER_SHAPES:
        yield _row(shape, (1, 1, shape[-1]), with_compile=shape in DIGEST_SHAPES)
    yield _row(DIGEST_SHAPES[0], DIGEST_SHAPES[0], with_compile=False)
    yield _row(DIGEST_SHAPES[0], (1, 1, 3072), with_compile=False, dtype=torch.float16)


def _row(
    shape: tuple[int, ...],
    gate_shape: tuple[int, ...],
    with_compile: bool,
    dtype: torch.dtype = torch.bfloat16,
) -> BenchRow:
    residual, update = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(2))
    gate = torch.randn(gate_shape, device="cuda", dtype=dtype)

    def eager() -> torch.Tensor:
        return residual_gate_add_reference(residual, update, gate)

    def fused() -> torch.Tensor:
        return residual_gate_add(residual, update, gate)

    bytes_moved = residual.element_size() * (3 * residual.numel() + gate.numel())
    compile_fn = compiled(eager) if with_compile else None
    op = "residual_gate_add" + (" full gate" if gate_shape == shape else "")
    return bench_row(op, shape, dtype, eager, fused, bytes_moved, compile_fn)
