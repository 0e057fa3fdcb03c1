"""Products of one bf16 or fp16 vector with a matrix, at the speed at which the matrix is read.

    gemv(x, weight, bias)              F.linear(x, weight, bias)
    gemv_qkv(x, q, k, v, biases)       the three projections of attention, joined in one vector
    gemv_swiglu(x, weight)             gate, up = F.linear(x, weight).chunk(2, -1);
                                       up * F.silu(gate)

cuBLAS reads the weights of a batch-1 product at 50-80 % of the memory's speed. These kernels are
not bit-equal to it: they are the definition of the product where they are used, and give the same
bits on every run, in a CUDA graph or not, because nothing but the shape decides their order.

Numerical contract: x and weight are widened to fp32. A thread adds the products of its own columns
in fp32 with FMA, in the order of the columns; the threads' sums are folded in an order that the
shape fixes (`tile`). Then `+ bias` in fp32 and one rounding to the dtype. `gemv_swiglu` rounds
gate and up like that and goes on as eager does: silu = round(gate / (1 + exp(-gate))) with CUDA's
expf and an IEEE division, round(up * silu). All roundings are to nearest even.

Shapes: x `[..., K]` with K values in all, weight `[N, K]`, bias `[N]`; out `[..., N]` (`N / 2` for
swiglu), contiguous and new.
"""

from typing import Any

import torch
import torch.nn.functional as F

from sglang.kernels.ops.diffusion.triton.available import aligned, triton_runs_on
from sglang.kernels.registration import describe, kernel_reads, register_op

DTYPES = (torch.bfloat16, torch.float16)
VECTOR = 8  # elements of a 16-byte load


def gemv_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """What `gemv` computes, in eager and with another order of sums."""
    return F.linear(x, weight, bias)


def gemv_qkv_reference(
    x: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    biases: list[torch.Tensor],
) -> torch.Tensor:
    """The eager expression; `biases` holds three tensors or none."""
    parts = zip((q, k, v), biases or (None,) * 3, strict=True)
    return torch.cat([F.linear(x, weight, bias) for weight, bias in parts], dim=-1)


def gemv_swiglu_reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The eager expression."""
    gate, up = F.linear(x, weight).chunk(2, dim=-1)
    return up * F.silu(gate)


def can_use_gemv(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    """Whether `gemv` takes these; otherwise run `gemv_reference`."""
    if not kernel_reads(x, weight, bias):
        return False
    if x.dtype not in DTYPES or weight.dtype != x.dtype or weight.dim() != 2 or not x.dim():
        return False
    rows, columns = weight.shape
    if not rows or not columns or columns % VECTOR or x.shape[-1] != columns:
        return False
    if x.numel() != columns or not x.is_contiguous() or not weight.is_contiguous():
        return False
    if bias is not None and not _bias_fits(bias, weight):
        return False
    if weight.device != x.device or not triton_runs_on(x.device):
        return False
    return aligned(x) and aligned(weight)


def can_use_gemv_qkv(
    x: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    biases: list[torch.Tensor],
) -> bool:
    """Whether `gemv_qkv` takes these: k and v of one shape, no tile across two matrices."""
    if len(biases) not in (0, 3):
        return False
    pairs = zip((q, k, v), biases or (None,) * 3, strict=True)
    if not all(can_use_gemv(x, weight, bias) for weight, bias in pairs) or k.shape != v.shape:
        return False
    block = tile(len(q) + 2 * len(k), q.shape[1])["BLOCK_N"]
    return len(q) % block == 0 and len(k) % block == 0


def can_use_gemv_swiglu(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `gemv_swiglu` takes these."""
    return can_use_gemv(x, weight) and len(weight) % 2 == 0


def _bias_fits(bias: torch.Tensor, weight: torch.Tensor) -> bool:
    same = bias.dtype == weight.dtype and bias.device == weight.device
    return same and bias.shape == weight.shape[:1] and bias.is_contiguous()


