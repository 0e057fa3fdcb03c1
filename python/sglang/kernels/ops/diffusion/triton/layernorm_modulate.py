"""LayerNorm without affine, alone per head of q and k, or followed by the adaLN modulation.

Equals, bit for bit, the eager chains (16-bit tensors, no weight, no bias):

    fused_layernorm_modulate  F.layer_norm(x, (D,), eps=eps) * (1 + scale[:, None]) + shift[:, None]
    fused_qk_head_layernorm   F.layer_norm(q, (head_dim,), eps=eps), and the same of k

Numerical contract: aten's `vectorized_layer_norm_kernel` as the sm_90 code of torch 2.11 has it
(fp32 on widened inputs, subnormals kept, one rounding an operation, `fma` where it says so):
- A row is D/4 vectors of four. Thread t of 128 takes vectors t, t + 128, ... and runs over their
  elements serially, from mean = m2 = 0: `delta = x - mean; mean' = fma(delta, 1/n, mean);
  m2' = fma(delta, x - mean', m2)` with n = 1, 2, ... and 1/n rounded to nearest.
- Merging a thread's (mean, m2, count) with another's, o: `r = 1/(count + count_o)`,
  `w = count * r`, `w_o = count_o * r`, `mean' = fma(mean_o, w_o, mean * w)`,
  `m2' = fma(count_o * (mean - mean_o)^2, w, m2_o + m2)`; two empty threads give zeros.
- The merges: lane i of each warp of 32 with lane i + 16, then 8, 4, 2, 1; then warps 0 and 2, 1 and
  3; then warps 0 and 1. Threads without vectors enter with count 0.
- `rstd = rsqrt.approx(m2 / D (div.rn) + eps)`, eps rounded to fp32; subnormal sums are rescaled.
- `y = round(rstd * (x - mean))`, without FMA; then `round(round(y * round(1 + scale)) + shift)`.
All roundings are to nearest even, `round` being the one to the dtype of x. 16-bit arithmetic stands
in for fp32 only where it provably gives the same bits (see `ptx.modulate`).

Aten takes that kernel for D % 4 == 0, D <= 2^24 and 8-byte aligned data; the predicates accept
nothing else, and nothing of 2^32 elements or more, where its 32-bit row offsets wrap.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F

from sglang.kernels.ops.diffusion.triton.available import aligned, triton_runs_on
from sglang.kernels.ops.diffusion.triton.head_streams import new_heads
from sglang.kernels.ops.diffusion.triton.qk_rotate_half import aot_signature, halves_fit, launch
from sglang.kernels.ops.diffusion.triton.row_launch import RowLaunch
from sglang.kernels.registration import kernel_reads, register_op

VECTOR = 4  # elements that an aten thread loads at a time
CHUNK = 512  # elements that aten's 128 threads load at a time
MAX_HIDDEN = 8192  # a row is held in the registers of 128 threads
MAX_HEAD_DIM = 128  # one vector a lane: more would enter aten's later warps
MAX_ELEMENTS = 2**32
MIN_HEAD_ELEMENTS = 8192  # of q: the least that was measured to gain (1.08x at 8880, 0.84x at 8)
MAX_BATCH = 65535  # the grid's second axis
LAUNCH = RowLaunch(per_sm=5, ahead=True, hold=True)
LAUNCH_WIDE = RowLaunch()  # above MAX_AHEAD two rows and their factors do not fit in registers
MAX_AHEAD = 4096
MODULATE_POINTERS, MODULATE_COUNTS = 7, 8  # arguments of `layernorm_modulate_kernel`
QK_ROWS = 64  # heads a program
QK_WARPS = 8
DTYPES = (torch.bfloat16, torch.float16)
QK = tuple[torch.Tensor, torch.Tensor]


def layernorm_modulate_reference(
    x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, eps: float
) -> torch.Tensor:
    """The eager chain: x `[B, S, D]`, scale and shift `[B, D]` -> `[B, S, D]`."""
    y = F.layer_norm(x, x.shape[-1:], None, None, eps)
    return y * (1 + scale[:, None]) + shift[:, None]


def qk_head_layernorm_reference(q: torch.Tensor, k: torch.Tensor, eps: float) -> QK:
    """The eager chain: q, k `[B, S, H, head_dim]` -> the same shapes."""
    shape = q.shape[-1:]
    return F.layer_norm(q, shape, None, None, eps), F.layer_norm(k, shape, None, None, eps)


def can_use_fused_layernorm_modulate(
    x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor
) -> bool:
    """Whether the fused kernel takes these inputs; otherwise run the eager chain."""
    return kernel_reads(x, scale, shift) and takes_rows(x, scale, shift)


def takes_rows(x: torch.Tensor, *rows: torch.Tensor) -> bool:
    """Whether the kernel takes x `[B, S, D]` with rows `[B, D]`, all dense and without gradient."""
    if not _is_accepted(x, dim=3) or x.shape[2] > MAX_HIDDEN or x.shape[0] > MAX_BATCH:
        return False
    batch, _, hidden = x.shape
    return all(
        row.shape == (batch, hidden)
        and row.dtype == x.dtype
        and row.device == x.device
        and _loads_in_vectors(row)
        for row in rows
    )


def can_use_fused_qk_head_layernorm(q: torch.Tensor, k: torch.Tensor) -> bool:
    """Whether the fused kernel takes these inputs; otherwise run the eager chain."""
    if not kernel_reads(q, k) or not _is_accepted(q, dim=4) or not _is_accepted(k, dim=4):
        return False
    if q.shape != k.shape or q.dtype != k.dtype or q.device != k.device:
        return False
    if q.numel() < MIN_HEAD_ELEMENTS:
        return False
    return q.shape[3] <= MAX_HEAD_DIM and _has_one_token_axis(q) and _has_one_token_axis(k)


def _is_accepted(x: torch.Tensor, dim: int) -> bool:
    """A tensor of rows that aten's vectorised kernel takes, and this one can load."""
    if x.dtype not in DTYPES or x.dim() != dim or x.shape[-1] % VECTOR != 0:
        return False
    return 0 < x.numel() < MAX_ELEMENTS and _loads_in_vectors(x) and triton_runs_on(x.device)


