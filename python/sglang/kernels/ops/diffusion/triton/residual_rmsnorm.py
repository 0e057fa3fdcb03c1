"""RMSNorm of an update, its residual sum and the RMSNorm after it, in one kernel, bit for bit.

Equals the eager chain of GLM-Image's prior (16-bit tensors, one eps):

    norm(x, weight) = weight * F.rms_norm(x, (D,), None, eps)
    total = x + norm(update, update_weight)
    out   = norm(total, weight)

Numerical contract (everything until `round` is fp32; all roundings are to nearest even):
- sum of squares of a row, as aten's 32 x 4 threads add it: thread t owns the vectors of 4
  neighbours t, t + 128, ... and adds their squares serially, `s = fma(v, v, s)` (a square of a
  16-bit float is exact); lanes fold as SHFL.DOWN 16, 8, 4, 2, 1, then the 4 warps by halves;
- `rstd = rsqrt.approx(sum / D (div.rn) + eps)`;
- norm = round(weight * round(rstd * x)); total = round(x + norm).
Made after torch 2.11's `_fused_rms_norm` (sm_90, CUDA 13) without a weight.

Shapes: x, update, total, out `[..., D]` contiguous; weights `[D]`.
"""

from typing import Any

import torch
import torch.nn.functional as F

from sglang.kernels.ops.diffusion.triton.available import aligned, triton_runs_on
from sglang.kernels.registration import describe, kernel_reads, register_op

DTYPES = (torch.bfloat16, torch.float16)
VECTOR = 4  # aten's own; it takes another path where a row does not hold whole vectors
MAX_WIDTH = 8192
SumAndNorm = tuple[torch.Tensor, torch.Tensor]


def rmsnorm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The eager norm: rounded before the weight and after it. x `[..., D]`, weight `[D]`."""
    return weight * F.rms_norm(x, x.shape[-1:], None, eps)


def residual_rmsnorm_reference(
    x: torch.Tensor,
    update: torch.Tensor,
    update_weight: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
) -> SumAndNorm:
    """The eager chain: (total, out)."""
    total = x + rmsnorm_reference(update, update_weight, eps)
    return total, rmsnorm_reference(total, weight, eps)


def can_use_rmsnorm(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `fused_rmsnorm` takes these; otherwise run `rmsnorm_reference`."""
    if not kernel_reads(x, weight):
        return False
    if x.dtype not in DTYPES or not x.dim() or not x.numel() or not triton_runs_on(x.device):
        return False
    width = x.shape[-1]
    if width % VECTOR or width > MAX_WIDTH or x.numel() // width >= 2**31:
        return False
    return x.is_contiguous() and aligned(x) and _weight_fits(x, weight)


def can_use_residual_rmsnorm(
    x: torch.Tensor, update: torch.Tensor, update_weight: torch.Tensor, weight: torch.Tensor
) -> bool:
    """Whether `fused_residual_rmsnorm` takes these; otherwise run the eager chain."""
    if not can_use_rmsnorm(x, weight) or not can_use_rmsnorm(update, update_weight):
        return False
    return (x.shape, x.dtype, x.device) == (update.shape, update.dtype, update.device)


def _weight_fits(x: torch.Tensor, weight: torch.Tensor) -> bool:
    same = weight.dtype == x.dtype and weight.device == x.device
    return same and weight.shape == x.shape[-1:] and weight.is_contiguous() and aligned(weight)


def _launch(
    x: torch.Tensor,
    update: torch.Tensor | None,
    update_weight: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
) -> SumAndNorm:
    from sglang.kernels.ops.diffusion.triton.residual_rmsnorm_kernels import residual_rmsnorm_kernel

    out = torch.empty_like(x)
    total = x if update is None else torch.empty_like(x)
    given = (x, weight) if update is None else (update, update_weight)
    with torch.cuda.device(x.device):
        residual_rmsnorm_kernel[(x.numel() // x.shape[-1],)](
            x, *given, weight, total, out, eps, HAS_UPDATE=update is not None, num_warps=4,
            D=x.shape[-1],
        )  # fmt: skip
    return total, out


def _rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if not can_use_rmsnorm(x, weight):
        raise ValueError(_rejection("rmsnorm", x=x, weight=weight))
    return _launch(x, None, None, weight, eps)[1]


def _residual_rmsnorm(
    x: torch.Tensor,
    update: torch.Tensor,
    update_weight: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    if not can_use_residual_rmsnorm(x, update, update_weight, weight):
        raise ValueError(_rejection("residual_rmsnorm", x=x, update=update, weight=weight,
                                    update_weight=update_weight))  # fmt: skip
    return _launch(x, update, update_weight, weight, eps)


def _rmsnorm_fake(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.empty_like(x)


def _residual_rmsnorm_fake(
    x: torch.Tensor,
    update: torch.Tensor,
    update_weight: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


def _rejection(op: str, **tensors: torch.Tensor) -> str:
    return (
        f"fused_{op} got {describe(**tensors)}; expected CUDA tensors (sm_80 or newer) of one "
        f"dtype, bf16 or fp16: rows [..., D] of one shape, weights [D], D a multiple of {VECTOR} "
        f"up to {MAX_WIDTH}, contiguous, 16-byte aligned, no gradient; ask can_use_{op} first and "
        f"run {op}_reference where it says no"
    )


_plain_op = register_op("rmsnorm", _rmsnorm, _rmsnorm_fake)
_op = register_op("residual_rmsnorm", _residual_rmsnorm, _residual_rmsnorm_fake)


def fused_rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`rmsnorm_reference` in one kernel, bit-exact. Raises ValueError where `can_use_rmsnorm`
    says no."""
    return _plain_op(x, weight, eps)


def fused_residual_rmsnorm(
    x: torch.Tensor,
    update: torch.Tensor,
    update_weight: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
) -> SumAndNorm:
    """`residual_rmsnorm_reference` in one kernel, bit-exact: (total, out), both `[..., D]`.

    Raises ValueError where `can_use_residual_rmsnorm` says no.
    """
    return _op(x, update, update_weight, weight, eps)


def aot_signatures() -> list[tuple[Any, dict[str, str], dict[str, Any]]]:
    """(kernel, signature, constexprs) of GLM-Image's prior, to compile without a GPU."""
    from sglang.kernels.ops.diffusion.triton.residual_rmsnorm_kernels import residual_rmsnorm_kernel

    names = residual_rmsnorm_kernel.arg_names
    signature = {
        name: "constexpr" if name.isupper() else "fp32" if name == "eps" else "*bf16"
        for name in names
    }
    return [
        (residual_rmsnorm_kernel, signature, {"D": 4096, "HAS_UPDATE": given})
        for given in (False, True)
    ]
