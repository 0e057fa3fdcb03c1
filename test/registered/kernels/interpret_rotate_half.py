"""Run the q and k norm + rotation kernel in Triton's interpreter against numpy models (no GPU).

`test_reduction_models.py` starts this with TRITON_INTERPRET=1; see `interpret_layernorm.py`.
"""

import numpy as np
import torch
from interpret_layernorm import (
    EPS,
    elementwise,
    moments,
    random_bf16,
    replace_arithmetic,
    rounded,
    rsqrt,
)

from sglang.kernels.ops.diffusion.triton import qk_rotate_half_kernels as kernels
from sglang.kernels.ops.diffusion.triton import rms_sum, welford
from sglang.test.reduction_models import aten_sum_of_squares

LOW = elementwise(lambda a, b, c, s: rounded(rounded(rounded(a) * c) - rounded(rounded(b) * s)))
HIGH = elementwise(lambda a, b, c, s: rounded(rounded(rounded(b) * c) + rounded(rounded(a) * s)))


def rotate_rounded(first, second, cos_first, sin_first, cos_second, sin_second):
    low = LOW(first, second, cos_first, sin_first)
    return low, HIGH(first, second, cos_second, sin_second)


def round_to(x, dtype):
    return elementwise(rounded)(x)


def rms_norm(rows, weight):
    mean = aten_sum_of_squares(rows) / np.float32(rows.shape[1])
    return rounded(weight * (rsqrt(mean + EPS)[:, None] * rows))


def layer_norm(rows):
    mean, rstd = moments(rows)
    return rounded(rstd * (rows - mean))


def turned_by_parts(y, cos, sin):
    """What ERNIE-Image's eager chain makes of normed rows, each step rounded."""
    first, second = np.split(y, 2, axis=-1)
    partners = np.concatenate([-second, first], axis=-1)
    return rounded(rounded(y * cos) + rounded(partners * sin))


def turned_once(y, cos, sin):
    """GLM-Image's: fp32, left unrounded, as the kernel's output tensor is fp32 here."""
    return y * cos + np.roll(y, y.shape[-1] // 2, axis=-1) * sin


def check(rms: bool, batch: int, tokens: int, heads: int, head_dim: int, text: int) -> None:
    width = heads * head_dim
    packed = random_bf16(batch, tokens, 3 * width).float()
    q, k = (t.view(batch, tokens, heads, head_dim) for t in packed.split(width, -1)[:2])
    weights = random_bf16(2, head_dim).float()
    cos, sin = random_bf16(2, tokens - text, head_dim).float()
    if not rms:
        cos[:, head_dim // 2 :] = cos[:, : head_dim // 2]
        sin[:, : head_dim // 2] = -sin[:, head_dim // 2 :]
    outs = [torch.full((batch, tokens, heads, head_dim), float("nan")) for _ in range(2)]
    kernels.qk_rotate_half_kernel[(tokens, batch)](
        q, k, *weights, cos, sin, *outs, tokens * 3 * width // 8, 3 * width // 8, head_dim // 8,
        text, float(EPS), rms, text < tokens, heads, head_dim, 4,
    )  # fmt: skip
    for x, weight, out in zip((q, k), weights, outs, strict=True):
        rows = x.reshape(-1, head_dim).numpy()
        y = rms_norm(rows, weight.numpy()) if rms else layer_norm(rows)
        y = y.reshape(x.shape)
        turn = turned_by_parts if rms else turned_once
        expected = turn(y[:, text:], cos[:, None].numpy(), sin[:, None].numpy())
        assert np.array_equal(out[:, text:].numpy(), expected), (rms, heads, head_dim)
        assert np.array_equal(rounded(out[:, :text].numpy()), y[:, :text]), (rms, head_dim)


def main() -> None:
    torch.manual_seed(0)
    replace_arithmetic(kernels, rms_sum, welford)
    kernels.rotate_rounded, kernels.round_to = rotate_rounded, round_to
    shapes = [(1, 3, 3, 128), (2, 2, 4, 64), (1, 2, 5, 32), (1, 2, 1, 16)]
    cases = [(rms, *shape) for rms in (True, False) for shape in shapes]
    for rms, batch, tokens, heads, head_dim in cases:
        check(rms, batch, tokens, heads, head_dim, 0)
        if not rms:
            check(rms, batch, tokens, heads, head_dim, 1)
            check(rms, batch, tokens, heads, head_dim, tokens)
    print(f"{len(cases)} cases agree")


if __name__ == "__main__":
    main()