def _loads_in_vectors(x: torch.Tensor) -> bool:
    return x.stride(-1) == 1 and aligned(x) and all(s % VECTOR == 0 for s in _strides(x))


def _has_one_token_axis(x: torch.Tensor) -> bool:
    """The batch and token axes of `[B, S, H, head_dim]` are walked with one stride."""
    batch_stride, token_stride, _ = _strides(x)
    return x.shape[0] == 1 or x.shape[1] == 1 or batch_stride == x.shape[1] * token_stride


def _strides(x: torch.Tensor) -> tuple[int, ...]:
    """Strides of all axes but the last, in elements; 0 where the axis has one entry."""
    return tuple(0 if x.shape[d] == 1 else x.stride(d) for d in range(x.dim() - 1))


def _token_stride(x: torch.Tensor) -> int:
    batch_stride, token_stride, _ = _strides(x)
    return batch_stride if x.shape[1] == 1 else token_stride


def launch_of(hidden: int) -> RowLaunch:
    """The launch for rows of `hidden` values."""
    return LAUNCH if hidden <= MAX_AHEAD else LAUNCH_WIDE


def modulate_options(
    hidden: int, how: RowLaunch, folded: bool = False, gated: bool = False
) -> dict[str, Any]:
    """The constants of `layernorm_modulate_kernel`."""
    return {
        "HIDDEN": hidden,
        "ROWS": how.rows,
        "EVEN": hidden % CHUNK == 0,
        "AHEAD": how.ahead,
        "HOLD": how.hold,
        "FOLDED": folded,
        "GATED": gated,
    }


def _qk_options(heads: int, head_dim: int) -> dict[str, Any]:
    return {"HEADS": heads, "HEAD_DIM": head_dim, "ROWS": QK_ROWS}


