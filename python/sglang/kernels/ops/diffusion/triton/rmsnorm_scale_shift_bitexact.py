"""RMSNorm and modulation of rows, optionally after a gated residual, in one kernel; bit-exact.

Equals, bit for bit, the eager bf16 chain of an adaLN block (rows scale, shift, gate of a batch
entry broadcast over its tokens):

    residual = residual + gate * update                             only in the second op
    out      = rmsnorm(residual, weight, eps) * (1 + scale) + shift

Numerical contract. bf16 boundaries, each to nearest even, are exactly eager's:
`residual = round(residual + round(gate * update))`, `y = round(x * rstd * w)`,
`out = round(round(y * round(1 + scale)) + shift)`. Between them all is fp32, one rounding an
operation, no FMA but the one named here. `x * rstd * w` is two multiplications, x * rstd first;
`rstd = rsqrt.approx(sum / H (div.rn) + eps)` with eps fp32 and FTZ off. The sum of squares follows
the norm that the site dispatches to; the two differ in about 3 output elements per million:

- `norm="flashinfer"`: `flashinfer.norm.rmsnorm` of the rows `[B * S, H]` (CuTe-DSL kernel).
  threads = 32 / 64 / 128 for H up to 3072 / 6144 / 16384; thread t owns the columns
  `8 * threads * b + 8 * t + v` and adds `round(v * v)` serially, v fastest; then a butterfly
  1, 2, 4, 8, 16 (neighbours first) in each warp and the same over the warp sums.
  Taken where H = 64 * threads: 2048, 4096 and 8192.
- `norm="aten"`: `F.rms_norm(x, (H,), weight, eps)`, CUDA. 128 threads; thread t owns vectors t,
  t + 128, ... of 4 and sums `s = fma(v, v, s)` serially; SHFL.DOWN 16, 8, 4, 2, 1 in each warp,
  then warps (0, 2), (1, 3), (0, 1). Taken where H is a multiple of 8 up to 8192.

(A square of bf16 is exact in fp32, so fma and multiply-then-add differ for subnormal squares only.
flashinfer adds 0.0 to the weight first, which only turns a weight of -0.0 into 0.0.)
Made after torch 2.11's `_fused_rms_norm` (CUDA 13) and flashinfer 0.7, on sm_90.
"""

from typing import Any

import torch
import torch.nn.functional as F

from sglang.kernels.ops.diffusion.triton.available import aligned, triton_runs_on
from sglang.kernels.ops.diffusion.triton.row_launch import RowLaunch
from sglang.kernels.registration import kernel_reads, register_op

NORMS = ("flashinfer", "aten")
FLASHINFER_THREADS = {2048: 32, 4096: 64, 8192: 128}  # hidden size: threads a row
ATEN_THREADS, MAX_HIDDEN = 128, 8192
VECTOR = 8  # elements of a 16-byte load
LAUNCH = RowLaunch(warps=4)
# of aten's norm without a residual: 19.6 us instead of 21.7 at (1, 4216, 4096) on an H200
LAUNCH_AHEAD = RowLaunch(warps=4, per_sm=4, ahead=True)
MAX_AHEAD = 4096  # two rows in registers
MAX_BATCH = 65535  # the grid's second axis


def rmsnorm_reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, norm: str = "flashinfer"
) -> torch.Tensor:
    """The eager norm over the last axis; `norm="flashinfer"` needs that package and a GPU."""
    if norm == "aten":
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    from flashinfer.norm import rmsnorm

    return rmsnorm(x.reshape(-1, x.shape[-1]), weight, eps).view(x.shape)


def rmsnorm_scale_shift_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
    norm: str = "flashinfer",
) -> torch.Tensor:
    """The eager chain: x `[B, S, H]`, weight `[H]`, scale and shift `[B, H]` or `[B, 1, H]`."""
    return rmsnorm_reference(x, weight, eps, norm) * (1 + _row(scale)) + _row(shift)


def scale_residual_rmsnorm_scale_shift_reference(
    residual: torch.Tensor,
    update: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
    norm: str = "flashinfer",
) -> tuple[torch.Tensor, torch.Tensor]:
    """The eager chain with a gated residual before it -> (out, new residual)."""
    residual = residual + _row(gate) * update
    return rmsnorm_scale_shift_reference(residual, weight, scale, shift, eps, norm), residual


