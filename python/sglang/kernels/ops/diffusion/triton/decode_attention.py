"""One token's attention over a static key/value cache, rotary embedding and cache write included.

    q, k, v = split(qkv);  q, k = rotate(q), rotate(k)
    keys[:, :, slot] = k;  values[:, :, slot] = v
    out = softmax(q @ keys[:, :, : slot + 1].T / sqrt(E)) @ values[:, :, : slot + 1]

Slots past the filled ones change nothing. The rotation and the cache are bit-equal to the eager
chain, rotate(x) = round(round(x * cos) + round(x[partner] * sin)). The attention is its own
definition: it agrees with eager within rounding, and a given cache and slot give the same bits on
every run, in a CUDA graph or not, however many slots the cache has.

Numerical contract of the attention: slots are taken in chunks of CHUNK = 64. In each: fp32 scores
by tensor-core products of the 16-bit q and k, times fp32 1 / sqrt(E); their maximum m; weights
exp(score - m) in fp32, their sum l in fp32; the weights, rounded to the dtype, times v, fp32 sums.
Then out = round(sum(exp(m_c - m) * out_c) / sum(exp(m_c - m) * l_c)) over the chunks c, in fp32.

Shapes: Q query heads, K key heads (Q / K of 1 to 16), E head size, L slots, P positions.
    qkv [..., (Q + 2 K) E] of one token · cos, sin [P, E] · partner int64 [E], the channel that
    each is rotated with · keys, values [1, K, L, E], written in place · slot int64 [1], on the
    device, 0 <= slot < min(L, P) · out [..., Q E]
"""

from typing import Any

import torch
import torch.nn.functional as F

from sglang.kernels.ops.diffusion.triton.available import aligned, triton_runs_on
from sglang.kernels.registration import describe, kernel_reads, register_op

DTYPES = (torch.bfloat16, torch.float16)
CHUNK = 64  # slots a program
ATTENTION_WARPS, COMBINE_WARPS = 8, 4
MAX_GROUP = 16  # query heads of one key head: the rows of one tensor-core tile
HEAD_DIMS = (16, 32, 64, 128, 256)
MAX_CHUNKS = 1024


def rotate_reference(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, partner: torch.Tensor
) -> torch.Tensor:
    """Rotate x `[..., E]` in its dtype by cos, sin (they broadcast)."""
    return x * cos + x.index_select(-1, partner) * sin


def decode_attention_reference(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    partner: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slot: torch.Tensor,
) -> torch.Tensor:
    """The eager chain, which also writes into keys and values. It reads every slot, masked."""
    heads, slots, head_dim = keys.shape[1:]
    rows = qkv.reshape(1, -1, 1, head_dim)
    q, k, v = rows.split([rows.shape[1] - 2 * heads, heads, heads], dim=1)
    tables = (cos.index_select(0, slot), sin.index_select(0, slot), partner)
    q, k = rotate_reference(q, *tables), rotate_reference(k, *tables)
    keys.index_copy_(2, slot, k)
    values.index_copy_(2, slot, v)
    # The query heads of one key head are rows of one attention: [1, K, Q / K, E].
    grouped = q.view(1, heads, -1, head_dim)
    filled = torch.arange(slots, device=slot.device) <= slot
    bias = torch.where(filled, 0.0, -torch.inf).to(q.dtype)
    mask = bias.expand(1, 1, grouped.shape[2], -1)
    out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
    return out.reshape(*qkv.shape[:-1], -1)


def can_use_decode_attention(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    partner: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slot: torch.Tensor,
) -> bool:
    """Whether `decode_attention` takes these; otherwise run the eager chain."""
    if not kernel_reads(qkv, cos, sin, partner, keys, values, slot):
        return False
    if qkv.dtype not in DTYPES or keys.dim() != 4 or keys.shape != values.shape or not qkv.dim():
        return False
    batch, heads, slots, head_dim = keys.shape
    if batch != 1 or head_dim not in HEAD_DIMS or not heads or heads > 65535:
        return False
    if not slots or slots % CHUNK or slots // CHUNK > MAX_CHUNKS:
        return False
    queries = qkv.numel() // head_dim - 2 * heads
    if qkv.shape[-1] != qkv.numel() or qkv.numel() % head_dim or queries % heads:
        return False
    if not 1 <= queries // heads <= MAX_GROUP:
        return False
    if cos.shape != sin.shape or cos.dim() != 2 or cos.shape[1] != head_dim:
        return False
    if partner.shape != (head_dim,) or slot.shape != (1,):
        return False
    return _layouts_fit((qkv, cos, sin, keys, values), (partner, slot))


