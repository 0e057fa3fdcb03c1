"""The text model of GLM-Image's prior over a static cache: its layers for a prompt and for a token.

A token's step exists twice. `plain_step` is aten operations and runs anywhere. `fused_step` is six
kinds of kernel, 8 launches a layer: norms, rotation and activation give the bits of the plain
step, the products with the weights and the attention are defined by their kernels. So one device
and dtype use one of the two throughout, with fast paths on and off; `unfused_reason` decides.

Shape legend: D hidden, K key heads, Q query heads, E head size, L cache slots, S prompt tokens.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from sglang.kernels.ops.diffusion.triton.decode_attention import (
    can_use_decode_attention,
    decode_attention,
    rotate_reference,
)
from sglang.kernels.ops.diffusion.triton.gemv import (
    can_use_gemv,
    can_use_gemv_qkv,
    can_use_gemv_swiglu,
    gemv,
    gemv_qkv,
    gemv_swiglu,
)
from sglang.kernels.ops.diffusion.triton.residual_rmsnorm import (
    can_use_residual_rmsnorm,
    fused_residual_rmsnorm,
    fused_rmsnorm,
    rmsnorm_reference,
)

Rope = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # cos, sin [S, E] and partner [E]


@dataclass
class TokenCache:
    """What a token's step reads, and the cache that it extends, at fixed addresses."""

    keys: torch.Tensor  # [layers, 1, K, L, E]; slots not written yet are 0 and masked
    values: torch.Tensor
    cos: torch.Tensor  # [T + N, E], 1 where a channel does not turn
    sin: torch.Tensor  # [T + N, E], signed, 0 where a channel does not turn
    partner: torch.Tensor  # int64 [E], the channel that each is rotated with
    columns: torch.Tensor  # int64 [L]: 0, 1, ...
    token: torch.Tensor  # int64 [1, 1], named last
    slot: torch.Tensor  # int64 [1], where the next key goes


def prefill_layer(
    layer: nn.Module, x: torch.Tensor, rope: Rope, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """A layer over a prompt x [1, S, D]; keys, values [1, K, L, E] receive its first S slots."""
    q, k, v = _project(layer, x, rope)
    length = x.shape[1]
    keys[:, :, :length] = k
    values[:, :, :length] = v
    groups = q.shape[1] // k.shape[1]
    k, v = (y.repeat_interleave(groups, dim=1) for y in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=length > 1)
    return _finish(layer, x, out)


def plain_step(text: nn.Module, cache: TokenCache) -> torch.Tensor:
    """The token's normed hidden state [1, 1, D], in aten operations."""
    cos, sin = (table.index_select(0, cache.slot) for table in (cache.cos, cache.sin))
    rope = (cos, sin, cache.partner)
    x = text.embed_tokens(cache.token)
    bias = torch.where(cache.columns <= cache.slot, 0.0, -torch.inf).to(x.dtype)
    for layer, keys, values in zip(text.layers, cache.keys, cache.values, strict=True):
        q, k, v = _project(layer, x, rope)
        keys.index_copy_(2, cache.slot, k)
        values.index_copy_(2, cache.slot, v)
        # The query heads of one key head are rows of one attention: [1, K, Q / K, E].
        grouped = q.view(1, k.shape[1], -1, q.shape[-1])
        rows = bias.expand(1, 1, grouped.shape[2], -1)
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=rows)
        x = _finish(layer, x, out.reshape(q.shape))
    return norm(text.norm, x)


def fused_step(text: nn.Module, cache: TokenCache) -> torch.Tensor:
    """The token's normed hidden state [1, 1, D], in fused kernels."""
    x = text.embed_tokens(cache.token)
    eps = text.norm.variance_epsilon
    y = fused_rmsnorm(x, text.layers[0].input_layernorm.weight, eps)
    following = [layer.input_layernorm.weight for layer in text.layers[1:]] + [text.norm.weight]
    rope = (cache.cos, cache.sin, cache.partner)
    places = zip(text.layers, cache.keys, cache.values, following, strict=True)
    for layer, keys, values, next_norm in places:
        qkv = gemv_qkv(y, *_qkv(layer.self_attn))
        attended = decode_attention(qkv, *rope, keys, values, cache.slot)
        out = gemv(attended, layer.self_attn.o_proj.weight)
        x, y = fused_residual_rmsnorm(
            x,
            out,
            layer.post_self_attn_layernorm.weight,
            layer.post_attention_layernorm.weight,
            eps,
        )
        out = gemv(gemv_swiglu(y, layer.mlp.gate_up_proj.weight), layer.mlp.down_proj.weight)
        x, y = fused_residual_rmsnorm(x, out, layer.post_mlp_layernorm.weight, next_norm, eps)
    return y


