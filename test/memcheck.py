"""Every kernel once, at a ragged shape, for the memory checker:

compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 1 python test/memcheck.py

API errors are not reported, because cuda-bindings asks the driver for functions it may not have.
"""

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

import torch  # noqa: E402

from sglang.kernels.ops.diffusion.fused_linear_gelu import fused_linear_gelu_tanh  # noqa: E402
from sglang.kernels.ops.diffusion.fused_ln_modulate import fused_ln_modulate  # noqa: E402
from sglang.kernels.ops.diffusion.gelu_mul import gelu_mul_cuda  # noqa: E402
from sglang.kernels.ops.diffusion.gelu_tanh_concat import gelu_tanh_concat_cuda  # noqa: E402
from sglang.kernels.ops.diffusion.linear_gelu_bitexact import (  # noqa: E402
    linear_gelu_bitexact_cuda,
)
from sglang.kernels.ops.diffusion.modulate_scale_shift import (  # noqa: E402
    modulate_scale_shift_cuda,
)
from sglang.kernels.ops.diffusion.residual_gate_add import residual_gate_add_cuda  # noqa: E402
from sglang.kernels.ops.diffusion.triton.decode_attention import decode_attention  # noqa: E402
from sglang.kernels.ops.diffusion.triton.gated_layernorm_modulate import (  # noqa: E402
    fused_gated_layernorm_modulate,
)
from sglang.kernels.ops.diffusion.triton.gemv import gemv, gemv_qkv, gemv_swiglu  # noqa: E402
from sglang.kernels.ops.diffusion.triton.layernorm_modulate import (  # noqa: E402
    fused_layernorm_modulate,
    fused_qk_head_layernorm,
)
from sglang.kernels.ops.diffusion.triton.qk_layernorm_rope import (  # noqa: E402
    fused_qk_layernorm_rope,
)
from sglang.kernels.ops.diffusion.triton.qk_rmsnorm_rope import (  # noqa: E402
    fused_joint_qk_rmsnorm_rope,
    fused_qk_rmsnorm_rope,
)
from sglang.kernels.ops.diffusion.triton.qk_rmsnorm_rotate_half import (  # noqa: E402
    fused_qk_rmsnorm_rotate_half,
)
from sglang.kernels.ops.diffusion.triton.residual_rmsnorm import (  # noqa: E402
    fused_residual_rmsnorm,
)
from sglang.kernels.ops.diffusion.triton.rmsnorm_scale_shift_bitexact import (  # noqa: E402
    fused_rmsnorm_scale_shift_bitexact,
    fused_scale_residual_rmsnorm_scale_shift_bitexact,
)
from sglang.kernels.ops.diffusion.triton.sample_token import sample_token  # noqa: E402

ROWS, HIDDEN, HEADS, HEAD_DIM, EPS = 301, 4096, 5, 128, 1e-6


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def integers(*values: int) -> torch.Tensor:
    return torch.tensor(values, device="cuda")


def gemm_calls() -> dict[str, Callable[[], object]]:
    """The Hopper GEMMs: 1269 rows of 17 blocks of K, so many columns that an H200 takes them in
    tiles of 256 (3328) and of 192 (2496)."""
    x, weight, bias, attn = (
        normal(*size) for size in [(1, 1269, 1088), (3328, 1088), (3328,), (1, 1269, 200)]
    )
    return {
        "linear_gelu_bitexact": lambda: linear_gelu_bitexact_cuda(x, weight, bias),
        "linear_gelu_bitexact behind attn": lambda: linear_gelu_bitexact_cuda(
            x, weight, bias, attn[..., 56:192]
        ),
        "linear_gelu_bitexact of narrow tiles": lambda: linear_gelu_bitexact_cuda(
            x, weight[:2496], bias[:2496], attn
        ),
    }


