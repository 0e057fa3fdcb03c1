"""What the kernels of q and k heads `[B, S, H, D]` share: accepted inputs, tiles, strides."""

from typing import Any, NamedTuple

import torch

from sglang.kernels.ops.diffusion.triton.available import aligned, triton_runs_on
from sglang.kernels.registration import kernel_reads

DTYPES = (torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 128  # one vector of 4 a lane: more would enter aten's later warps
MAX_HEADS = 128  # a token's heads are unrolled: 300 take a minute to compile
MAX_BATCH = 65535  # the grid's second axis
VECTOR = 8  # elements of a 16-byte load


def stream_fits(q: torch.Tensor, k: torch.Tensor, *weights: torch.Tensor) -> bool:
    """q and k share shape and strides; 16-byte loads; at most MAX_HEADS heads; weights `[D]` of
    their dtype; no gradient."""
    if not kernel_reads(q, k, *weights):
        return False
    if q.dtype not in DTYPES or q.dim() != 4 or q.numel() == 0:
        return False
    batch, _, heads, head_dim = q.shape
    if head_dim % VECTOR or head_dim > MAX_HEAD_DIM:
        return False
    if batch > MAX_BATCH or heads > MAX_HEADS:
        return False
    if k.shape != q.shape or head_strides(k) != head_strides(q):
        return False
    if q.stride(3) != 1 or k.stride(3) != 1 or any(s % VECTOR for s in head_strides(q)):
        return False
    for tensor in (q, k, *weights):
        if tensor.dtype != q.dtype or tensor.device != q.device or not aligned(tensor):
            return False
    if any(w.shape != (head_dim,) or w.stride(0) != 1 for w in weights):
        return False
    return triton_runs_on(q.device)


def table_fits(
    table: torch.Tensor, shape: tuple[int, ...], q: torch.Tensor, dtype: torch.dtype
) -> bool:
    """A contiguous cosine or sine table of `shape` beside q, in 16-byte loads."""
    return (
        kernel_reads(table)
        and table.shape == shape
        and table.dtype == dtype
        and table.device == q.device
        and table.is_contiguous()
        and aligned(table)
    )


def head_strides(x: torch.Tensor) -> tuple[int, ...]:
    """Strides of the batch, token and head axes; 0 where the axis has one entry."""
    return tuple(0 if x.shape[d] == 1 else x.stride(d) for d in range(3))


def new_heads(q: torch.Tensor, k: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """New contiguous tensors like q and k: the fake of the ops that take and give one stream."""
    return q.new_empty(q.shape), k.new_empty(k.shape)


class HeadTile(NamedTuple):
    """The heads of one step, as elements; it decides about time, never about a bit."""

    elements: int
    a_thread: int = VECTOR


def head_tile(heads: int, head_dim: int, tile: HeadTile) -> dict[str, int]:
    """Heads a step: the tile's elements at most, fewer where that divides H; the warps for them."""
    block_d = 1 << (head_dim - 1).bit_length()
    block_h = min(tile.elements // block_d, 1 << (heads - 1).bit_length())
    while block_h > 4 and heads % block_h:
        block_h //= 2
    warps = max(1, block_h * block_d // (32 * tile.a_thread))
    return {"BLOCK_H": block_h, "BLOCK_D": block_d, "num_warps": warps}
