"""Projection and tanh-GELU as one site: the GELU in the GEMM, where that is bit-exact."""

import torch
import torch.nn.functional as F
from torch import nn

from sglang.kernels.ops.diffusion.bitexact_gate import BitExactFusionGate
from sglang.kernels.ops.diffusion.fused_linear_gelu import (
    can_fuse_linear_gelu,
    forward_reject_reason,
    fused_gelu_active,
    fused_linear_gelu_tanh,
)
from sglang.kernels.ops.diffusion.linear_gelu_bitexact import (
    can_use_linear_gelu_bitexact,
    linear_gelu_bitexact_cuda,
    linear_gelu_bitexact_reference,
)
from sglang.kernels.ops.diffusion.persistent_gemm import DTYPES, is_hopper
from sglang.multimodal_gen.runtime.layers.fused_site import run_site, takes


def linear_gelu(
    gate: BitExactFusionGate, site: nn.Module, linear: nn.Module, x: torch.Tensor
) -> torch.Tensor:
    """gelu(linear(x)). x [..., K] -> [..., N].

    In the bit-exact GEMM where it is worth it; else, under a mounted `quality="high"`, in that of
    cuBLASLt, which at many rows is no faster; else one after the other.
    """
    if takes_linear_gelu(gate, linear, x):
        return fused_linear_gelu(gate, linear, x)
    if fused_gelu_active(site) and can_fuse_linear_gelu(linear, x):
        return fused_linear_gelu_tanh(x, linear.weight, linear.bias)

    def eager(x: torch.Tensor) -> torch.Tensor:
        return F.gelu(linear(x), approximate="tanh")

    return eager(x) if _only_size_decides(x) else run_site(gate, None, eager, x)


def _only_size_decides(x: torch.Tensor) -> bool:
    """Whether there is a kernel for such tensors here: too few rows for it are no fallback."""
    return x.is_cuda and x.dtype in DTYPES and is_hopper(x.get_device())


def takes_linear_gelu(
    gate: BitExactFusionGate, linear: nn.Module, x: torch.Tensor, *attn: torch.Tensor
) -> bool:
    """Whether the kernel is worth it here and was not found wrong.

    The gate counts where it was; few rows, which eager does as fast, are no fallback.
    """
    if forward_reject_reason(linear) is not None or linear.bias is None:
        return False
    usable = takes(can_use_linear_gelu_bitexact, x, linear.weight, linear.bias, *attn)
    if usable and gate.disabled:
        gate.note_eager("turned off")  # a reason that the gate has stays
    return usable and not gate.disabled


def fused_linear_gelu(
    gate: BitExactFusionGate, linear: nn.Linear, x: torch.Tensor, *attn: torch.Tensor
) -> torch.Tensor:
    """`cat([attn, gelu(linear(x))], 2)`, or without attn the GELU alone; `takes_linear_gelu` said
    yes. x [B, S, K], attn [B, S, D] -> [B, S, D + N]."""
    args = (x, linear.weight, linear.bias, *attn)
    return run_site(gate, linear_gelu_bitexact_cuda, linear_gelu_bitexact_reference, *args)
