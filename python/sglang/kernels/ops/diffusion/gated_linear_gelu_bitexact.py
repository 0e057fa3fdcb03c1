"""``linear(x, up) * gelu(linear(x, gate))`` in one kernel, bit for bit as eager.

Contract: ``out = round(round(x up^T) * round(g(round(x gate^T))))``; round(.) is to the storage
dtype, to nearest even.
    x         [..., K] contiguous; float16 or bfloat16; K a multiple of 64, 1024 at least
    gate, up  [F, K] contiguous, of x's dtype; 2 F a multiple of 256 or 192
    out       [..., F] contiguous
Arithmetic: products and sums in the tensor core's float32, over K in steps of 16 from first to
last. g is the erf GELU of `gelu_mul`. cuBLAS sums in the same order where it does not cut K,
whatever its tile; that depends on the shape, so that a site proves it for each.
Equals: `gated_linear_gelu_bitexact_reference`, shown on torch 2.11, CUDA 13.0, sm_90.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang.kernels.jit import CudaKernel, JitUnavailable
from sglang.kernels.ops.diffusion.persistent_gemm import (
    DEPTH,
    DTYPES,
    ROW_PAIRS_TOGETHER,
    ROWS,
    THREADS,
    TILES,
    best_tile,
    fills_device,
    is_hopper,
    is_matrix,
    matrix_map,
)
from sglang.kernels.registration import (
    describe,
    kernel_reads,
    needs_dispatcher,
    register_op,
    wants_gradient,
)

_KERNELS: dict[tuple[int, torch.dtype], CudaKernel] = {
    (tile.columns, dtype): tile.kernel(
        "gated_linear_gelu", "gated_linear_gelu_bitexact.cuh", "TTTPiiii", dtype
    )
    for tile in TILES
    for dtype in DTYPES
}


def gated_linear_gelu_bitexact_reference(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """The eager expression: two GEMMs, the GELU's kernel, the product's."""
    return F.linear(x, up) * F.gelu(F.linear(x, gate))


def can_use_gated_linear_gelu_bitexact(x: Tensor, gate: Tensor, up: Tensor) -> bool:
    """Whether the kernel takes them and is worth it: GPU, dtype, shapes, layout, no gradient."""
    if not kernel_reads(x, gate, up) or not x.is_cuda or not is_hopper(x.get_device()):
        return False
    dtype, device, shape = x.dtype, x.get_device(), gate.shape
    if dtype not in DTYPES or x.dim() < 2 or len(shape) != 2 or x.shape[-1] != shape[1]:
        return False
    if up.shape != shape or not all(is_matrix(matrix, dtype, device) for matrix in (x, gate, up)):
        return False
    return fills_device(x.numel() // shape[1], 2 * shape[0], device)


def _kernel(x: Tensor, gate: Tensor) -> CudaKernel:
    tile = best_tile(x.numel() // x.shape[-1], 2 * len(gate), x.get_device())
    assert tile is not None, f"no tile for {len(gate)} columns, which the predicate rejects"
    return _KERNELS[tile.columns, x.dtype]


def _launch(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """The kernel, on inputs that the predicate took and with the kernel ready."""
    device, (width, depth) = x.get_device(), gate.shape
    rows, columns = x.numel() // depth, 2 * width
    tile = best_tile(rows, columns, device)
    out = x.new_empty((*x.shape[:-1], width))
    _KERNELS[tile.columns, x.dtype].launch(
        device,
        (tile.blocks(rows, columns, device), 1),
        THREADS,
        matrix_map(x, ROWS),
        matrix_map(gate, tile.columns // 2),
        matrix_map(up, tile.columns // 2),
        out.data_ptr(),
        rows,
        columns,
        depth // DEPTH,
        ROW_PAIRS_TOGETHER,
    )
    return out


def _gated_linear_gelu_bitexact(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """The kernel where it takes the input and exists here, else the eager expression."""
    if can_use_gated_linear_gelu_bitexact(x, gate, up):
        if _kernel(x, gate).ready(x.get_device()):
            return _launch(x, gate, up)
    return gated_linear_gelu_bitexact_reference(x, gate, up)


_op = register_op(
    "gated_linear_gelu_bitexact",
    _gated_linear_gelu_bitexact,
    fake=gated_linear_gelu_bitexact_reference,
)


def gated_linear_gelu_bitexact_cuda(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """The kernel or an error: ValueError for a rejected input, JitUnavailable without a kernel.

    Under torch.compile and in dispatch modes this is the custom op, which decides when it runs.
    """
    if needs_dispatcher(x, gate, up) and not wants_gradient(x, gate, up):
        _check_shapes(x, gate, up)
        return _op(x, gate, up)
    if not can_use_gated_linear_gelu_bitexact(x, gate, up):
        raise ValueError(
            f"gated_linear_gelu_bitexact_cuda got {describe(x=x, gate=gate, up=up)}; expected "
            "contiguous tensors of one dtype (float16, bfloat16) on one Hopper GPU, aligned to 16 "
            "bytes, without a gradient: x [..., K] of 1024 rows at least, gate and up [F, K], K a "
            "multiple of 64, 2 F of 256 or 192, so many that the GPU is filled. "
            "gated_linear_gelu_bitexact() runs eager there."
        )
    kernel = _kernel(x, gate)
    if not kernel.ready(x.get_device()):
        raise JitUnavailable(kernel.failure or f"{kernel.name} cannot be loaded during capture")
    return _launch(x, gate, up)


def gated_linear_gelu_bitexact(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """``linear(x, up) * gelu(linear(x, gate))``: the kernel where it can be used, else eager.

    x [..., K], gate and up [F, K] -> [..., F]. Any device and dtype. Raises ValueError for other
    shapes.
    """
    _check_shapes(x, gate, up)
    if wants_gradient(x, gate, up):
        return gated_linear_gelu_bitexact_reference(x, gate, up)
    return _op(x, gate, up)


def _check_shapes(x: Tensor, gate: Tensor, up: Tensor) -> None:
    linear = gate.dim() == 2 and x.dim() > 0 and x.shape[-1] == gate.shape[1]
    if not linear or up.shape != gate.shape:
        raise ValueError(
            f"gated_linear_gelu_bitexact got {describe(x=x, gate=gate, up=up)}; expected x "
            "[..., K], gate and up [F, K]."
        )
