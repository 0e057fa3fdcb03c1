"""Run the kernels of a prior's step in Triton's interpreter against torch on the CPU (no GPU).

`test_reduction_models.py` starts this with TRITON_INTERPRET=1; see `interpret_layernorm.py`. All
tensors are fp32 and no helper rounds further, so the eager chains agree within fp32 rounding; the
norm's sum follows aten's order and agrees bit for bit.
"""

import numpy as np
import torch
from interpret_layernorm import elementwise, replace_arithmetic, rsqrt

from sglang.kernels.ops.diffusion.triton import decode_attention as attention
from sglang.kernels.ops.diffusion.triton import (
    decode_attention_kernels,
    gemv_kernels,
    residual_rmsnorm_kernels,
    rms_sum,
    sample_token_kernels,
)
from sglang.kernels.ops.diffusion.triton.gemv import (
    gemv_qkv_reference,
    gemv_reference,
    gemv_swiglu_reference,
)
from sglang.kernels.ops.diffusion.triton.sample_token import sample_token_reference
from sglang.test.reduction_models import aten_sum_of_squares

KERNELS = (decode_attention_kernels, gemv_kernels, residual_rmsnorm_kernels, rms_sum,
           sample_token_kernels)  # fmt: skip
EPS = np.float32(1e-5)
TILE = {"BLOCK_N": 4, "BLOCK_K": 256, "UNROLL": 1}
RULES = [(0.9, 0, 0.75), (1.3, 5, 0.9), (1.0, 50, 1.0), (1.0, 1, 1.0), (1.0, 0, 0.0), (0.7, 0, 0.3)]


def unwritten(*shape):
    return torch.full(shape, float("nan"))


def close(actual, expected):
    torch.testing.assert_close(actual.view_as(expected), expected, rtol=2e-5, atol=2e-5)


def check_products(rows: int, columns: int) -> None:
    x, weight, bias = torch.randn(columns), torch.randn(rows, columns), torch.randn(rows)
    out = unwritten(rows)
    grid = (-(-rows // 4),)
    gemv_kernels.gemv_kernel[grid](x, weight, bias, out, rows, columns, HAS_BIAS=True, **TILE)
    close(out, gemv_reference(x, weight, bias))
    out = unwritten(rows // 2)
    gemv_kernels.gemv_swiglu_kernel[grid](
        x, weight, out, rows // 2, columns, **TILE | {"BLOCK_N": 2}
    )
    close(out, gemv_swiglu_reference(x, weight))


def check_qkv(queries: int, keys: int, columns: int) -> None:
    x, sizes = torch.randn(columns), (queries, keys, keys)
    weights = [torch.randn(n, columns) for n in sizes]
    biases = [torch.randn(n) for n in sizes]
    out = unwritten(sum(sizes))
    gemv_kernels.gemv_qkv_kernel[(sum(sizes) // 4,)](
        x, *weights, *biases, out, queries, keys, columns, HAS_BIAS=True, **TILE
    )
    close(out, gemv_qkv_reference(x, *weights, biases))


def check_attention(queries: int, heads: int, size: int, slot: int, slots: int = 256) -> None:
    filled = torch.arange(slots)[:, None] < slot
    keys, values = (torch.randn(1, heads, slots, size) * filled for _ in range(2))
    partner = torch.randperm(size)
    rope = (*torch.randn(2, slots, size), partner)
    qkv, place = torch.randn(1, 1, (queries + 2 * heads) * size), torch.tensor([slot])
    new_keys, new_values, chunks = keys.clone(), values.clone(), slots // attention.CHUNK
    partial, peak, mass = (unwritten(chunks, queries, n) for n in (size, 1, 1))
    out = unwritten(queries * size)
    decode_attention_kernels.decode_attention_kernel[(chunks, heads)](
        qkv, *rope, new_keys, new_values, place, partial, peak, mass, size**-0.5, SLOTS=slots,
        HEADS=heads, E=size, **attention._group(queries // heads),
    )  # fmt: skip
    decode_attention_kernels.combine_chunks_kernel[(queries,)](
        partial, peak, mass, place, out, QUERIES=queries, E=size, **attention._chunks(chunks),
    )  # fmt: skip
    expected = attention.decode_attention_reference(qkv, *rope, keys, values, place)
    assert torch.equal(keys, new_keys) and torch.equal(values, new_values), (queries, slot)
    close(out, expected)


def normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    mean = aten_sum_of_squares(x[None]) / np.float32(len(x))
    return weight * (rsqrt(mean + EPS)[:, None] * x[None])[0]


def check_norm(width: int) -> None:
    x, update, update_weight, weight = torch.randn(4, width)
    total, out = unwritten(width), unwritten(width)
    residual_rmsnorm_kernels.residual_rmsnorm_kernel[(1,)](
        x, update, update_weight, weight, total, out, float(EPS), width, HAS_UPDATE=True
    )
    expected = x.numpy() + normed(update.numpy(), update_weight.numpy())
    assert np.array_equal(total.numpy(), expected), width
    assert np.array_equal(out.numpy(), normed(expected, weight.numpy())), width


def check_sampler(size: int, rule: tuple[float, int, float]) -> None:
    temperature, top_k, top_p = rule
    logits = (torch.randn(1, 1, size) * 2).bfloat16()
    noise = torch.empty(3, size).exponential_()
    ours, theirs = (
        [
            unwritten(1, size),
            *(torch.zeros(s, dtype=torch.int64) for s in ((3,), (1, 1), (1,), (1,))),
        ]
        for _ in range(2)
    )
    sample_token_kernels.sample_token_kernel[(1,)](
        logits, noise, *ours, 1 / temperature, 1 - top_p, V=size, TOP_K=top_k,
        TOP_P=top_p < 1, GREEDY=False, BLOCK_V=1 << (size - 1).bit_length(),
    )  # fmt: skip
    sample_token_reference(logits, noise, *theirs, *rule)
    assert all(map(torch.equal, ours, theirs)), (size, rule)


def main() -> None:
    torch.manual_seed(0)
    for module in KERNELS:
        replace_arithmetic(module)
        for name, stand_in in (("widen", lambda x: x.to(gemv_kernels.tl.float32)),
                               ("round_to", lambda x, dtype: x)):  # fmt: skip
            if hasattr(module, name):
                setattr(module, name, stand_in)
    gemv_kernels._exp = elementwise(np.exp)
    cases = [(check_products, (10, 64)), (check_products, (8, 1032)), (check_qkv, (16, 8, 712))]
    places = [((6, 2, 16), 0), ((6, 2, 16), 63), ((16, 1, 32), 64), ((4, 2, 16), 255)]
    cases += [(check_attention, (*heads, slot)) for heads, slot in places]
    cases += [(check_norm, (width,)) for width in (64, 516, 4096)]
    cases += [(check_sampler, (size, rule)) for size in (64, 200) for rule in RULES]
    for check, arguments in cases:
        check(*arguments)
    print(f"{len(cases)} cases agree")


if __name__ == "__main__":
    main()