def unfused_reason(text: nn.Module, lm_head: nn.Module, cache: TokenCache) -> str | None:
    """Why this model and cache take the plain step; None where `fused_step` takes them."""
    weight = text.embed_tokens.weight
    x = weight[:1, None]
    if text.config.hidden_act != "silu":
        return f"hidden_act is {text.config.hidden_act}"
    if type(lm_head) is not nn.Linear or not can_use_gemv(x, lm_head.weight, lm_head.bias):
        return f"the head does not fit ({weight.dtype}, {weight.device.type})"
    for index, layer in enumerate(text.layers):
        if not _layer_fits(layer, x, cache, index):
            return f"layer {index} does not fit ({weight.dtype}, {weight.device.type})"
    return None


def _layer_fits(layer: nn.Module, x: torch.Tensor, cache: TokenCache, index: int) -> bool:
    attn, mlp = layer.self_attn, layer.mlp
    linears = (attn.q_proj, attn.k_proj, attn.v_proj, attn.o_proj, mlp.gate_up_proj, mlp.down_proj)
    if any(type(linear) is not nn.Linear for linear in linears):
        return False
    if any(linear.bias is not None for linear in linears[3:]):
        return False
    if len({linear.bias is None for linear in linears[:3]}) != 1:
        return False
    norms = (layer.input_layernorm, layer.post_self_attn_layernorm)
    norms += (layer.post_attention_layernorm, layer.post_mlp_layernorm)
    if not all(can_use_residual_rmsnorm(x, x, n.weight, n.weight) for n in norms):
        return False
    qkv, attended, wide = (
        x.new_empty(1, 1, size)
        for size in (
            sum(linear.out_features for linear in linears[:3]),
            attn.o_proj.in_features,
            mlp.down_proj.in_features,
        )
    )
    rope = (cache.cos, cache.sin, cache.partner)
    return (
        can_use_gemv_qkv(x, *_qkv(attn))
        and can_use_decode_attention(qkv, *rope, cache.keys[index], cache.values[index], cache.slot)
        and can_use_gemv(attended, attn.o_proj.weight)
        and can_use_gemv_swiglu(x, mlp.gate_up_proj.weight)
        and can_use_gemv(wide, mlp.down_proj.weight)
    )


def _qkv(
    attn: nn.Module,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    linears = (attn.q_proj, attn.k_proj, attn.v_proj)
    biases = [linear.bias for linear in linears if linear.bias is not None]
    return attn.q_proj.weight, attn.k_proj.weight, attn.v_proj.weight, biases


def norm(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """RMSNorm in float32, rounded to the model's dtype before the weight, as the reference."""
    return rmsnorm_reference(x, module.weight, module.variance_epsilon)


def _project(
    layer: nn.Module, x: torch.Tensor, rope: Rope
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rotated queries [1, Q, S, E], rotated keys and values [1, K, S, E] of x [1, S, D]."""
    attn = layer.self_attn
    x = norm(layer.input_layernorm, x)
    q, k, v = (
        projection(x).unflatten(-1, (-1, attn.head_dim)).transpose(1, 2)
        for projection in (attn.q_proj, attn.k_proj, attn.v_proj)
    )
    return rotate_reference(q, *rope), rotate_reference(k, *rope), v


def _finish(layer: nn.Module, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
    """The rest of a layer after attention; x [1, S, D] is the residual, attended [1, Q, S, E]."""
    out = layer.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
    x = x + norm(layer.post_self_attn_layernorm, out)
    out = layer.mlp(norm(layer.post_attention_layernorm, x))
    return x + norm(layer.post_mlp_layernorm, out)
