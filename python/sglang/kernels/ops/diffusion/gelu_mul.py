"""``up * gelu(gate)`` in one kernel, bit for bit as eager; the GELU is the one with erf.

Contract: ``out = round(up * round(g(gate)))``; round(.) is to the storage dtype, to nearest even.
    up, gate  [B, S, F]; float16 or bfloat16; each row's values adjoining, rows at one distance
              (contiguous tensors, and the column halves of one packed projection [B, S, 2 F])
    out       [B, S, F] contiguous
Arithmetic: ``g(x) = (0.5 x) (1 + erff(alpha x))`` in float32, alpha = sqrt(1/2) rounded to float32,
each operation rounded, no FMA outside of erff: what nvcc makes of aten's kernel. NaN, infinities
and subnormals included.
Equals: `gelu_mul_reference`, made after torch 2.11, CUDA 13.0, sm_90.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang.kernels.jit import CudaKernel, JitUnavailable
from sglang.kernels.ops.diffusion.vector_tile import (
    MAX_VECTORS,
    VECTOR_BYTES,
    VectorTile,
    row_distance,
)
from sglang.kernels.registration import (
    describe,
    kernel_reads,
    needs_dispatcher,
    register_op,
    wants_gradient,
)

DTYPES = (torch.bfloat16, torch.float16)
_VALUES = 8  # per 16-byte vector


def gelu_mul_reference(up: Tensor, gate: Tensor) -> Tensor:
    """The eager expression: the GELU's kernel, then the product's."""
    return up * F.gelu(gate)


def can_use_gelu_mul_cuda(up: Tensor, gate: Tensor) -> bool:
    """Whether the kernel takes them: device, dtype, shape, layout, alignment, no gradient."""
    if not kernel_reads(up, gate):
        return False
    dtype, shape = up.dtype, up.shape
    if dtype not in DTYPES or gate.dtype != dtype or not up.is_cuda:
        return False
    if gate.get_device() != up.get_device() or len(shape) != 3 or gate.shape != shape:
        return False
    if shape[2] % _VALUES or not 0 < up.numel() <= MAX_VECTORS * _VALUES:
        return False
    if row_distance(up) % _VALUES or row_distance(gate) % _VALUES:
        return False
    return (up.data_ptr() | gate.data_ptr()) % VECTOR_BYTES == 0


class GeluMulKernels:
    """The kernels for one tile, by dtype."""

    def __init__(self, tile: VectorTile) -> None:
        self.tile = tile
        self.by_dtype: dict[torch.dtype, CudaKernel] = {
            dtype: tile.kernel("gelu_mul.cuh", "gelu_mul", dtype, "PPPqqIIII") for dtype in DTYPES
        }

    def launch(self, up: Tensor, gate: Tensor) -> Tensor:
        """The kernel, on inputs that the predicate took and with the kernel ready."""
        out = up.new_empty(up.shape)
        vectors, columns = out.numel() // _VALUES, out.shape[2] // _VALUES
        self.by_dtype[up.dtype].launch(
            up.get_device(),
            (self.tile.blocks(vectors), 1),
            self.tile.block,
            up.data_ptr(),
            gate.data_ptr(),
            out.data_ptr(),
            row_distance(up) // _VALUES,
            row_distance(gate) // _VALUES,
            vectors,
            columns,
            *divmod(self.tile.block, columns),
        )
        return out


_KERNELS = GeluMulKernels(VectorTile())


def _gelu_mul(up: Tensor, gate: Tensor) -> Tensor:
    """The kernel where it takes the input and exists here, else the eager expression."""
    if can_use_gelu_mul_cuda(up, gate):
        if _KERNELS.by_dtype[up.dtype].ready(up.get_device()):
            return _KERNELS.launch(up, gate)
    return gelu_mul_reference(up, gate).contiguous()


def _fake(up: Tensor, gate: Tensor) -> Tensor:
    return up.new_empty(up.shape)


_op = register_op("gelu_mul", _gelu_mul, fake=_fake)


def gelu_mul_cuda(up: Tensor, gate: Tensor) -> Tensor:
    """The kernel or an error: ValueError for a rejected input, JitUnavailable without a kernel.

    Under torch.compile and in dispatch modes this is the custom op, which decides when it runs.
    """
    if needs_dispatcher(up, gate) and not wants_gradient(up, gate):
        _check_shapes(up, gate)
        return _op(up, gate)
    if not can_use_gelu_mul_cuda(up, gate):
        raise ValueError(
            f"gelu_mul_cuda got {describe(up=up, gate=gate)}; expected CUDA tensors of one dtype "
            "(float16, bfloat16), up and gate [B, S, F] with adjoining values in a row and rows at "
            "one distance, F and the distances multiples of 8, 16-byte alignment and no gradient. "
            "gelu_mul() runs eager there."
        )
    kernel = _KERNELS.by_dtype[up.dtype]
    if not kernel.ready(up.get_device()):
        raise JitUnavailable(kernel.failure or f"{kernel.name} cannot be loaded during capture")
    return _KERNELS.launch(up, gate)


def gelu_mul(up: Tensor, gate: Tensor) -> Tensor:
    """``up * gelu(gate)``: the kernel where it can be used, else eager.

    up, gate [B, S, F] -> contiguous [B, S, F]. Any device and dtype; the same values as eager.
    Raises ValueError for other ranks and for two shapes.
    """
    _check_shapes(up, gate)
    if wants_gradient(up, gate):
        return gelu_mul_reference(up, gate)
    return _op(up, gate)


def _check_shapes(up: Tensor, gate: Tensor) -> None:
    if up.dim() != 3 or gate.shape != up.shape:
        raise ValueError(
            f"gelu_mul got {describe(up=up, gate=gate)}; expected up and gate of one shape "
            "[B, S, F]. Reshape them first."
        )
