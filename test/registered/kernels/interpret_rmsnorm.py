"""Run the RMSNorm kernels of rows and of heads in Triton's interpreter against models (no GPU).

`test_reduction_models.py` starts this with TRITON_INTERPRET=1; see `interpret_layernorm.py`.
"""

import numpy as np
import torch
from interpret_layernorm import (
    EPS,
    elementwise,
    random_bf16,
    replace_arithmetic,
    rounded,
    rsqrt,
    scalar_range,
)
from interpret_rotate_half import rms_norm, round_to

from sglang.kernels.ops.diffusion.triton import qk_rmsnorm_rope_kernels as heads_kernels
from sglang.kernels.ops.diffusion.triton import rms_sum
from sglang.kernels.ops.diffusion.triton import rmsnorm_scale_shift_kernels as kernels
from sglang.test.reduction_models import aten_sum_of_squares, flashinfer_sum_of_squares

LAYOUTS = {"aten": (128, 4), "flashinfer": (32, 8)}
HEADS, HEAD_DIM = 3, 64


def normed(rows, weight, norm):
    total = aten_sum_of_squares(rows) if norm == "aten" else flashinfer_sum_of_squares(rows, 32)
    rstd = rsqrt(total / np.float32(rows.shape[1]) + EPS)[:, None]
    return rounded(rows * rstd * weight)


def check_rows(
    norm: str, residual: bool, batch: int, tokens: int, hidden: int, rows: int, walk: bool
) -> None:
    """`walk`: two programs, each with the next rows' loads under way and the rows held."""
    threads, vector = LAYOUTS[norm]
    x, update = (random_bf16(batch, tokens, hidden).float() for _ in range(2))
    weight = random_bf16(hidden).float()
    gate, scale, shift = random_bf16(batch, 3 * hidden).float().chunk(3, dim=1)
    outs = [torch.full((batch, tokens, hidden), float("nan")) for _ in range(2)]
    kernels.rmsnorm_scale_shift_kernel[(2 if walk else -(-tokens // rows), batch)](
        x, update, gate, weight, scale, shift, *outs, *[3 * hidden // 8] * 3, tokens, float(EPS),
        residual, norm == "aten", hidden, threads, vector, rows, walk, walk,
    )  # fmt: skip
    for entry in range(batch):
        values = x[entry].numpy()
        if residual:
            values = rounded(values + rounded(gate[entry].numpy() * update[entry].numpy()))
            assert np.array_equal(outs[1][entry].numpy(), values), (norm, hidden, rows)
        y = normed(values, weight.numpy(), norm)
        expected = rounded(rounded(y * rounded(1 + scale[entry].numpy())) + shift[entry].numpy())
        assert np.array_equal(outs[0][entry].numpy(), expected), (norm, hidden, rows, walk)


def turned(y, cos, sin):
    """FLUX.1's rotation of neighbours: fp32, left unrounded, as the output tensor is fp32 here."""
    partners = np.stack([-y[..., 1::2], y[..., 0::2]], axis=-1).reshape(y.shape)
    return y * cos + partners * sin


def check_heads(text: int, tokens: int, block: int) -> None:
    streams = [
        [random_bf16(2, max(count, 1), HEADS, HEAD_DIM).float() for _ in range(2)]
        for count in (text, tokens - text)
    ]
    weights = [random_bf16(2, HEAD_DIM).float() for _ in range(2)]
    cos, sin = torch.randn(2, tokens, HEAD_DIM)
    outs = [torch.full((2, tokens, HEADS, HEAD_DIM), float("nan")) for _ in range(2)]
    strides = [s.stride(d) // 8 for s, _ in streams for d in range(3)]
    heads_kernels.qk_rmsnorm_rope_kernel[(tokens, 2)](
        *streams[0], *streams[1], *weights[0], *weights[1], cos, sin, *outs, *strides,
        text, float(EPS), text > 0, HEADS, HEAD_DIM, block, HEAD_DIM,
    )  # fmt: skip
    for index, out in enumerate(outs):
        parts = [
            rms_norm(stream[index].reshape(-1, HEAD_DIM).numpy(), weight[index].numpy())
            for stream, weight in zip(streams, weights, strict=True)
        ]
        first, second = (y.reshape(2, -1, HEADS, HEAD_DIM) for y in parts)
        y = np.concatenate([first[:, :text], second], axis=1)
        expected = turned(y, cos[:, None].numpy(), sin[:, None].numpy())
        assert np.array_equal(out.numpy(), expected), (text, tokens, block)


def main() -> None:
    torch.manual_seed(0)
    replace_arithmetic(kernels, heads_kernels, rms_sum)
    kernels.range, heads_kernels.round_to = scalar_range, round_to
    kernels.add_gated = elementwise(lambda x, gate, update: rounded(x + rounded(gate * update)))
    row_cases = [
        (norm, residual, *shape)
        for norm in LAYOUTS
        for residual in (False, True)
        for shape in ((2, 5, 2048, 1, True), (1, 3, 512, 2, False), (1, 5, 512, 1, False))
    ]
    row_cases.append(("aten", True, 2, 5, 520, 1, True))
    head_cases = [(0, 3, 4), (2, 3, 2)]
    for case in row_cases:
        check_rows(*case)
    for case in head_cases:
        check_heads(*case)
    print(f"{len(row_cases) + len(head_cases)} cases agree")


if __name__ == "__main__":
    main()