@functools.cache
def _modulate_kernel(
    device: int, dtype: torch.dtype, hidden: int, how: RowLaunch, folded: bool, gated: bool
) -> Any:
    """The kernel compiled for the current device; launching it skips Triton's argument analysis."""
    from sglang.kernels.ops.diffusion.triton.layernorm_modulate_kernels import (
        layernorm_modulate_kernel,
    )

    options = modulate_options(hidden, how, folded, gated) | {"num_warps": how.warps}
    arguments = (*[dtype] * MODULATE_POINTERS, *[VECTOR] * MODULATE_COUNTS, 1e-6)
    return layernorm_modulate_kernel.warmup(*arguments, **options, grid=(1,))


@functools.cache
def _qk_kernel(device: int, dtype: torch.dtype, heads: int, head_dim: int) -> Any:
    from sglang.kernels.ops.diffusion.triton.layernorm_modulate_kernels import (
        qk_head_layernorm_kernel,
    )

    options = _qk_options(heads, head_dim)
    arguments = (*[dtype] * 4, *[VECTOR] * 5, 1e-6)
    return qk_head_layernorm_kernel.warmup(*arguments, **options, num_warps=QK_WARPS, grid=(1,))


def _layernorm_modulate(
    x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, eps: float
) -> torch.Tensor:
    if not can_use_fused_layernorm_modulate(x, scale, shift):
        raise ValueError(
            f"fused_layernorm_modulate got x {_describe(x)}, scale {_describe(scale)}, shift "
            f"{_describe(shift)}; it takes CUDA tensors of one 16-bit dtype, x [B, S, D] with "
            f"D % {VECTOR} == 0 and D <= {MAX_HIDDEN}, scale and shift [B, D], 16-byte aligned, "
            "last axis dense; test with can_use_fused_layernorm_modulate and run "
            "layernorm_modulate_reference otherwise"
        )
    return launch_modulate(x, scale, shift, eps, launch_of(x.shape[2]))


def launch_modulate(
    x: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
    how: RowLaunch,
    folded: bool = False,
) -> torch.Tensor:
    """The kernel, on inputs that the predicate took; `folded` as in `fused_ln_modulate`."""
    return launch_rows(x, None, None, scale, shift, eps, how, folded)[0]


