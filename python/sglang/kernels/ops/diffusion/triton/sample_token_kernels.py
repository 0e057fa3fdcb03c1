"""Triton kernel of `sample_token.py`; the numerical contract is written there."""

import triton
import triton.language as tl

from sglang.kernels.ops.diffusion.triton.ptx import div_rn, mul_rn


@triton.jit
def _order_keys(x: tl.tensor) -> tl.tensor:
    """int32 0 .. 65535 in the order of the 16-bit floats x; -0 is below +0."""
    bits = x.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return tl.where(bits >= 0x8000, 0xFFFF - bits, bits + 0x8000)


@triton.jit
def _kth_key(keys: tl.tensor, inside: tl.tensor, K: tl.constexpr) -> tl.tensor:
    """The largest key that at least K keys reach."""
    found = 0
    for bit in tl.static_range(16):
        trial = found + (0x8000 >> bit)
        reached = tl.sum((inside & (keys >= trial)).to(tl.int32), axis=0)
        found = tl.where(reached >= K, trial, found)
    return found


@triton.jit
def _drop_tail(keys: tl.tensor, mass: tl.tensor, limit: tl.tensor) -> tl.tensor:
    """Whether a value stays when values go, least first, while the mass gone is at most `limit`.

    Of equal values the first go first; a greatest value stays always.
    """
    edge = 0
    for bit in tl.static_range(16):
        trial = edge + (0x8000 >> bit)
        below = tl.sum(tl.where(keys < trial, mass, 0.0), axis=0)
        edge = tl.where(below <= limit, trial, edge)
    edge = tl.minimum(edge, tl.max(tl.where(mass > 0.0, keys, 0), axis=0))
    gone = tl.sum(tl.where(keys < edge, mass, 0.0), axis=0)
    at_edge = (keys == edge) & (mass > 0.0)
    count = tl.sum(at_edge.to(tl.int32), axis=0)
    each = tl.max(tl.where(at_edge, mass, 0.0), axis=0)
    more = tl.minimum(((limit - gone) / each).to(tl.int32), count - 1)
    rank = tl.cumsum(at_edge.to(tl.int32), axis=0) - 1
    return (keys > edge) | (at_edge & (rank >= more))


@triton.jit
def sample_token_kernel(
    logits_ptr: tl.tensor,
    noise_ptr: tl.tensor,
    wide_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    token_ptr: tl.tensor,
    step_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    inverse_temperature: tl.tensor,
    tail: tl.tensor,
    V: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    GREEDY: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """One program = the whole vocabulary."""
    v = tl.arange(0, BLOCK_V)
    inside = v < V
    step = tl.load(step_ptr)
    slot = tl.load(slot_ptr)
    logits = tl.load(logits_ptr + v, mask=inside, other=float("-inf"))
    wide = logits.to(tl.float32)
    tl.store(wide_ptr + v, wide, mask=inside)
    if GREEDY:
        score = wide
    else:
        noise = tl.load(noise_ptr + step * V + v, mask=inside, other=1.0)
        kept = inside
        keys = _order_keys(logits)
        if TOP_K > 0:
            kept = kept & (keys >= _kth_key(keys, inside, TOP_K))
        scaled = mul_rn(wide, inverse_temperature)
        mass = tl.where(kept, tl.exp(scaled - tl.max(scaled, axis=0)), 0.0)
        if TOP_P:
            kept = kept & _drop_tail(keys, mass, tail * tl.sum(mass, axis=0))
        score = tl.where(kept, div_rn(mass, noise), float("-inf"))
    token = tl.argmax(score, axis=0).to(tl.int64)
    tl.store(tokens_ptr + step, token)
    tl.store(token_ptr, token)
    tl.store(step_ptr, step + 1)
    tl.store(slot_ptr, slot + 1)