def _row(row: torch.Tensor) -> torch.Tensor:
    return row[:, None, :] if row.dim() == 2 else row


def can_use_fused_rmsnorm_scale_shift(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    *,
    update: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    norm: str = "flashinfer",
) -> bool:
    """Whether the fused kernels take these inputs; x is the residual when update and gate come."""
    if not kernel_reads(x, weight, scale, shift, update, gate):
        return False
    if x.dim() != 3 or x.numel() == 0 or x.shape[0] > MAX_BATCH or not _hidden_fits(x, norm):
        return False
    full = [x] if update is None else [x, update]
    rows = [scale, shift] if gate is None else [scale, shift, gate]
    for tensor in (*full, *rows, weight):
        if tensor.dtype != torch.bfloat16 or tensor.device != x.device or not aligned(tensor):
            return False
    if any(tensor.shape != x.shape or not tensor.is_contiguous() for tensor in full):
        return False
    if weight.shape != x.shape[2:] or not weight.is_contiguous():
        return False
    if not all(_row_fits(row, x) for row in rows):
        return False
    return triton_runs_on(x.device)


def _hidden_fits(x: torch.Tensor, norm: str) -> bool:
    hidden = x.shape[2]
    if norm == "flashinfer":
        return hidden in FLASHINFER_THREADS
    return norm == "aten" and hidden % VECTOR == 0 and hidden <= MAX_HIDDEN


def _row_fits(row: torch.Tensor, x: torch.Tensor) -> bool:
    """`[B, H]` or `[B, 1, H]`, contiguous in H, batch entries a multiple of 16 bytes apart."""
    if row.shape not in ((x.shape[0], x.shape[2]), (x.shape[0], 1, x.shape[2])):
        return False
    return row.stride(-1) == 1 and (x.shape[0] == 1 or row.stride(0) % VECTOR == 0)


def launch(
    x: torch.Tensor,
    update: torch.Tensor | None,
    gate: torch.Tensor | None,
    weight: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
    norm: str,
    how: RowLaunch | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, new residual); without update and gate the second is `out` again and means nothing."""
    from sglang.kernels.ops.diffusion.triton.rmsnorm_scale_shift_kernels import (
        rmsnorm_scale_shift_kernel,
    )

    batch, tokens, hidden = x.shape
    how = how or _launch_of(hidden, norm, update is not None)
    out = torch.empty_like(x)
    residual_out = out if update is None else torch.empty_like(x)
    update, gate = (x, scale) if update is None else (update, gate)
    grid = (how.programs(tokens, batch, x.device), batch)
    with torch.cuda.device(x.device):
        rmsnorm_scale_shift_kernel[grid](
            x, update, gate, weight, scale, shift, out, residual_out,
            *(0 if batch == 1 else row.stride(0) // VECTOR for row in (gate, scale, shift)),
            tokens, eps, RESIDUAL=residual_out is not out, **_constants(hidden, norm, how),
        )  # fmt: skip
    return out, residual_out


def _launch_of(hidden: int, norm: str, residual: bool) -> RowLaunch:
    return LAUNCH_AHEAD if norm == "aten" and not residual and hidden <= MAX_AHEAD else LAUNCH


def _constants(hidden: int, norm: str, how: RowLaunch) -> dict[str, Any]:
    """Layout of the repeated kernel, and the launch's warps, as many as its threads at most."""
    aten = norm == "aten"
    threads = ATEN_THREADS if aten else FLASHINFER_THREADS[hidden]
    return {
        "ATEN": aten,
        "HIDDEN": hidden,
        "THREADS": threads,
        "VECTOR": 4 if aten else 8,
        "ROWS": how.rows,
        "AHEAD": how.ahead,
        "HOLD": how.hold,
        "num_warps": min(how.warps, threads // 32),
    }


def _rmsnorm_scale_shift(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
    norm: str,
) -> torch.Tensor:
    if not can_use_fused_rmsnorm_scale_shift(x, weight, scale, shift, norm=norm):
        raise ValueError(_rejection("fused_rmsnorm_scale_shift_bitexact", norm, x=x, weight=weight,
                                    scale=scale, shift=shift))  # fmt: skip
    return launch(x, None, None, weight, scale, shift, eps, norm)[0]


def _rmsnorm_scale_shift_fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
    norm: str,
) -> torch.Tensor:
    return x.new_empty(x.shape)


