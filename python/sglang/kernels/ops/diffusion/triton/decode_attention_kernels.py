"""Triton kernels of `decode_attention.py`; the numerical contract is written there."""

import triton
import triton.language as tl

from sglang.kernels.ops.diffusion.triton.ptx import add_rn, mul_rn, round_to, widen


@triton.jit
def _rotated(x: tl.tensor, turned: tl.tensor, cos: tl.tensor, sin: tl.tensor) -> tl.tensor:
    """x * cos + turned * sin in x's dtype, turned being x[partner], cos and sin fp32.

    Each product and the sum are rounded.
    """
    dtype: tl.constexpr = x.dtype
    left = round_to(mul_rn(widen(x), cos), dtype)
    return add_rn(left, round_to(mul_rn(widen(turned), sin), dtype)).to(dtype)


@triton.jit
def decode_attention_kernel(
    qkv_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    partner_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    values_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    peak_ptr: tl.tensor,
    mass_ptr: tl.tensor,
    scale: tl.tensor,
    SLOTS: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    E: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_G: tl.constexpr,
) -> None:
    """One program = CHUNK slots of one key head, for the GROUP queries that share it.

    Grid (chunks, key heads). The program of the new slot rotates the new key, attends to it and
    writes it and the new value into the cache; no other program uses that slot. Whatever has an
    address without the slot is loaded beside it, as the kernel is a chain of waits for memory:
    also slots that are not filled, which are then left out.
    """
    chunk, head = tl.program_id(0), tl.program_id(1)
    e = tl.arange(0, E)
    partner = tl.load(partner_ptr + e).to(tl.int32)
    slots = chunk * CHUNK + tl.arange(0, CHUNK)
    cached = (head * SLOTS + slots)[:, None] * E + e[None, :]
    slot = tl.load(slot_ptr)
    g = tl.arange(0, BLOCK_G)
    in_group = (g < GROUP)[:, None]
    q_row = qkv_ptr + (head * GROUP + g)[:, None] * E
    k_row = qkv_ptr + (HEADS * GROUP + head) * E
    v_row = qkv_ptr + (HEADS * GROUP + HEADS + head) * E
    k = tl.load(keys_ptr + cached)
    v = tl.load(values_ptr + cached)
    q = tl.load(q_row + e[None, :], mask=in_group, other=0.0)
    new_k = tl.load(k_row + e)
    new_v = tl.load(v_row + e)
    if chunk * CHUNK <= slot:
        cos = tl.load(cos_ptr + slot * E + e).to(tl.float32)
        sin = tl.load(sin_ptr + slot * E + e).to(tl.float32)
        turned = tl.gather(q, tl.broadcast_to(partner[None, :], (BLOCK_G, E)), 1)
        q = _rotated(q, turned, cos[None, :], sin[None, :])
        new_k = _rotated(new_k, tl.gather(new_k, partner, 0), cos, sin)
        new_row = (head * SLOTS + slot) * E + e
        ours = tl.full((E,), slot // CHUNK == chunk, tl.int1)
        tl.store(keys_ptr + new_row, new_k, mask=ours)
        tl.store(values_ptr + new_row, new_v, mask=ours)
        older = (slots < slot)[:, None]
        is_new = (slots == slot)[:, None]
        k = tl.where(is_new, new_k[None, :], tl.where(older, k, 0.0))
        v = tl.where(is_new, new_v[None, :], tl.where(older, v, 0.0))

        scores = tl.dot(q, tl.trans(k)) * scale
        scores = tl.where((slots <= slot)[None, :], scores, float("-inf"))
        peak = tl.max(scores, axis=1)
        weights = tl.exp(scores - peak[:, None])
        mass = tl.sum(weights, axis=1)
        out = tl.dot(weights.to(v.dtype), v)
        place = chunk * (HEADS * GROUP) + head * GROUP + g
        tl.store(partial_ptr + place[:, None] * E + e[None, :], out, mask=in_group)
        tl.store(peak_ptr + place, peak, mask=g < GROUP)
        tl.store(mass_ptr + place, mass, mask=g < GROUP)


@triton.jit
def combine_chunks_kernel(
    partial_ptr: tl.tensor,
    peak_ptr: tl.tensor,
    mass_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    out_ptr: tl.tensor,
    QUERIES: tl.constexpr,
    E: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STEP_C: tl.constexpr,
) -> None:
    """One program = one query head: the chunks' outputs, weighted, in the order of the chunks."""
    head, e = tl.program_id(0), tl.arange(0, E)
    chunks = tl.load(slot_ptr) // CHUNK + 1
    c = tl.arange(0, BLOCK_C)
    place = c * QUERIES + head
    peaks = tl.load(peak_ptr + place, mask=c < chunks, other=float("-inf"))
    peak = tl.max(peaks, axis=0)
    masses = tl.load(mass_ptr + place, mask=c < chunks, other=0.0)
    total = tl.sum(masses * tl.exp(peaks - peak), axis=0)
    acc = tl.zeros((STEP_C, E), tl.float32)
    steps = tl.arange(0, STEP_C)
    for start in tl.static_range(0, BLOCK_C, STEP_C):
        rows = (start + steps) * QUERIES + head
        inside = start + steps < chunks
        weight = tl.exp(tl.load(peak_ptr + rows, mask=inside, other=float("-inf")) - peak)
        part = partial_ptr + rows[:, None] * E + e[None, :]
        acc += weight[:, None] * tl.load(part, mask=inside[:, None], other=0.0)
    out = tl.sum(acc, axis=0) / total
    tl.store(out_ptr + head * E + e, out.to(out_ptr.dtype.element_ty))