def launch_rows(
    x: torch.Tensor,
    update: torch.Tensor | None,
    gate: torch.Tensor | None,
    scale: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
    how: RowLaunch,
    folded: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(out, x + gate * update); without update and gate the second is None."""
    batch, sequence, hidden = x.shape
    gated = update is not None and gate is not None
    out = x.new_empty(x.shape)
    residual_out = x.new_empty(x.shape) if gated else None
    strides = (
        *_strides(x), *((*_strides(update), *_strides(gate)) if gated else (0, 0, 0)),
        *_strides(scale), *_strides(shift),
    )  # fmt: skip
    with torch.cuda.device(x.device):
        kernel = _modulate_kernel(x.device.index, x.dtype, hidden, how, folded, gated)
        kernel[(how.programs(sequence, batch, x.device), batch, 1)](
            x, update, gate, scale, shift, out, residual_out,
            sequence, *(s // VECTOR for s in strides), eps,
            *modulate_options(hidden, how, folded, gated).values(),
        )  # fmt: skip
    return out, residual_out


def _qk_head_layernorm(q: torch.Tensor, k: torch.Tensor, eps: float) -> QK:
    if not can_use_fused_qk_head_layernorm(q, k):
        raise ValueError(
            f"fused_qk_head_layernorm got q {_describe(q)}, k {_describe(k)}; it takes CUDA "
            f"tensors [B, S, H, head_dim] of one shape and 16-bit dtype, {MIN_HEAD_ELEMENTS} "
            f"elements at least, head_dim % {VECTOR} == 0 and <= {MAX_HEAD_DIM}, 16-byte aligned, "
            "last axis dense, batch and token axes mergeable; test with "
            "can_use_fused_qk_head_layernorm and run qk_head_layernorm_reference otherwise"
        )
    if halves_fit(q, k):
        return launch(q, k, None, None, 0, eps)  # the fewest merges and shuffles
    batch, sequence, heads, head_dim = q.shape
    out_q, out_k = q.new_empty(q.shape), k.new_empty(k.shape)
    rows = batch * sequence * heads
    strides = (_token_stride(q), _strides(q)[2], _token_stride(k), _strides(k)[2])
    with torch.cuda.device(q.device):
        kernel = _qk_kernel(q.device.index, q.dtype, heads, head_dim)
        kernel[(-(-rows // QK_ROWS), 2, 1)](
            q, k, out_q, out_k, rows, *(s // VECTOR for s in strides), eps,
            *_qk_options(heads, head_dim).values(),
        )  # fmt: skip
    return out_q, out_k


def _describe(x: torch.Tensor) -> str:
    return f"{tuple(x.shape)} strides {x.stride()} {x.dtype} on {x.device}"


def _layernorm_modulate_fake(
    x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, eps: float
) -> torch.Tensor:
    return x.new_empty(x.shape)


_layernorm_modulate_op = register_op(
    "fused_layernorm_modulate", _layernorm_modulate, _layernorm_modulate_fake
)
_qk_head_layernorm_op = register_op("fused_qk_head_layernorm", _qk_head_layernorm, new_heads)


def fused_layernorm_modulate(
    x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, eps: float
) -> torch.Tensor:
    """`layernorm_modulate_reference` in one kernel, bit for bit.

    x `[B, S, D]` (batch and sequence strides free), scale and shift `[B, D]` (chunk views welcome),
    one 16-bit dtype -> a new contiguous `[B, S, D]`. ValueError where the predicate says no.
    """
    return _layernorm_modulate_op(x, scale, shift, eps)


def fused_qk_head_layernorm(q: torch.Tensor, k: torch.Tensor, eps: float) -> QK:
    """`qk_head_layernorm_reference` in one kernel, bit for bit.

    q, k `[B, S, H, head_dim]`, views of a packed projection welcome -> new contiguous tensors of
    the same shape. ValueError where the predicate says no.
    """
    return _qk_head_layernorm_op(q, k, eps)


def aot_signatures() -> list[tuple[Any, dict[str, str], dict[str, Any], dict[str, int]]]:
    """(kernel, signature, constants, options) of the shapes that the models use, and odd ones."""
    from sglang.kernels.ops.diffusion.triton import layernorm_modulate_kernels as kernels

    modulate = [
        aot_of_rows(pointer, modulate_options(hidden, launch_of(hidden), folded),
                    launch_of(hidden).warps)
        for pointer, hidden, folded in [
            ("*bf16", 3072, False), ("*bf16", 4096, False), ("*bf16", 8192, False),
            ("*fp16", 64, False), ("*bf16", 3072, True),
        ]
    ]  # fmt: skip
    qk = [
        _aot(kernels.qk_head_layernorm_kernel, pointer, (4, 5), _qk_options(heads, head_dim),
             QK_WARPS)
        for pointer, heads, head_dim in [("*bf16", 32, 128), ("*fp16", 3, 40)]
    ]  # fmt: skip
    return modulate + qk + [aot_signature("*bf16", None, False, 32, 128)]


def aot_of_rows(
    pointer: str, constants: dict[str, Any], num_warps: int
) -> tuple[Any, dict[str, str], dict[str, Any], dict[str, int]]:
    """An entry of `aot_signatures` for `layernorm_modulate_kernel`."""
    from sglang.kernels.ops.diffusion.triton import layernorm_modulate_kernels as kernels

    counts = MODULATE_POINTERS, MODULATE_COUNTS
    return _aot(kernels.layernorm_modulate_kernel, pointer, counts, constants, num_warps)


def _aot(
    kernel: Any, pointer: str, counts: tuple[int, int], constants: dict[str, Any], num_warps: int
) -> tuple[Any, dict[str, str], dict[str, Any], dict[str, int]]:
    pointers, integers = counts
    types = [*[pointer] * pointers, *["i64"] * integers, "fp32", *["constexpr"] * len(constants)]
    signature = dict(zip(kernel.arg_names, types, strict=True))
    return kernel, signature, constants, {"num_warps": num_warps}
