"""``residual + gate * update`` in one kernel, bit for bit as eager.

Contract: ``out = round(residual + round(gate * update))``; round(.) is to the storage dtype, to
nearest even.
    residual, update  [..., D] contiguous; float16, bfloat16 or float32; one dtype for all three
    gate              [1, ..., 1, D] (one row for all; stride 1 inside) or of residual's shape
    out               [..., D] contiguous, of residual's dtype
Arithmetic: both operations in float32, each rounded to storage; no FMA. This is what eager's two
kernels do, so float16 and bfloat16 are ``torch.equal``, NaN and subnormals included. float32 has
the same two roundings, but is promised close, not equal.
Equals: `residual_gate_add_reference`, shown on torch 2.11, CUDA 13.0, sm_90.
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

_VALUES_PER_VECTOR = {torch.bfloat16: 8, torch.float16: 8, torch.float32: 4}


def residual_gate_add_reference(residual: Tensor, update: Tensor, gate: Tensor) -> Tensor:
    """The eager expression: two kernels, two roundings."""
    return residual + gate * update


def can_use_residual_gate_add_cuda(residual: Tensor, update: Tensor, gate: Tensor) -> bool:
    """Whether the kernel takes them: device, dtype, shape, layout, alignment, no gradient."""
    if not kernel_reads(residual, update, gate):
        return False
    shape, dtype = residual.shape, residual.dtype
    values = _VALUES_PER_VECTOR.get(dtype)
    if values is None or not residual.is_cuda or not shape or update.shape != shape:
        return False
    if update.dtype != dtype or gate.dtype != dtype:
        return False
    device = residual.get_device()
    if update.get_device() != device or gate.get_device() != device:
        return False
    if shape[-1] % values or not 0 < residual.numel() <= MAX_VECTORS * values:
        return False
    if not residual.is_contiguous() or not update.is_contiguous() or not _gate_fits(gate, shape):
        return False
    return (residual.data_ptr() | update.data_ptr() | gate.data_ptr()) % VECTOR_BYTES == 0


def _gate_fits(gate: Tensor, shape: torch.Size) -> bool:
    """[1, ..., 1, D] with adjoining values (a chunk of a wider row too), or `shape` contiguous."""
    gate_shape = gate.shape
    if gate_shape == shape:
        return gate.is_contiguous()
    width = shape[-1]
    return (
        0 < len(gate_shape) <= len(shape)
        and gate_shape[-1] == width == gate.numel()
        and gate.stride(-1) == 1
    )


class ResidualGateAddKernels:
    """The six kernels for one tile, by gate layout and dtype."""

    def __init__(self, tile: VectorTile) -> None:
        self.tile = tile
        self._kernels = {
            (is_row, dtype): tile.kernel(
                "residual_gate_add.cuh",
                f"residual_gate_add_{'row' if is_row else 'full'}",
                dtype,
                "PPPPIII",
            )
            for is_row in (True, False)
            for dtype in _VALUES_PER_VECTOR
        }

    def select(self, residual: Tensor, gate: Tensor) -> CudaKernel:
        """The kernel for inputs that the predicate took."""
        return self._kernels[gate.numel() == residual.shape[-1], residual.dtype]

    def all(self) -> list[CudaKernel]:
        """Every kernel of the source, ready or not."""
        return list(self._kernels.values())

    def launch(self, kernel: CudaKernel, residual: Tensor, update: Tensor, gate: Tensor) -> Tensor:
        """The selected kernel, ready, on inputs that the predicate took."""
        values = _VALUES_PER_VECTOR[residual.dtype]
        vectors, row = residual.numel() // values, residual.shape[-1] // values
        out = torch.empty_like(residual)
        kernel.launch(
            residual.get_device(),
            (self.tile.blocks(vectors), 1),
            self.tile.block,
            residual.data_ptr(),
            update.data_ptr(),
            gate.data_ptr(),
            out.data_ptr(),
            vectors,
            row,
            self.tile.block % row,
        )
        return out


_KERNELS = ResidualGateAddKernels(VectorTile())


def _residual_gate_add(residual: Tensor, update: Tensor, gate: Tensor) -> Tensor:
    """The kernel where it takes the input and exists here, else the eager expression."""
    if can_use_residual_gate_add_cuda(residual, update, gate):
        kernel = _KERNELS.select(residual, gate)
        if kernel.ready(residual.get_device()):
            return _KERNELS.launch(kernel, residual, update, gate)
    return residual_gate_add_reference(residual, update, gate)


_op = register_op("residual_gate_add", _residual_gate_add, fake=residual_gate_add_reference)


def residual_gate_add_cuda(residual: Tensor, update: Tensor, gate: Tensor) -> Tensor:
    """The kernel or an error: ValueError for a rejected input, JitUnavailable without a kernel.

    Under torch.compile and in dispatch modes this is the custom op, which decides when it runs.
    """
    if needs_dispatcher(residual, update, gate) and not wants_gradient(residual, update, gate):
        _check_shapes(residual, update, gate)
        return _op(residual, update, gate)
    if not can_use_residual_gate_add_cuda(residual, update, gate):
        raise ValueError(
            f"residual_gate_add_cuda got {describe(residual=residual, update=update, gate=gate)}; "
            "expected CUDA tensors of one dtype (float16, bfloat16, float32), contiguous residual "
            "and update of one shape, a gate [1, ..., 1, D] or of that shape, D a multiple of 16 "
            "bytes, 16-byte alignment and no gradient. residual_gate_add() runs eager there."
        )
    kernel = _KERNELS.select(residual, gate)
    if not kernel.ready(residual.get_device()):
        raise JitUnavailable(kernel.failure or f"{kernel.name} cannot be loaded during capture")
    return _KERNELS.launch(kernel, residual, update, gate)


def residual_gate_add(residual: Tensor, update: Tensor, gate: Tensor) -> Tensor:
    """``residual + gate * update``: the kernel where it can be used, else the eager expression.

    residual, update [..., D] of one shape; gate [1, ..., 1, D], of that shape, or anything that
    broadcasts to it (eager). Any device and dtype; same bytes as eager in float16 and bfloat16.
    Raises ValueError for other shapes.
    """
    _check_shapes(residual, update, gate)
    if wants_gradient(residual, update, gate):
        return residual_gate_add_reference(residual, update, gate)
    return _op(residual, update, gate)


def _check_shapes(residual: Tensor, update: Tensor, gate: Tensor) -> None:
    """An update or a gate that widens the result would broadcast to what nobody asked for."""
    shape, tail = residual.shape, residual.shape[residual.dim() - gate.dim() :]
    fits = 0 < gate.dim() <= len(shape) and update.shape == shape
    if not (fits and all(size in (1, full) for size, full in zip(gate.shape, tail, strict=True))):
        raise ValueError(
            f"residual_gate_add got {describe(residual=residual, update=update, gate=gate)}; "
            "expected residual and update of one shape [..., D], and a gate that broadcasts to it. "
            "Reshape them first."
        )