def _layouts_fit(floats: tuple[torch.Tensor, ...], integers: tuple[torch.Tensor, ...]) -> bool:
    first = floats[0]
    if not triton_runs_on(first.device):
        return False
    if any(t.dtype != first.dtype or not aligned(t) for t in floats):
        return False
    if any(t.dtype != torch.int64 for t in integers):
        return False
    return all(t.device == first.device and t.is_contiguous() for t in (*floats, *integers))


def _decode_attention(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    partner: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slot: torch.Tensor,
) -> torch.Tensor:
    if not can_use_decode_attention(qkv, cos, sin, partner, keys, values, slot):
        raise ValueError(_rejection(qkv=qkv, cos=cos, sin=sin, partner=partner, keys=keys,
                                    values=values, slot=slot))  # fmt: skip
    return _launch(qkv, (cos, sin, partner), keys, values, slot)


def _launch(
    qkv: torch.Tensor,
    rope: tuple[torch.Tensor, ...],
    keys: torch.Tensor,
    values: torch.Tensor,
    slot: torch.Tensor,
) -> torch.Tensor:
    from sglang.kernels.ops.diffusion.triton import decode_attention_kernels as kernels

    _, heads, slots, head_dim = keys.shape
    queries, chunks = qkv.numel() // head_dim - 2 * heads, slots // CHUNK
    out = qkv.new_empty(*qkv.shape[:-1], queries * head_dim)
    partial = torch.empty(chunks, queries, head_dim, device=qkv.device)
    peak, mass = torch.empty(2, chunks, queries, device=qkv.device)
    with torch.cuda.device(qkv.device):
        kernels.decode_attention_kernel[(chunks, heads)](
            qkv, *rope, keys, values, slot, partial, peak, mass, head_dim**-0.5, SLOTS=slots,
            HEADS=heads, E=head_dim, num_warps=ATTENTION_WARPS, **_group(queries // heads),
        )  # fmt: skip
        kernels.combine_chunks_kernel[(queries,)](
            partial, peak, mass, slot, out, QUERIES=queries, E=head_dim, num_warps=COMBINE_WARPS,
            **_chunks(chunks),
        )  # fmt: skip
    return out


def _group(group: int) -> dict[str, int]:
    return {"GROUP": group, "CHUNK": CHUNK, "BLOCK_G": MAX_GROUP}


def _chunks(chunks: int) -> dict[str, int]:
    return {"CHUNK": CHUNK, "BLOCK_C": max(32, 1 << (chunks - 1).bit_length()), "STEP_C": 8}


def _decode_attention_fake(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    partner: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slot: torch.Tensor,
) -> torch.Tensor:
    return qkv.new_empty(*qkv.shape[:-1], qkv.shape[-1] - 2 * keys.shape[1] * keys.shape[3])


def _rejection(**tensors: torch.Tensor) -> str:
    return (
        f"decode_attention got {describe(**tensors)}; expected CUDA tensors (sm_80 or newer), bf16 "
        f"or fp16 of one dtype: qkv [..., (Q + 2 K) E] of one token, cos, sin [P, E], keys, values "
        f"[1, K, L, E] with L a multiple of {CHUNK}, E of {HEAD_DIMS}, Q / K up to {MAX_GROUP}, "
        "int64 partner [E] and slot [1], contiguous, 16-byte aligned, no gradient; ask "
        "can_use_decode_attention first and run decode_attention_reference where it says no"
    )


_op = register_op(
    "decode_attention", _decode_attention, _decode_attention_fake, mutates_args=("keys", "values")
)


def decode_attention(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    partner: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slot: torch.Tensor,
) -> torch.Tensor:
    """Attention of one token, `[..., Q E]`; its key and value are written into the cache.

    Raises ValueError where `can_use_decode_attention` says no.
    """
    return _op(qkv, cos, sin, partner, keys, values, slot)


def aot_signatures() -> list[tuple[Any, dict[str, str], dict[str, Any], dict[str, int]]]:
    """(kernel, signature, constexprs, options) of GLM-Image's prior, to compile without a GPU."""
    from sglang.kernels.ops.diffusion.triton import decode_attention_kernels as kernels

    attention = {"SLOTS": 1536, "HEADS": 2, "E": 128} | _group(16)
    combine = {"QUERIES": 32, "E": 128} | _chunks(24)
    return [
        (kernel, _types(kernel), constants, {"num_warps": warps})
        for kernel, constants, warps in (
            (kernels.decode_attention_kernel, attention, ATTENTION_WARPS),
            (kernels.combine_chunks_kernel, combine, COMBINE_WARPS),
        )
    ]


def _types(kernel: Any) -> dict[str, str]:
    special = {"slot_ptr": "*i64", "partner_ptr": "*i64", "scale": "fp32"}
    special |= dict.fromkeys(("partial_ptr", "peak_ptr", "mass_ptr"), "*fp32")
    return {
        name: "constexpr" if name.isupper() else special.get(name, "*bf16")
        for name in kernel.arg_names
    }