def tile(rows: int, columns: int) -> dict[str, int]:
    """The shape's launch constants: they fix the order of sums, so nothing else may decide.

    `rows`: of the matrix that are read. A program reads BLOCK_N whole rows.
    """
    block_k = max(256, 1 << (columns - 1).bit_length())
    if block_k <= 1024:
        return {"BLOCK_N": 4, "BLOCK_K": block_k, "UNROLL": 1, "num_warps": block_k // 256}
    if block_k <= 4096:
        return {"BLOCK_N": 4, "BLOCK_K": block_k, "UNROLL": 1, "num_warps": 4}
    if block_k <= 16384:  # a loop over fewer columns has less of the row on its way
        return {"BLOCK_N": 1, "BLOCK_K": block_k, "UNROLL": 1, "num_warps": 8}
    return {"BLOCK_N": 4, "BLOCK_K": 2048, "UNROLL": 2, "num_warps": 8}


def _gemv(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if not can_use_gemv(x, weight, bias):
        raise ValueError(_rejection("gemv", x=x, weight=weight))
    return launch_gemv(x, weight, bias, tile(*weight.shape))


def launch_gemv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, constants: dict[str, int]
) -> torch.Tensor:
    """`gemv` with the launch constants of the caller's choice (for the sweep)."""
    from sglang.kernels.ops.diffusion.triton.gemv_kernels import gemv_kernel

    rows, columns = weight.shape
    out = x.new_empty(*x.shape[:-1], rows)
    with torch.cuda.device(x.device):
        gemv_kernel[(-(-rows // constants["BLOCK_N"]),)](
            x, weight, weight if bias is None else bias, out, N=rows, K=columns,
            HAS_BIAS=bias is not None, **constants,
        )  # fmt: skip
    return out


def _gemv_qkv(
    x: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    biases: list[torch.Tensor],
) -> torch.Tensor:
    if not can_use_gemv_qkv(x, q, k, v, biases):
        raise ValueError(_rejection("gemv_qkv", x=x, q=q, k=k, v=v))
    return launch_gemv_qkv(x, q, k, v, biases, tile(len(q) + 2 * len(k), q.shape[1]))


def launch_gemv_qkv(
    x: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    biases: list[torch.Tensor],
    constants: dict[str, int],
) -> torch.Tensor:
    """`gemv_qkv` with the launch constants of the caller's choice."""
    from sglang.kernels.ops.diffusion.triton.gemv_kernels import gemv_qkv_kernel

    rows = len(q) + 2 * len(k)
    out = x.new_empty(*x.shape[:-1], rows)
    with torch.cuda.device(x.device):
        gemv_qkv_kernel[(rows // constants["BLOCK_N"],)](
            x, q, k, v, *(biases or (q, k, v)), out, NQ=len(q), NK=len(k), K=q.shape[1],
            HAS_BIAS=bool(biases), **constants,
        )  # fmt: skip
    return out


def _gemv_swiglu(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if not can_use_gemv_swiglu(x, weight):
        raise ValueError(_rejection("gemv_swiglu", x=x, weight=weight))
    constants = tile(*weight.shape)
    pairs = max(1, constants["BLOCK_N"] // 2)
    return launch_gemv_swiglu(x, weight, constants | {"BLOCK_N": pairs})


def launch_gemv_swiglu(
    x: torch.Tensor, weight: torch.Tensor, constants: dict[str, int]
) -> torch.Tensor:
    """`gemv_swiglu` with the launch constants of the caller's choice; BLOCK_N counts pairs."""
    from sglang.kernels.ops.diffusion.triton.gemv_kernels import gemv_swiglu_kernel

    values, columns = len(weight) // 2, weight.shape[1]
    out = x.new_empty(*x.shape[:-1], values)
    with torch.cuda.device(x.device):
        gemv_swiglu_kernel[(-(-values // constants["BLOCK_N"]),)](
            x, weight, out, N=values, K=columns, **constants,
        )  # fmt: skip
    return out


def _gemv_fake(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _gemv_qkv_fake(
    x: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    biases: list[torch.Tensor],
) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], q.shape[0] + k.shape[0] + v.shape[0])


def _gemv_swiglu_fake(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0] // 2)


def _rejection(op: str, **tensors: torch.Tensor) -> str:
    return (
        f"{op} got {describe(**tensors)}; expected CUDA tensors (sm_80 or newer) of one dtype, "
        f"bf16 or fp16: x [..., K] of K values, weight [N, K], K a multiple of {VECTOR}, bias [N], "
        f"contiguous, 16-byte aligned, no gradient; ask can_use_{op} first and run {op}_reference "
        "where it says no"
    )


_op = register_op("gemv", _gemv, _gemv_fake)
_qkv_op = register_op("gemv_qkv", _gemv_qkv, _gemv_qkv_fake)
_swiglu_op = register_op("gemv_swiglu", _gemv_swiglu, _gemv_swiglu_fake)


def gemv(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x `[..., K]` of K values times weight `[N, K]`, plus bias `[N]` -> `[..., N]`.

    Raises ValueError where `can_use_gemv` says no.
    """
    return _op(x, weight, bias)


def gemv_qkv(
    x: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    biases: list[torch.Tensor],
) -> torch.Tensor:
    """x `[..., K]` times the weights q `[NQ, K]`, k, v `[NK, K]` -> `[..., NQ + 2 * NK]`.

    `biases`: those of q, k and v, or an empty list. Raises ValueError where `can_use_gemv_qkv`
    says no.
    """
    return _qkv_op(x, q, k, v, biases)


def gemv_swiglu(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """up * silu(gate) of the halves of x `[..., K]` times weight `[2 * N, K]` -> `[..., N]`.

    Raises ValueError where `can_use_gemv_swiglu` says no.
    """
    return _swiglu_op(x, weight)


def aot_signatures() -> list[tuple[Any, dict[str, str], dict[str, Any], dict[str, int]]]:
    """(kernel, signature, constexprs, options) of GLM-Image's prior, to compile without a GPU."""
    from sglang.kernels.ops.diffusion.triton import gemv_kernels as kernels

    gated, qkv = {"N": 13696, "K": 4096}, {"NQ": 4096, "NK": 256, "K": 4096, "HAS_BIAS": True}
    return [
        _aot(kernels.gemv_kernel, tile(4096, 4096), N=4096, K=4096, HAS_BIAS=False),
        _aot(kernels.gemv_kernel, tile(4096, 13696), N=4096, K=13696, HAS_BIAS=False),
        _aot(kernels.gemv_kernel, tile(4096, 28672), N=4096, K=28672, HAS_BIAS=False),
        _aot(kernels.gemv_kernel, tile(96, 64), N=96, K=64, HAS_BIAS=True),
        _aot(kernels.gemv_qkv_kernel, tile(4608, 4096), **qkv),
        _aot(kernels.gemv_swiglu_kernel, tile(27392, 4096) | {"BLOCK_N": 2}, **gated),
    ]


def _aot(
    kernel: Any, constants: dict[str, int], **sizes: int
) -> tuple[Any, dict[str, str], dict[str, Any], dict[str, int]]:
    warps = {"num_warps": constants["num_warps"]}
    known = {k: v for k, v in constants.items() if k != "num_warps"} | sizes
    signature = {name: "constexpr" if name in known else "*bf16" for name in kernel.arg_names}
    return kernel, signature, known, warps
