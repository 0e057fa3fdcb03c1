"""``gelu_tanh(x @ weight.T + bias)`` with the GELU in the GEMM's epilogue: high tier only.

Contract: ``out = round(gelu_tanh(x @ weight.T + bias))``, round(.) to the storage dtype.
    x       [..., K] contiguous, 8192 rows at most; float16 or bfloat16
    weight  [N, K], bias [N], contiguous, of x's dtype; K and N multiples of 8
    out     [..., N] contiguous
Arithmetic: cuBLASLt accumulates, adds the bias and applies the tanh GELU in float32, then rounds
once. Eager rounds the pre-activation to storage first, so the two differ by up to about
``2.13 u |z|`` more than one rounding (u: unit roundoff, z: pre-activation). The reduction order
is cuBLASLt's choice for the shape; the same call gives the same bits. No gradient for weight and
bias; an x that wants one is rejected.
Approximates: `fused_linear_gelu_reference`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sglang.kernels.ops.diffusion.quality_gate import QualityGatedFusion
from sglang.kernels.registration import describe, is_plain, kernel_reads, register_op

DTYPES = (torch.bfloat16, torch.float16)
ALIGNMENT_BYTES = 16
MAX_ROWS = 8192  # H200, K 3072, N 12288: 1.09x at 4608 rows, but 0.999x at 16896

FUSED_LINEAR_GELU = QualityGatedFusion(
    name="fused linear+GELU",
    marker_attr="_fused_gelu_site",
    enabled_attr="_fused_gelu_enabled",
    mount_message="Mounted fused linear+GELU (cublasLt epilogue) for quality=high",
)


def fused_linear_gelu_reference(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The eager expression: a GEMM with bias, then the tanh GELU; two roundings."""
    return F.gelu(F.linear(x, weight, bias), approximate="tanh")


def can_fuse_linear_gelu_static(linear: nn.Module) -> bool:
    """Whether the layer, whatever its input, can run fused: a plain, resident half-dtype linear."""
    return _layer_reject_reason(linear) is None


def can_fuse_linear_gelu(linear: nn.Module, x: Tensor) -> bool:
    """Whether the layer can run fused on this input."""
    if not can_fuse_linear_gelu_static(linear):
        return False
    return _input_reject_reason(x, linear.weight, linear.bias) is None


def forward_reject_reason(linear: nn.Module) -> str | None:
    """Why the layer does more than multiply its weight, so that no op may stand for it; or None."""
    if type(linear) is not nn.Linear:
        return f"{type(linear).__name__} is not a plain nn.Linear"
    if linear._forward_pre_hooks or linear._forward_hooks or "forward" in linear.__dict__:
        return "its forward is hooked (offloaded or patched), which the fused path would skip"
    return None


def _layer_reject_reason(linear: nn.Module) -> str | None:
    reason = forward_reject_reason(linear)
    if reason is not None:
        return reason
    if linear.bias is None:
        return "it has no bias"
    return _weights_reject_reason(linear.weight, linear.bias)


def _weights_reject_reason(weight: Tensor, bias: Tensor) -> str | None:
    if not is_plain(weight, bias):
        kinds = f"a {type(weight).__name__} and its bias a {type(bias).__name__}"
        return f"its weight is {kinds}, not both plain dense tensors (quantized?)"
    if weight.dtype not in DTYPES or bias.dtype != weight.dtype:
        return f"its weight is {weight.dtype} and its bias {bias.dtype}, not one half dtype"
    if not weight.is_cuda or bias.device != weight.device:
        return f"its weight is on {weight.device} and its bias on {bias.device}, not on one GPU"
    if weight.dim() != 2 or bias.shape != weight.shape[:1]:
        return f"its weight has shape {tuple(weight.shape)} and its bias {tuple(bias.shape)}"
    if weight.shape[0] % 8 or weight.shape[1] % 8 or not weight.numel():
        return f"its sizes {tuple(weight.shape)} are not multiples of 8"
    if not weight.is_contiguous() or not bias.is_contiguous():
        return "its weight or bias is not contiguous"
    if (weight.data_ptr() | bias.data_ptr()) % ALIGNMENT_BYTES:
        return f"its weight or bias is not aligned to {ALIGNMENT_BYTES} bytes"
    return None


def _input_reject_reason(x: Tensor, weight: Tensor, bias: Tensor) -> str | None:
    if not kernel_reads(x):
        return "x wants a gradient, or is no plain tensor"
    if x.dtype != weight.dtype or x.device != weight.device:
        return "x is not of the weight's dtype and device"
    if x.dim() < 2 or x.shape[-1] != weight.shape[1] or not x.numel():
        return f"x is not [..., rows > 0, {weight.shape[1]}]"
    if x.numel() > MAX_ROWS * x.shape[-1]:
        return f"x has {x.numel() // x.shape[-1]} rows, more than the {MAX_ROWS} where it is faster"
    if not x.is_contiguous() or x.data_ptr() % ALIGNMENT_BYTES:
        return f"x is not contiguous and aligned to {ALIGNMENT_BYTES} bytes"
    return None


def _fused_linear_gelu_tanh(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    reason = _weights_reject_reason(weight, bias) or _input_reject_reason(x, weight, bias)
    if reason is not None:
        raise ValueError(
            f"fused_linear_gelu_tanh got {describe(x=x, weight=weight, bias=bias)}: {reason}. "
            "Ask can_fuse_linear_gelu first and run F.gelu(linear(x), approximate='tanh') instead."
        )
    rows = x.view(-1, x.shape[-1])
    out = torch.ops.aten._addmm_activation(bias, rows, weight.t(), use_gelu=True)
    return out.view(*x.shape[:-1], weight.shape[0])


def _fake(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


_op = register_op("fused_linear_gelu_tanh", _fused_linear_gelu_tanh, fake=_fake)


def fused_linear_gelu_tanh(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``gelu_tanh(x @ weight.T + bias)``: x [..., K], weight [N, K], bias [N] -> [..., N].

    Raises ValueError on what `can_fuse_linear_gelu` rejects; there is no quiet eager fallback.
    """
    return _op(x, weight, bias)


def mark_fused_gelu_site(module: nn.Module, linear_name: str) -> None:
    """Make `module` a site; its linear is the submodule at `linear_name`, e.g. "proj"."""
    module.get_submodule(linear_name)  # raises AttributeError now rather than at the mount
    FUSED_LINEAR_GELU.mark(module, linear_name=linear_name)


def mount_fused_linear_gelu(root: nn.Module) -> bool:
    """Enable every site of `root`, or none; `FUSED_LINEAR_GELU.last_reject` says why none."""
    return FUSED_LINEAR_GELU.mount(root, _site_reject_reason)


def unmount_fused_linear_gelu(root: nn.Module) -> None:
    """Disable every site of `root`."""
    FUSED_LINEAR_GELU.unmount(root)


def fused_gelu_active(module: nn.Module) -> bool:
    """Whether the site is mounted now; False under torch.compile, where every site steps aside."""
    return not torch.compiler.is_compiling() and FUSED_LINEAR_GELU.is_enabled(module)


def _site_reject_reason(site: nn.Module, metadata: Mapping[str, Any]) -> str | None:
    reason = _layer_reject_reason(site.get_submodule(metadata["linear_name"]))
    return reason and f"{metadata['linear_name']}: {reason}"