def _scale_residual_rmsnorm_scale_shift(
    residual: torch.Tensor,
    update: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
    norm: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    if not can_use_fused_rmsnorm_scale_shift(
        residual, weight, scale, shift, update=update, gate=gate, norm=norm
    ):
        raise ValueError(_rejection("fused_scale_residual_rmsnorm_scale_shift_bitexact", norm,
                                    residual=residual, update=update, gate=gate, weight=weight,
                                    scale=scale, shift=shift))  # fmt: skip
    return launch(residual, update, gate, weight, scale, shift, eps, norm)


def _scale_residual_rmsnorm_scale_shift_fake(
    residual: torch.Tensor,
    update: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
    norm: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    return residual.new_empty(residual.shape), residual.new_empty(residual.shape)


def _rejection(op: str, norm: str, **tensors: torch.Tensor) -> str:
    got = ", ".join(
        f"{name} {str(t.dtype)[6:]} {tuple(t.shape)} strides {t.stride()} on {t.device}"
        for name, t in tensors.items()
    )
    return (
        f"{op} got norm={norm!r}, {got}; expected CUDA (sm_80 or newer) bf16 without gradient: "
        f"contiguous [B, S, H] with H one of {sorted(FLASHINFER_THREADS)} for norm='flashinfer' or "
        f"a multiple of {VECTOR} up to {MAX_HIDDEN} for norm='aten', weight [H], rows [B, H] or "
        "[B, 1, H], all 16-byte aligned; ask can_use_fused_rmsnorm_scale_shift first and run the "
        "eager chain where it says no"
    )


_op = register_op("rmsnorm_scale_shift_bitexact", _rmsnorm_scale_shift, _rmsnorm_scale_shift_fake)
_residual_op = register_op(
    "scale_residual_rmsnorm_scale_shift_bitexact",
    _scale_residual_rmsnorm_scale_shift,
    _scale_residual_rmsnorm_scale_shift_fake,
)


def fused_rmsnorm_scale_shift_bitexact(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
    norm: str = "flashinfer",
) -> torch.Tensor:
    """`rmsnorm_scale_shift_reference` in one kernel, bit-exact.

    x `[B, S, H]` bf16, weight `[H]`, scale and shift `[B, H]` or `[B, 1, H]` -> `[B, S, H]`; `norm`
    is the eager norm to repeat, "flashinfer" or "aten". Raises ValueError where
    `can_use_fused_rmsnorm_scale_shift` says no.
    """
    return _op(x, weight, scale, shift, eps, norm)


def fused_scale_residual_rmsnorm_scale_shift_bitexact(
    residual: torch.Tensor,
    update: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
    norm: str = "flashinfer",
) -> tuple[torch.Tensor, torch.Tensor]:
    """`scale_residual_rmsnorm_scale_shift_reference` in one kernel -> (out, new residual).

    residual and update `[B, S, H]`, gate a row like scale and shift; the inputs are not changed.
    Raises ValueError where `can_use_fused_rmsnorm_scale_shift(..., update=, gate=)` says no.
    """
    return _residual_op(residual, update, gate, weight, scale, shift, eps, norm)


def aot_signatures() -> list[tuple[Any, dict[str, str], dict[str, Any], dict[str, int]]]:
    """(kernel, signature, constexprs, options) of both ops and norms, to compile without a GPU."""
    from sglang.kernels.ops.diffusion.triton.rmsnorm_scale_shift_kernels import (
        rmsnorm_scale_shift_kernel,
    )

    signature = {}
    for name in rmsnorm_scale_shift_kernel.arg_names:
        kind = "*bf16" if name.endswith("_ptr") else "fp32" if name == "eps" else "i32"
        signature[name] = "constexpr" if name.isupper() else kind
    cases = [(norm, residual) for norm in NORMS for residual in (False, True)]
    layouts = [
        (_constants(4096, norm, _launch_of(4096, norm, residual)), residual)
        for norm, residual in cases
    ]
    return [
        (
            rmsnorm_scale_shift_kernel,
            signature,
            {"RESIDUAL": residual} | {k: v for k, v in layout.items() if k.isupper()},
            {"num_warps": layout["num_warps"]},
        )
        for layout, residual in layouts
    ]