def prior_calls() -> dict[str, Callable[[], object]]:
    """The kernels of a prior's step: 6 queries of 2 keys, slot 200 of 256, the last token of 3."""
    vector, matrix, bias = normal(1, 1, 1032), normal(38, 1032), normal(38)
    query, key = normal(40, 1032), normal(8, 1032)
    slots, partner = normal(2, 1, 2, 256, HEAD_DIM), integers(*range(HEAD_DIM)).roll(9)
    table, slot = normal(201, HEAD_DIM), integers(200)
    wide, noise = torch.rand(1, 16385, device="cuda"), torch.rand(3, 16385, device="cuda")
    return {
        "gemv": lambda: gemv(vector, matrix, bias),
        "gemv_qkv": lambda: gemv_qkv(vector, query, key, key, []),
        "gemv_swiglu": lambda: gemv_swiglu(vector, matrix),
        "residual_rmsnorm": lambda: fused_residual_rmsnorm(
            vector, vector, vector[0, 0], vector[0, 0], EPS
        ),
        "decode_attention": lambda: decode_attention(
            normal(1, 1, 10 * HEAD_DIM), table, table, partner, *slots, slot
        ),
        "sample_token": lambda: sample_token(
            normal(1, 1, 16385), noise, wide, integers(0, 0, 0), integers(0)[None], integers(2),
            slot.clone(), 0.9, 50, 0.75,
        ),
    }  # fmt: skip


@torch.inference_mode()
def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("memcheck: got no CUDA GPU, expected one; run it on a machine that has it")
    x, update = normal(1, ROWS, HIDDEN), normal(1, ROWS, HIDDEN)
    shift, scale, gate = normal(1, 3 * HIDDEN).chunk(3, dim=1)
    weight, bias = normal(2 * HIDDEN, HIDDEN), normal(2 * HIDDEN)
    norm = normal(HIDDEN)
    q, k = normal(2, ROWS, HEADS, HEAD_DIM), normal(2, ROWS, HEADS, HEAD_DIM)
    head_weight = normal(HEAD_DIM)
    cos, sin = torch.randn(2, 2 * ROWS, HEAD_DIM, device="cuda")
    table = normal(ROWS, 1, HEAD_DIM)
    calls = {
        "residual_gate_add": lambda: residual_gate_add_cuda(x, update, gate[:, None]),
        "modulate_scale_shift": lambda: modulate_scale_shift_cuda(x, scale, shift),
        "gelu_tanh_concat": lambda: gelu_tanh_concat_cuda(x, normal(1, ROWS, 2 * HIDDEN)),
        "gelu_mul": lambda: gelu_mul_cuda(*normal(1, ROWS, 2 * HIDDEN).chunk(2, dim=-1)),
        "fused_linear_gelu": lambda: fused_linear_gelu_tanh(x, weight, bias),
        "fused_ln_modulate": lambda: fused_ln_modulate(x, scale, shift, EPS),
        "layernorm_modulate": lambda: fused_layernorm_modulate(x, scale, shift, EPS),
        "gated_layernorm_modulate": lambda: fused_gated_layernorm_modulate(
            x, update, gate, scale, shift, EPS
        ),
        "qk_head_layernorm": lambda: fused_qk_head_layernorm(q, k, EPS),
        "qk_rmsnorm_rope": lambda: fused_qk_rmsnorm_rope(
            q, k, head_weight, head_weight, cos[:ROWS], sin[:ROWS], EPS
        ),
        "qk_rmsnorm_rotate_half": lambda: fused_qk_rmsnorm_rotate_half(
            q, k, head_weight, head_weight, table, table, EPS
        ),
        "qk_layernorm_rope": lambda: fused_qk_layernorm_rope(
            q, k, cos[: ROWS - 17], sin[: ROWS - 17], 17, EPS
        ),
        "joint_qk_rmsnorm_rope": lambda: fused_joint_qk_rmsnorm_rope(
            q, k, q, k, *[head_weight] * 4, cos, sin, EPS
        ),
        "rmsnorm_scale_shift_bitexact": lambda: fused_rmsnorm_scale_shift_bitexact(
            x, norm, scale, shift, EPS
        ),
        "scale_residual_rmsnorm_scale_shift_bitexact": lambda: (
            fused_scale_residual_rmsnorm_scale_shift_bitexact(
                x, update, gate, norm, scale, shift, EPS
            )
        ),
    }
    for name, call in (calls | gemm_calls() | prior_calls()).items():
        call()
        torch.cuda.synchronize()
        print("ran", name)


if __name__ == "__main__":
    main()
