"""``cat([attn, gelu_tanh(mlp)], dim=2)`` in one kernel, bit for bit as eager.

Contract: ``out[..., :D] = attn``, ``out[..., D:] = round(g(mlp))``; round(.) is to the storage
dtype, to nearest even.
    attn  [B, S, D], mlp [B, S, M]; float16 or bfloat16; each row's values adjoining, rows at one
          distance (contiguous tensors and column slices of contiguous tensors)
    out   [B, S, D + M] contiguous
Arithmetic: ``g(x) = (0.5 x) (1 + tanhf(beta fma(kappa, (x x) x, x)))`` in float32, beta =
sqrt(2 / pi) and kappa = 0.044715 rounded to float32, that one FMA and no other, tanhf in full
precision: what nvcc makes of aten's kernel. ``torch.equal`` on all 65536 values of both dtypes.
Equals: `gelu_tanh_concat_reference`, shown on torch 2.11, CUDA 13.0, sm_90.
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


def gelu_tanh_concat_reference(attn: Tensor, mlp: Tensor) -> Tensor:
    """The eager expression: the GELU's kernel, then the concatenation's."""
    return torch.cat([attn, F.gelu(mlp, approximate="tanh")], dim=2)


def can_use_gelu_tanh_concat_cuda(attn: Tensor, mlp: Tensor) -> bool:
    """Whether the kernel takes them: device, dtype, shape, layout, alignment, no gradient."""
    if not kernel_reads(attn, mlp):
        return False
    dtype, shape, mlp_shape = attn.dtype, attn.shape, mlp.shape
    if dtype not in DTYPES or mlp.dtype != dtype or not attn.is_cuda:
        return False
    if mlp.get_device() != attn.get_device() or len(shape) != 3 or len(mlp_shape) != 3:
        return False
    if shape[:2] != mlp_shape[:2] or shape[2] % _VALUES or mlp_shape[2] % _VALUES:
        return False
    values = attn.numel() + mlp.numel()
    if not attn.numel() or not mlp.numel() or values > MAX_VECTORS * _VALUES:
        return False
    if row_distance(attn) % _VALUES or row_distance(mlp) % _VALUES:
        return False
    return (attn.data_ptr() | mlp.data_ptr()) % VECTOR_BYTES == 0


class GeluTanhConcatKernels:
    """The kernels for one tile, by dtype."""

    def __init__(self, tile: VectorTile) -> None:
        self.tile = tile
        self.by_dtype: dict[torch.dtype, CudaKernel] = {
            dtype: tile.kernel("gelu_tanh_concat.cuh", "gelu_tanh_concat", dtype, "PPPqqIIIII")
            for dtype in DTYPES
        }

    def launch(self, attn: Tensor, mlp: Tensor) -> Tensor:
        """The kernel, on inputs that the predicate took and with the kernel ready."""
        batch, rows, width = attn.shape
        out_width = width + mlp.shape[2]
        out = attn.new_empty((batch, rows, out_width))
        vectors, columns = out.numel() // _VALUES, out_width // _VALUES
        row_step, column_step = divmod(self.tile.block, columns)
        self.by_dtype[attn.dtype].launch(
            attn.get_device(),
            (self.tile.blocks(vectors), 1),
            self.tile.block,
            attn.data_ptr(),
            mlp.data_ptr(),
            out.data_ptr(),
            row_distance(attn) // _VALUES,
            row_distance(mlp) // _VALUES,
            vectors,
            width // _VALUES,
            columns,
            row_step,
            column_step,
        )
        return out


_KERNELS = GeluTanhConcatKernels(VectorTile())


def _gelu_tanh_concat(attn: Tensor, mlp: Tensor) -> Tensor:
    """The kernel where it takes the input and exists here, else the eager expression."""
    if can_use_gelu_tanh_concat_cuda(attn, mlp):
        if _KERNELS.by_dtype[attn.dtype].ready(attn.get_device()):
            return _KERNELS.launch(attn, mlp)
    return gelu_tanh_concat_reference(attn, mlp)


_op = register_op("gelu_tanh_concat", _gelu_tanh_concat, fake=gelu_tanh_concat_reference)


def gelu_tanh_concat_cuda(attn: Tensor, mlp: Tensor) -> Tensor:
    """The kernel or an error: ValueError for a rejected input, JitUnavailable without a kernel.

    Under torch.compile and in dispatch modes this is the custom op, which decides when it runs.
    """
    if needs_dispatcher(attn, mlp) and not wants_gradient(attn, mlp):
        _check_shapes(attn, mlp)
        return _op(attn, mlp)
    if not can_use_gelu_tanh_concat_cuda(attn, mlp):
        raise ValueError(
            f"gelu_tanh_concat_cuda got {describe(attn=attn, mlp=mlp)}; expected CUDA tensors of "
            "one dtype (float16, bfloat16), attn [B, S, D] and mlp [B, S, M] with adjoining values "
            "in a row and rows at one distance, D, M and the distances multiples of 8, 16-byte "
            "alignment and no gradient. gelu_tanh_concat() runs eager there."
        )
    kernel = _KERNELS.by_dtype[attn.dtype]
    if not kernel.ready(attn.get_device()):
        raise JitUnavailable(kernel.failure or f"{kernel.name} cannot be loaded during capture")
    return _KERNELS.launch(attn, mlp)


def gelu_tanh_concat(attn: Tensor, mlp: Tensor) -> Tensor:
    """``cat([attn, gelu(mlp, "tanh")], dim=2)``: the kernel where it can be used, else eager.

    attn [B, S, D], mlp [B, S, M] -> [B, S, D + M]. Any device and dtype; the same bytes as eager.
    Raises ValueError for other shapes.
    """
    _check_shapes(attn, mlp)
    if wants_gradient(attn, mlp):
        return gelu_tanh_concat_reference(attn, mlp)
    return _op(attn, mlp)


def _check_shapes(attn: Tensor, mlp: Tensor) -> None:
    if attn.dim() != 3 or mlp.dim() != 3 or attn.shape[:2] != mlp.shape[:2]:
        raise ValueError(
            f"gelu_tanh_concat got {describe(attn=attn, mlp=mlp)}; expected attn [B, S, D] and "
            "mlp [B, S, M]. Reshape them first."
        )
