"""Triton kernels of `decode_attention.py`; the numerical contract is written there."""

import triton
import triton.language as tl

from sglang.kernels.ops.diffusion.triton.dependent_launch_kernels import begin
from sglang.kernels.ops.diffusion.triton.ptx import add_rn, mul_rn, round_to, widen


@triton.jit
def _rotated(
    row_ptrs: tl.tensor,
    partner_ptrs: tl.tensor,
    mask: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
) -> tl.tensor:
    """x * cos + x[partner] * sin in x's dtype: each product and the sum are rounded."""
    dtype: tl.constexpr = row_ptrs.dtype.element_ty
    x = widen(tl.load(row_ptrs, mask=mask, other=0.0))
    turned = widen(tl.load(partner_ptrs, mask=mask, other=0.0))
    total = add_rn(round_to(mul_rn(x, cos), dtype), round_to(mul_rn(turned, sin), dtype))
    return total.to(dtype)


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
    PDL: tl.constexpr,
) -> None:
    """One program = CHUNK slots of one key head, for the GROUP queries that share it.

    Grid (chunks, key heads). The program of the new slot rotates the new key, attends to it and
    writes it and the new value into the cache; no other program reads that slot.
    """
    begin(PDL)
    slot = tl.load(slot_ptr)
    chunk, head = tl.program_id(0), tl.program_id(1)
    if chunk * CHUNK <= slot:
        e = tl.arange(0, E)
        partner = tl.load(partner_ptr + e)
        cos = tl.load(cos_ptr + slot * E + e).to(tl.float32)[None, :]
        sin = tl.load(sin_ptr + slot * E + e).to(tl.float32)[None, :]
        g = tl.arange(0, BLOCK_G)
        q_row = qkv_ptr + (head * GROUP + g)[:, None] * E
        in_group = (g < GROUP)[:, None]
        q = _rotated(q_row + e[None, :], q_row + partner[None, :], in_group, cos, sin)

        slots = chunk * CHUNK + tl.arange(0, CHUNK)
        cached = (head * SLOTS + slots)[:, None] * E + e[None, :]
        older = (slots < slot)[:, None]
        is_new = (slots == slot)[:, None]
        k_row = qkv_ptr + (HEADS * GROUP + head) * E
        v_row = qkv_ptr + (HEADS * GROUP + HEADS + head) * E
        k = tl.load(keys_ptr + cached, mask=older, other=0.0)
        v = tl.load(values_ptr + cached, mask=older, other=0.0)
        every = (e >= 0)[None, :]
        new_k = _rotated(k_row + e[None, :], k_row + partner[None, :], every, cos, sin)
        new_v = tl.load(v_row + e[None, :])
        k, v = tl.where(is_new, new_k, k), tl.where(is_new, new_v, v)
        tl.store(keys_ptr + cached, k, mask=is_new)
        tl.store(values_ptr + cached, v, mask=is_new)

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
    PDL: tl.constexpr,
) -> None:
    """One program = one query head: the chunks' outputs, weighted, in the order of the chunks."""
    begin(PDL)
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
