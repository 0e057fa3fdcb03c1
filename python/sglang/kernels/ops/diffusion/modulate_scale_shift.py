"""``x * (1 + scale) + shift`` with one scale and shift row a sample, bit for bit as eager.

Contract: ``out = round(round(x * round(1 + scale)) + shift)``; round(.) is to the storage dtype, to
nearest even.
    x             [B, S, D] contiguous; float16 or bfloat16
    scale, shift  [B, D] of x's dtype, each row's values adjoining; for B > 1 contiguous (a chunk
                  view of a [1, 6 D] projection is taken, one of a [B > 1, 6 D] projection is not)
    out           [B, S, D] contiguous
Arithmetic: float32, each operation rounded to storage, no FMA: what eager's three kernels give,
``torch.equal``, NaN and subnormals included.
Equals: `modulate_scale_shift_reference`, shown on torch 2.11, CUDA 13.0, sm_90.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang.kernels.jit import CudaKernel, JitUnavailable
from sglang.kernels.ops.diffusion.vector_tile import MAX_VECTORS, VECTOR_BYTES, VectorTile
from sglang.kernels.registration import (
    describe,
    kernel_reads,
    needs_dispatcher,
    register_op,
    wants_gradient,
)

DTYPES = (torch.bfloat16, torch.float16)
MAX_SAMPLES = 65535  # the samples are the grid's y
_VALUES = 8  # per 16-byte vector


def modulate_scale_shift_reference(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """The eager expression: three kernels, three roundings."""
    return x * (1 + scale[:, None]) + shift[:, None]


def can_use_modulate_scale_shift_cuda(x: Tensor, scale: Tensor, shift: Tensor) -> bool:
    """Whether the kernel takes them: device, dtype, shape, layout, alignment, no gradient."""
    if not kernel_reads(x, scale, shift):
        return False
    shape, dtype = x.shape, x.dtype
    if dtype not in DTYPES or not x.is_cuda or len(shape) != 3 or not x.is_contiguous():
        return False
    samples, rows, width = shape
    if width % _VALUES or not 0 < rows * width <= MAX_VECTORS * _VALUES:
        return False
    if not 0 < samples <= MAX_SAMPLES:
        return False
    device = x.get_device()
    for row in (scale, shift):
        if row.dtype != dtype or row.get_device() != device or row.shape != (samples, width):
            return False
        if not (row.is_contiguous() if samples > 1 else row.stride(1) == 1):
            return False
    return (x.data_ptr() | scale.data_ptr() | shift.data_ptr()) % VECTOR_BYTES == 0


class ModulateScaleShiftKernels:
    """The kernels for one tile, by dtype."""

    def __init__(self, tile: VectorTile) -> None:
        self.tile = tile
        self.by_dtype: dict[torch.dtype, CudaKernel] = {
            dtype: tile.kernel("modulate_scale_shift.cuh", "modulate_scale_shift", dtype, "PPPPIII")
            for dtype in DTYPES
        }

    def launch(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        """The kernel, on inputs that the predicate took and with the kernel ready."""
        samples, rows, width = x.shape
        row = width // _VALUES
        # whole rows, so that each thread stays in one column
        stride = -(-rows // self.tile.vectors_per_thread) * row
        out = torch.empty_like(x)
        self.by_dtype[x.dtype].launch(
            x.get_device(),
            (-(-stride // self.tile.block), samples),
            self.tile.block,
            x.data_ptr(),
            scale.data_ptr(),
            shift.data_ptr(),
            out.data_ptr(),
            rows * row,
            stride,
            row,
        )
        return out


TILE = VectorTile(block=128, vectors_per_thread=4)
_KERNELS = ModulateScaleShiftKernels(TILE)


def _modulate_scale_shift(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """The kernel where it takes the input and exists here, else the eager expression."""
    if can_use_modulate_scale_shift_cuda(x, scale, shift):
        if _KERNELS.by_dtype[x.dtype].ready(x.get_device()):
            return _KERNELS.launch(x, scale, shift)
    return modulate_scale_shift_reference(x, scale, shift)


_op = register_op(
    "modulate_scale_shift", _modulate_scale_shift, fake=modulate_scale_shift_reference
)


def modulate_scale_shift_cuda(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """The kernel or an error: ValueError for a rejected input, JitUnavailable without a kernel.

    Under torch.compile and in dispatch modes this is the custom op, which decides when it runs.
    """
    if needs_dispatcher(x, scale, shift) and not wants_gradient(x, scale, shift):
        _check_shapes(x, scale, shift)
        return _op(x, scale, shift)
    if not can_use_modulate_scale_shift_cuda(x, scale, shift):
        raise ValueError(
            f"modulate_scale_shift_cuda got {describe(x=x, scale=scale, shift=shift)}; expected "
            "CUDA tensors of one dtype (float16, bfloat16), x [B, S, D] contiguous, scale and "
            "shift [B, D] with adjoining values (contiguous for B > 1), D a multiple of 8, "
            "16-byte alignment and no gradient. modulate_scale_shift() runs eager there."
        )
    kernel = _KERNELS.by_dtype[x.dtype]
    if not kernel.ready(x.get_device()):
        raise JitUnavailable(kernel.failure or f"{kernel.name} cannot be loaded during capture")
    return _KERNELS.launch(x, scale, shift)


def modulate_scale_shift(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """``x * (1 + scale[:, None]) + shift[:, None]``: the kernel where it can be used, else eager.

    x [B, S, D]; scale, shift [B, D] or [1, D]. Any device and dtype; the same bytes as eager.
    Raises ValueError for other shapes.
    """
    _check_shapes(x, scale, shift)
    if wants_gradient(x, scale, shift):
        return modulate_scale_shift_reference(x, scale, shift)
    return _op(x, scale, shift)


def _check_shapes(x: Tensor, scale: Tensor, shift: Tensor) -> None:
    """Other shapes might broadcast to something that nobody asked for."""
    fits = x.dim() == 3 and all(
        row.dim() == 2 and row.shape[1] == x.shape[2] and row.shape[0] in (1, x.shape[0])
        for row in (scale, shift)
    )
    if not fits:
        raise ValueError(
            f"modulate_scale_shift got {describe(x=x, scale=scale, shift=shift)}; expected "
            "x [B, S, D], scale and shift [B, D] or [1, D]. Reshape them first."
        )
