"""Launch of the kernel that norms heads of q and k and rotates their halves, for several ops."""

from typing import Any

import torch

from sglang.kernels.ops.diffusion.triton.head_streams import (
    VECTOR,
    HeadTile,
    head_strides,
    head_tile,
    stream_fits,
)

HEAD_DIMS = (16, 32, 64, 128)  # halves of whole 16-byte vectors, folded by halves
MAX_ELEMENTS = 2**32  # where the 32-bit row offsets of aten's norm wrap
# All 32 heads of a token, every load at once. On an H200, (1, 4360, 32, 128): 39.5 us with the
# LayerNorm where 16 elements a thread take 42.7; the RMSNorm takes 35.8 either way.
TILE = HeadTile(elements=4096, a_thread=32)
QK = tuple[torch.Tensor, torch.Tensor]


def halves_fit(q: torch.Tensor, k: torch.Tensor, *weights: torch.Tensor) -> bool:
    """Whether the kernel takes these heads and weights; tables are the ops' own matter."""
    if not stream_fits(q, k, *weights):
        return False
    return q.shape[3] in HEAD_DIMS and q.numel() < MAX_ELEMENTS


def launch(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: QK | None,
    tables: QK | None,
    text_tokens: int,
    eps: float,
    tile: HeadTile = TILE,
) -> QK:
    """Normed and rotated q, k, contiguous.

    `weights` of an RMSNorm, None for a LayerNorm; `tables` cos and sin, None for no rotation.
    """
    from sglang.kernels.ops.diffusion.triton.qk_rotate_half_kernels import qk_rotate_half_kernel

    batch, tokens, heads, head_dim = q.shape
    out_q, out_k = q.new_empty(q.shape), k.new_empty(k.shape)
    strides = (stride // VECTOR for stride in head_strides(q))
    with torch.cuda.device(q.device):
        qk_rotate_half_kernel[(tokens, batch)](
            q, k, *(weights or (q, k)), *(tables or (q, k)), out_q, out_k, *strides,
            text_tokens, eps,
            **_constants(weights is not None, tables is not None, heads, head_dim, tile),
        )  # fmt: skip
    return out_q, out_k


def _constants(
    rms: bool, rotates: bool, heads: int, head_dim: int, tile: HeadTile = TILE
) -> dict[str, Any]:
    blocks = head_tile(heads, head_dim, tile)
    return {
        "RMS": rms,
        "ROTATES": rotates,
        "H": heads,
        "D": head_dim,
        "BLOCK_H": blocks["BLOCK_H"],
        "num_warps": blocks["num_warps"],
    }


def aot_signature(
    pointer: str, table: str | None, rms: bool, heads: int, head_dim: int
) -> tuple[Any, dict[str, str], dict[str, Any], dict[str, int]]:
    """(kernel, signature, constexprs, options) of a launch, to compile without a GPU."""
    from sglang.kernels.ops.diffusion.triton.qk_rotate_half_kernels import qk_rotate_half_kernel

    constants = _constants(rms, table is not None, heads, head_dim)
    options = {"num_warps": constants.pop("num_warps")}
    types = [*[pointer] * 4, *[table or pointer] * 2, pointer, pointer, *["i32"] * 4, "fp32"]
    types += ["constexpr"] * len(constants)
    signature = dict(zip(qk_rotate_half_kernel.arg_names, types, strict=True))
    return qk_rotate_half_kernel, signature, constants, options
