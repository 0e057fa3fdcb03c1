"""Fused q/k RMSNorm + rotary embedding against its eager chain, at FLUX.1's attention shapes.

python benchmark/kernels/bench_qk_rmsnorm_rope.py
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from timing import BenchRow, bench_row, compiled  # noqa: E402

from sglang.kernels.ops.diffusion.triton.qk_rmsnorm_rope import (  # noqa: E402
    fused_joint_qk_rmsnorm_rope,
    fused_qk_rmsnorm_rope,
    joint_qk_rmsnorm_rope_reference,
    qk_rmsnorm_rope_reference,
)

HEADS, HEAD_DIM, EPS = 24, 128, 1e-6
TOKENS = (256, 512, 1024, 4096, 4608, 16384, 16896, 1000)  # text, 256^2 .. 2048^2 images, odd
JOINT = ((512, 256), (512, 1024), (512, 4096), (512, 16384))  # text, image tokens


def packed_stream(tokens: int) -> tuple[torch.Tensor, ...]:
    """q, k as views of a packed q|k|v projection, as the model has them, and their weights."""
    qkv = torch.randn(1, tokens, 3 * HEADS * HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    q, k, _ = (x.unflatten(-1, (HEADS, HEAD_DIM)) for x in qkv.chunk(3, dim=-1))
    weights = torch.randn(2, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    return q, k, weights[0], weights[1]


def tables(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.rand(tokens, HEAD_DIM // 2, device="cuda").mul(700).repeat_interleave(2, dim=1)
    return angles.cos(), angles.sin()


def bytes_moved(tokens: int) -> int:
    """q and k read and written once, cos and sin read once."""
    return 4 * tokens * HEADS * HEAD_DIM * 2 + 2 * tokens * HEAD_DIM * 4


def single_row(tokens: int) -> BenchRow:
    args = (*packed_stream(tokens), *tables(tokens), EPS)

    def eager() -> tuple[torch.Tensor, ...]:
        return qk_rmsnorm_rope_reference(*args)

    return bench_row(
        "qk_rmsnorm_rope",
        (1, tokens, HEADS, HEAD_DIM),
        torch.bfloat16,
        eager,
        lambda: fused_qk_rmsnorm_rope(*args),
        bytes_moved(tokens),
        compiled(eager) if tokens == 4608 else None,
    )


def joint_row(txt: int, img: int) -> BenchRow:
    txt_q, txt_k, *txt_weights = packed_stream(txt)
    img_q, img_k, *img_weights = packed_stream(img)
    args = (txt_q, txt_k, img_q, img_k, *txt_weights, *img_weights, *tables(txt + img), EPS)

    def eager() -> tuple[torch.Tensor, ...]:
        return joint_qk_rmsnorm_rope_reference(*args)

    return bench_row(
        "joint_qk_rmsnorm_rope",
        (1, txt + img, HEADS, HEAD_DIM),
        torch.bfloat16,
        eager,
        lambda: fused_joint_qk_rmsnorm_rope(*args),
        bytes_moved(txt + img),
        compiled(eager) if img == 4096 else None,
    )


def rows() -> Iterator[BenchRow]:
    """One row per shape; inputs of one row are freed before the next."""
    with torch.no_grad():
        yield from map(single_row, TOKENS)
        yield from (joint_row(txt, img) for txt, img in JOINT)


if __name__ == "__main__":
    for row in rows():
        print(row)
