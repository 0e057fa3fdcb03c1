"""The gated residual sum, LayerNorm and modulate as one site, or as the two that it is made of."""

from collections.abc import Callable

import torch

from sglang.kernels.ops.diffusion.bitexact_gate import BitExactFusionGate
from sglang.kernels.ops.diffusion.triton.gated_layernorm_modulate import (
    can_use_fused_gated_layernorm_modulate,
    fused_gated_layernorm_modulate,
    gated_layernorm_modulate_reference,
)
from sglang.multimodal_gen.runtime.layers.fused_site import run_site, takes
from sglang.multimodal_gen.runtime.layers.stream import Stream

Site = Callable[..., torch.Tensor]


def gated_ln_modulate(
    site: BitExactFusionGate,
    add: Site,
    norm: Site,
    tokens: Stream,
    scale: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x = x + gate * update, then LayerNorm and modulate of it -> (normed, x).

    x and update [B, L, D]; gate, scale and shift [B, D]. Where the one kernel does not run, the
    model's sites of its halves do: `add` (x, update, gate [B, 1, D]) and `norm` (x, scale, shift).
    """
    args = (*tokens, scale, shift)
    usable = takes(can_use_fused_gated_layernorm_modulate, *args)
    if usable and not site.disabled:
        fused, reference = fused_gated_layernorm_modulate, gated_layernorm_modulate_reference
        return run_site(site, fused, reference, *args, eps)

    def in_two_sites(*_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = add(tokens.x, tokens.update, tokens.gate[:, None])
        return norm(x, scale, shift), x

    return run_site(site, None, in_two_sites, *args)
