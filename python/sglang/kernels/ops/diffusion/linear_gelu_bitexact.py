"""``cat([attn, gelu_tanh(linear(x))])``, `attn` being optional: one kernel, bit for bit as eager.

Contract: ``z = round(x weight^T + bias)``, ``out[..., D:] = round(g(z))``, ``out[..., :D] = attn``;
round(.) is to the storage dtype, to nearest even.
    x       [..., K] contiguous; float16 or bfloat16; K a multiple of 64, 1024 at least
    weight  [N, K], bias [N], contiguous, of x's dtype; N a multiple of 256 or 192
    attn    [B, S, D] or None, x then [B, S, K]; each row's values adjoining, rows at one distance
    out     [..., D + N] contiguous; D is 0 without attn
Arithmetic: products and sums in the tensor core's float32, over K in steps of 16 from first to
last; the bias is added to the sum in float32; one rounding. g is the tanh GELU of
`gelu_tanh_concat`. cuBLAS sums in the same order where it does not cut K, whatever its tile; that
depends on the shape, so that a site proves it for each.
Equals: `linear_gelu_bitexact_reference`, shown on torch 2.11, CUDA 13.0, sm_90.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang.kernels.jit import CudaKernel, JitUnavailable
from sglang.kernels.ops.diffusion.persistent_gemm import (
    ALIGNMENT_BYTES,
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
from sglang.kernels.ops.diffusion.vector_tile import row_distance
from sglang.kernels.registration import (
    describe,
    kernel_reads,
    needs_dispatcher,
    register_op,
    wants_gradient,
)

_VALUES = 8  # per 16-byte vector
_KERNELS: dict[tuple[int, torch.dtype], CudaKernel] = {
    (tile.columns, dtype): tile.kernel(
        "linear_gelu", "linear_gelu_bitexact.cuh", "TTPPiPqiiiii", dtype
    )
    for tile in TILES
    for dtype in DTYPES
}


def linear_gelu_bitexact_reference(
    x: Tensor, weight: Tensor, bias: Tensor, attn: Tensor | None = None
) -> Tensor:
    """The eager expression: a GEMM with bias, the GELU's kernel, and a concatenation's."""
    out = F.gelu(F.linear(x, weight, bias), approximate="tanh")
    return out if attn is None else torch.cat([attn, out], dim=2)


def can_use_linear_gelu_bitexact(
    x: Tensor, weight: Tensor, bias: Tensor, attn: Tensor | None = None
) -> bool:
    """Whether the kernel takes them and is worth it: GPU, dtype, shapes, layout, no gradient."""
    if not kernel_reads(x, weight, bias, attn) or not x.is_cuda or not is_hopper(x.get_device()):
        return False
    dtype, device, shape = x.dtype, x.get_device(), weight.shape
    if dtype not in DTYPES or x.dim() < 2 or len(shape) != 2 or x.shape[-1] != shape[1]:
        return False
    if not is_matrix(x, dtype, device) or not is_matrix(weight, dtype, device):
        return False
    if bias.shape != shape[:1] or bias.dtype != dtype or bias.get_device() != device:
        return False
    if not bias.is_contiguous() or bias.data_ptr() % ALIGNMENT_BYTES:
        return False
    if attn is not None and not _takes_attn(attn, x):
        return False
    return fills_device(x.numel() // shape[1], shape[0], device)


def _takes_attn(attn: Tensor, x: Tensor) -> bool:
    if attn.dtype != x.dtype or attn.get_device() != x.get_device() or attn.dim() != 3:
        return False
    if x.dim() != 3 or attn.shape[:2] != x.shape[:2] or not attn.numel():
        return False
    if attn.shape[2] % _VALUES or row_distance(attn) % _VALUES:
        return False
    return attn.data_ptr() % ALIGNMENT_BYTES == 0


def _kernel(x: Tensor, weight: Tensor) -> CudaKernel:
    tile = best_tile(x.numel() // x.shape[-1], len(weight), x.get_device())
    assert tile is not None, f"no tile for {len(weight)} columns, which the predicate rejects"
    return _KERNELS[tile.columns, x.dtype]


def _launch(x: Tensor, weight: Tensor, bias: Tensor, attn: Tensor | None) -> Tensor:
    """The kernel, on inputs that the predicate took and with the kernel ready."""
    device, (columns, depth) = x.get_device(), weight.shape
    rows = x.numel() // depth
    tile = best_tile(rows, columns, device)
    left = 0 if attn is None else attn.shape[2]
    out = x.new_empty((*x.shape[:-1], left + columns))
    _KERNELS[tile.columns, x.dtype].launch(
        device,
        (tile.blocks(rows, columns, device), 1),
        THREADS,
        matrix_map(x, ROWS),
        matrix_map(weight, tile.columns // 2),
        bias.data_ptr(),
        out.data_ptr(),
        left + columns,
        0 if attn is None else attn.data_ptr(),
        0 if attn is None else row_distance(attn) // _VALUES,
        left // _VALUES,
        rows,
        columns,
        depth // DEPTH,
        ROW_PAIRS_TOGETHER,
    )
    return out


def _linear_gelu_bitexact(
    x: Tensor, weight: Tensor, bias: Tensor, attn: Tensor | None = None
) -> Tensor:
    """The kernel where it takes the input and exists here, else the eager expression."""
    if can_use_linear_gelu_bitexact(x, weight, bias, attn):
        if _kernel(x, weight).ready(x.get_device()):
            return _launch(x, weight, bias, attn)
    return linear_gelu_bitexact_reference(x, weight, bias, attn)


_op = register_op(
    "linear_gelu_bitexact", _linear_gelu_bitexact, fake=linear_gelu_bitexact_reference
)


def linear_gelu_bitexact_cuda(
    x: Tensor, weight: Tensor, bias: Tensor, attn: Tensor | None = None
) -> Tensor:
    """The kernel or an error: ValueError for a rejected input, JitUnavailable without a kernel.

    Under torch.compile and in dispatch modes this is the custom op, which decides when it runs.
    """
    tensors = {"x": x, "weight": weight, "bias": bias} | ({} if attn is None else {"attn": attn})
    if needs_dispatcher(*tensors.values()) and not wants_gradient(*tensors.values()):
        _check_shapes(x, weight, bias, attn)
        return _op(x, weight, bias, attn)
    if not can_use_linear_gelu_bitexact(x, weight, bias, attn):
        raise ValueError(
            f"linear_gelu_bitexact_cuda got {describe(**tensors)}; expected tensors of one dtype "
            "(float16, bfloat16) on one Hopper GPU, aligned to 16 bytes, without a gradient: x "
            "[..., K] of 1024 rows at least, weight [N, K], bias [N], contiguous, K a multiple of "
            "64, N of 256 or 192, so many that the GPU is filled; attn [B, S, D] with rows at one "
            "distance. linear_gelu_bitexact() runs eager there."
        )
    kernel = _kernel(x, weight)
    if not kernel.ready(x.get_device()):
        raise JitUnavailable(kernel.failure or f"{kernel.name} cannot be loaded during capture")
    return _launch(x, weight, bias, attn)


def linear_gelu_bitexact(
    x: Tensor, weight: Tensor, bias: Tensor, attn: Tensor | None = None
) -> Tensor:
    """``cat([attn, gelu(linear(x), "tanh")], -1)``: the kernel where it can be used, else eager.

    x [..., K], weight [N, K], bias [N] -> [..., N]; with attn [B, S, D] and x [B, S, K] ->
    [B, S, D + N]. Any device and dtype. Raises ValueError for other shapes.
    """
    _check_shapes(x, weight, bias, attn)
    if wants_gradient(x, weight, bias, attn):
        return linear_gelu_bitexact_reference(x, weight, bias, attn)
    return _op(x, weight, bias, attn)


def _check_shapes(x: Tensor, weight: Tensor, bias: Tensor, attn: Tensor | None) -> None:
    linear = weight.dim() == 2 and x.dim() > 0 and x.shape[-1] == weight.shape[1]
    if not linear or bias.shape != weight.shape[:1]:
        raise ValueError(
            f"linear_gelu_bitexact got {describe(x=x, weight=weight, bias=bias)}; expected x "
            "[..., K], weight [N, K] and bias [N]."
        )
    if attn is not None and (x.dim() != 3 or attn.dim() != 3 or attn.shape[:2] != x.shape[:2]):
        raise ValueError(
            f"linear_gelu_bitexact got {describe(x=x, attn=attn)}; expected x [B, S, K] and attn "
            "[B, S, D]. Reshape them first."
        )
