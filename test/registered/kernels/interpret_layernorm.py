"""Run the LayerNorm kernels in Triton's interpreter against the numpy models (no GPU).

`test_reduction_models.py` starts this with TRITON_INTERPRET=1. The interpreter has no inline PTX,
so the arithmetic helpers are replaced by numpy ones; what is tested is everything else: which
thread owns which value, the order of the merges, counts, masks, strides.
"""

from collections.abc import Callable
from types import ModuleType

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from sglang.kernels.ops.diffusion.triton import layernorm_modulate_kernels as kernels
from sglang.kernels.ops.diffusion.triton import welford
from sglang.test.reduction_models import fma32, layer_norm_moments

EPS = np.float32(1e-5)


def data(x):
    return x.handle.data if isinstance(x, tl.tensor) else np.float32(getattr(x, "value", x))


def elementwise(function: Callable) -> Callable:
    """A helper of `ptx` computed by numpy in fp32."""

    def call(*arguments):
        with np.errstate(all="ignore"):
            result = np.asarray(function(*map(data, arguments)), np.float32)
        block = tl.block_type(tl.float32, list(result.shape))
        return tl.tensor(TensorHandle(result, tl.float32), block)

    return call


def rounded(x):
    return torch.from_numpy(np.ascontiguousarray(x, np.float32)).bfloat16().float().numpy()


def rsqrt(x):
    return np.float32(1) / np.sqrt(x)


def modulated(value, factor, shift):
    return rounded(rounded(rounded(value) * factor) + shift)


def affine(value, factor, addend):
    return rounded(fma32(factor, value, addend))


REPLACED = {
    "add_rn": lambda a, b: a + b,
    "sub_rn": lambda a, b: a - b,
    "mul_rn": lambda a, b: a * b,
    "div_rn": lambda a, b: a / b,
    "rcp_rn": lambda a: np.float32(1) / a,
    "fma_rn": fma32,
    "rsqrt_approx": rsqrt,
    "modulate": modulated,
    "affine": affine,
    "add_gated": lambda residual, gate, update: rounded(residual + rounded(gate * update)),
    "one_plus": lambda scale: rounded(np.float32(1) + scale),
}


def widen(x):
    return x.to(tl.float32)


def moments(rows):
    mean, m2, count = layer_norm_moments(rows)
    return mean[:, None], rsqrt(m2 / count + EPS)[:, None]


def random_bf16(*shape):
    return (torch.randn(shape) * 3 + torch.randn(shape[:-1] + (1,))).bfloat16()


def check_modulate(
    batch: int,
    sequence: int,
    hidden: int,
    rows: int,
    walk: bool = False,
    folded: bool = False,
    gated: bool = False,
) -> None:
    """`walk`: two programs, each with the next rows' loads under way and its rows held.
    `folded`: one rounding. `gated`: the gated residual sum before the norm."""
    x = random_bf16(batch, sequence, hidden + 8)[..., :hidden].float().contiguous()
    update = random_bf16(batch, sequence + 1, hidden).float()
    gate, scale, shift = random_bf16(batch, 3 * hidden).float().chunk(3, dim=1)
    out, residual = (torch.full((batch, sequence, hidden), float("nan")) for _ in range(2))
    width = hidden // 4
    kernels.layernorm_modulate_kernel[(2 if walk else -(-sequence // rows), batch)](
        x, update, gate, scale, shift, out, residual, sequence, sequence * width, width,
        (sequence + 1) * width, width, *[3 * width] * 3, float(EPS), hidden, rows,
        hidden % 512 == 0, walk, walk, folded, gated,
    )  # fmt: skip
    if gated:
        x = torch.from_numpy(rounded(x + rounded(gate[:, None] * update[:, :sequence])))
        assert torch.equal(residual, x), (sequence, hidden, rows)
    else:
        assert residual.isnan().all()
    values = x.reshape(-1, hidden).numpy()
    mean, rstd = moments(values)
    factor = rounded(1 + scale.numpy()).repeat(sequence, 0)
    addend = shift.numpy().repeat(sequence, 0)
    expected = (affine if folded else modulated)(rstd * (values - mean), factor, addend)
    assert np.array_equal(out.numpy().reshape(expected.shape), expected), (sequence, hidden, rows)


def check_heads(batch: int, sequence: int, heads: int, head_dim: int) -> None:
    width = heads * head_dim
    packed = random_bf16(batch, sequence, 3 * width).float()
    q, k = (t.view(batch, sequence, heads, head_dim) for t in packed.split(width, -1)[:2])
    outs = [torch.full((batch, sequence, heads, head_dim), float("nan")) for _ in range(2)]
    count = batch * sequence * heads
    strides = (3 * width // 4, head_dim // 4)
    kernels.qk_head_layernorm_kernel[(-(-count // 8), 2)](
        q, k, *outs, count, *strides, *strides, float(EPS), heads, head_dim, 8
    )
    for x, out in zip((q, k), outs, strict=True):
        values = x.reshape(-1, head_dim).numpy()
        mean, rstd = moments(values)
        expected = rstd * (values - mean)
        assert np.array_equal(out.numpy().reshape(expected.shape), expected), (heads, head_dim)


def scalar_range(*bounds: tl.tensor) -> range:
    """The interpreter's scalars are arrays of one entry, which numpy 2.4 takes for no index."""
    return range(*(int(data(bound).item()) for bound in bounds))


def replace_arithmetic(*modules: ModuleType) -> None:
    """numpy in place of the inline PTX that each module has imported."""
    for module in modules:
        for name, function in REPLACED.items():
            setattr(module, name, elementwise(function))
        module.widen = widen


def main() -> None:
    torch.manual_seed(0)
    replace_arithmetic(kernels, welford)
    kernels.range = scalar_range
    modulate_cases = [(1, 3, 3072, 2), (2, 3, 1024, 1), (1, 2, 64, 1), (1, 3, 516, 2),
                      (1, 2, 2240, 1), (3, 5, 512, 4), (1, 1, 4, 1), (2, 5, 516, 1, True),
                      (1, 9, 512, 2, True), (1, 3, 516, 2, False, True)]  # fmt: skip
    gated_cases = [(1, 2, 3072, 1), (2, 3, 1024, 2), (2, 5, 516, 1, True), (3, 5, 64, 2),
                   (1, 9, 512, 2, True)]  # fmt: skip
    head_cases = [(1, 5, 3, 128), (2, 3, 3, 40), (1, 3, 2, 64)]
    for case in modulate_cases:
        check_modulate(*case)
    for case in gated_cases:
        check_modulate(*case, gated=True)
    for case in head_cases:
        check_heads(*case)
    print(f"{len(modulate_cases) + len(gated_cases) + len(head_cases)} cases agree")


if __name__ == "__main__":
    main()
