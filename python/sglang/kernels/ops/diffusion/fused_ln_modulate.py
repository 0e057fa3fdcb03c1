"""``layer_norm(x) * (1 + scale) + shift`` with the rows folded into the affine: high tier only.

Contract: ``out = round(((x - mean) * rstd) * round(1 + scale) + shift)``, round(.) to storage.
    x             [1, S, D]; float16 or bfloat16
    scale, shift  [1, D] or [1, 1, D], of x's dtype (chunk views of a [1, 6 D] projection too)
    eps           a Python float, added to the float32 variance
    out           [1, S, D] contiguous
Arithmetic: aten's LayerNorm with weight ``1 + scale`` and bias ``shift``, bit for bit: all in
float32, its multiply-add contracted, rounded once at the end; `round(1 + scale)` keeps eager's
rounding of that row. Where Triton runs this is one kernel, that of `fused_layernorm_modulate` with
its roundings left out; elsewhere it is aten's own, from MIN_ROWS rows on.
Eager rounds the normalized value and the product as well, so the two differ by up to
``2 u (|y| + |n (1 + scale)|)`` (u: unit roundoff, n: the normalized value, y: the output): about
0.05 at FLUX shapes in bfloat16.
B is 1 because an affine LayerNorm has one weight row for all samples.
Approximates: `fused_ln_modulate_reference`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sglang.kernels.ops.diffusion.quality_gate import QualityGatedFusion
from sglang.kernels.ops.diffusion.triton.layernorm_modulate import (
    can_use_fused_layernorm_modulate,
    launch_modulate,
    launch_of,
)
from sglang.kernels.registration import describe, kernel_reads, register_op

DTYPES = (torch.bfloat16, torch.float16)
MIN_ROWS = 1024  # of aten's fold. H200, D 3072: 1.19x eager's speed at 1024 rows, 0.94x at 512

FUSED_LN_MODULATE = QualityGatedFusion(
    name="fused LN+modulate",
    marker_attr="_fused_ln_modulate_site",
    enabled_attr="_fused_ln_modulate_enabled",
    mount_message="Mounted fused LN+modulate (affine folding) for quality=high",
)


def fused_ln_modulate_reference(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    """The eager expression: a plain LayerNorm, then the modulate chain; four roundings."""
    width = x.shape[-1]
    normalized = F.layer_norm(x, (width,), eps=eps)
    return normalized * (1 + scale.reshape(-1, 1, width)) + shift.reshape(-1, 1, width)


def can_fuse_ln_modulate(x: Tensor, scale: Tensor, shift: Tensor) -> bool:
    """Whether the fold takes these tensors: one sample, half dtype, one GPU, rows of x's width."""
    if not kernel_reads(x, scale, shift):
        return False
    if x.dtype not in DTYPES or not x.is_cuda or x.dim() != 3:
        return False
    if x.shape[0] != 1 or not x.numel() or not x.is_contiguous():
        return False
    for row in (scale, shift):
        if row.dtype != x.dtype or row.device != x.device or not _is_row(row, x.shape[-1]):
            return False
    return x.shape[1] >= MIN_ROWS or _fits_one_kernel(x, scale, shift)


def _fits_one_kernel(x: Tensor, scale: Tensor, shift: Tensor) -> bool:
    rows = (row.view(1, -1) for row in (scale, shift))
    return can_use_fused_layernorm_modulate(x, *rows)


def _is_row(row: Tensor, width: int) -> bool:
    return row.dim() > 0 and row.shape[-1] == width == row.numel() and row.stride(-1) == 1


def _fused_ln_modulate(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    if not can_fuse_ln_modulate(x, scale, shift):
        raise ValueError(
            f"fused_ln_modulate got {describe(x=x, scale=scale, shift=shift)}; expected CUDA "
            f"tensors of one half dtype, x [1, S, D] contiguous, scale and shift one row of D "
            f"adjoining values, no gradient, and S >= {MIN_ROWS} where Triton does not take them. "
            "Ask can_fuse_ln_modulate first and run the LayerNorm and the modulate apart instead."
        )
    width = x.shape[-1]
    if _fits_one_kernel(x, scale, shift):
        rows = (scale.view(1, width), shift.view(1, width))
        return launch_modulate(x, *rows, eps, launch_of(width), folded=True)
    return F.layer_norm(x, (width,), 1 + scale.view(width), shift.view(width), eps)


def _fake(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_op = register_op("fused_ln_modulate", _fused_ln_modulate, fake=_fake)


def fused_ln_modulate(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    """``layer_norm(x) * (1 + scale) + shift``: x [1, S, D], rows [1, D] -> [1, S, D].

    Raises ValueError on what `can_fuse_ln_modulate` rejects; there is no quiet eager fallback.
    """
    return _op(x, scale, shift, eps)


def mark_fused_ln_modulate_site(module: nn.Module) -> None:
    """Make `module` a site: one that normalizes and modulates in its forward."""
    FUSED_LN_MODULATE.mark(module)


def mount_fused_ln_modulate(root: nn.Module) -> bool:
    """Enable every site of `root`, or none; `FUSED_LN_MODULATE.last_reject` says why none.

    The parameters of a site, or of `root` for a site without, must not all be off the GPU or
    in other dtypes than the half ones.
    """

    def reject_reason(site: nn.Module, metadata: Mapping[str, Any]) -> str | None:
        has_parameters = next(site.parameters(), None) is not None
        return _parameters_reject_reason(site if has_parameters else root)

    return FUSED_LN_MODULATE.mount(root, reject_reason)


def unmount_fused_ln_modulate(root: nn.Module) -> None:
    """Disable every site of `root`."""
    FUSED_LN_MODULATE.unmount(root)


def fused_ln_modulate_active(module: nn.Module) -> bool:
    """Whether the site is mounted now; False under torch.compile, where every site steps aside."""
    return not torch.compiler.is_compiling() and FUSED_LN_MODULATE.is_enabled(module)


def _parameters_reject_reason(module: nn.Module) -> str | None:
    """Parameters tell where activations will be, and in which dtype; none tells nothing.

    Sites without parameters ask for their root's, once each and at every mount: the first that
    fits ends the walk.
    """
    if any(p.is_cuda and p.dtype in DTYPES for p in module.parameters()):
        return None
    if next(module.parameters(), None) is None:
        return None
    return f"{type(module).__name__} has no float16 or bfloat16 parameter on a GPU"
