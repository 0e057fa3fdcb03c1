"""A token drawn from 16-bit logits with noise that was drawn beforehand, in one kernel.

    scaled = logits / temperature, all but the `top_k` likeliest left out (0: none are),
    then the least likely left out while their probability together is at most 1 - top_p;
    token = argmax(softmax(scaled) / noise), or argmax(logits) without noise

The rule is that of transformers' samplers and of `torch.multinomial` for one sample, whose noise is
exponential. The kernel needs no sort: as a 16-bit float has 2^16 values, 16 sums find the least
likely value that stays. Of equal logits at that edge the first go first, as in a stable sort.

Numerical contract: fp32. scaled = logit * round(1 / temperature), mass = exp(scaled - max), sums in
an order that the vocabulary's size fixes, mass / noise in IEEE division. Eager normalises twice and
sums in the order of a sort, so the two can part where a sum falls within rounding of 1 - top_p or
two scores are one rounding apart; given inputs give the same bits on every run.

Shapes: logits `[..., V]` of V values; noise fp32 `[N, V]` or None. Written in place: wide fp32
`[1, V]` (the logits), tokens int64 `[N]` at `step`, token int64 `[1, 1]`; step and slot, int64
`[1]`, grow by one. All on the device, so that nothing waits.
"""

from typing import Any

import torch

from sglang.kernels.ops.diffusion.triton.available import triton_runs_on
from sglang.kernels.registration import describe, kernel_reads, register_op

DTYPES = (torch.bfloat16, torch.float16)
MAX_VOCABULARY = 65536
VALUES_A_THREAD = 16


def choose_reference(
    logits: torch.Tensor,
    noise: torch.Tensor | None,
    temperature: float,
    top_k: int,
    top_p: float,
) -> torch.Tensor:
    """int64 [1] token of float32 logits [1, V] in eager; noise float32 [1, V], None: greedy."""
    if noise is None:
        return logits.argmax(dim=-1)
    if temperature != 1.0:
        logits = logits / temperature
    if 0 < top_k < logits.shape[-1]:
        least = torch.topk(logits, top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if top_p < 1.0:
        logits = _keep_top_p(logits, top_p)
    return (torch.softmax(logits, dim=-1) / noise).argmax(dim=-1)


def _keep_top_p(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    ascending, order = torch.sort(logits)
    # Two equal rows: a scan of one row alone is not deterministic on CUDA.
    cumulative = ascending.softmax(dim=-1).expand(2, -1).cumsum(dim=-1)[:1]
    removed = cumulative <= 1 - top_p
    removed[:, -1] = False
    return logits.masked_fill(removed.scatter(1, order, removed), -torch.inf)


def sample_token_reference(
    logits: torch.Tensor,
    noise: torch.Tensor | None,
    wide: torch.Tensor,
    tokens: torch.Tensor,
    token: torch.Tensor,
    step: torch.Tensor,
    slot: torch.Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
) -> None:
    """The same in eager, in place too."""
    wide.copy_(logits.reshape(1, -1))
    row = None if noise is None else noise.index_select(0, step)
    chosen = choose_reference(wide, row, temperature, top_k, top_p)
    tokens.index_copy_(0, step, chosen)
    token.copy_(chosen[None])
    step.add_(1)
    slot.add_(1)


def can_use_sample_token(
    logits: torch.Tensor,
    noise: torch.Tensor | None,
    wide: torch.Tensor,
    tokens: torch.Tensor,
    token: torch.Tensor,
    step: torch.Tensor,
    slot: torch.Tensor,
) -> bool:
    """Whether `sample_token` takes these; otherwise run `sample_token_reference`."""
    if not kernel_reads(logits, noise, wide, tokens, token, step, slot):
        return False
    if logits.dtype not in DTYPES or not logits.dim() or not triton_runs_on(logits.device):
        return False
    size = logits.shape[-1]
    if size != logits.numel() or not 0 < size <= MAX_VOCABULARY or wide.shape != (1, size):
        return False
    if tokens.dim() != 1 or token.shape != (1, 1) or step.shape != (1,) or slot.shape != (1,):
        return False
    floats = (wide,) if noise is None else (wide, noise)
    if noise is not None and noise.shape != (len(tokens), size):
        return False
    integers = (tokens, token, step, slot)
    if any(t.dtype != torch.float32 for t in floats):
        return False
    if any(t.dtype != torch.int64 for t in integers):
        return False
    every = (logits, *floats, *integers)
    return all(t.device == logits.device and t.is_contiguous() for t in every)


def _sample_token(
    logits: torch.Tensor,
    noise: torch.Tensor | None,
    wide: torch.Tensor,
    tokens: torch.Tensor,
    token: torch.Tensor,
    step: torch.Tensor,
    slot: torch.Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
) -> None:
    places = (wide, tokens, token, step, slot)
    if not can_use_sample_token(logits, noise, *places) or temperature <= 0:
        raise ValueError(_rejection(temperature, logits=logits, wide=wide, tokens=tokens,
                                    token=token, step=step, slot=slot))  # fmt: skip
    from sglang.kernels.ops.diffusion.triton.sample_token_kernels import sample_token_kernel

    size = logits.numel()
    with torch.cuda.device(logits.device):
        sample_token_kernel[(1,)](
            logits, wide if noise is None else noise, *places, 1 / temperature, 1 - top_p,
            TOP_K=top_k if top_k < size else 0, TOP_P=top_p < 1, GREEDY=noise is None,
            **_tile(size),
        )  # fmt: skip


def _tile(size: int) -> dict[str, int]:
    block = max(32, 1 << (size - 1).bit_length())
    warps = min(32, max(1, block // (32 * VALUES_A_THREAD)))
    return {"V": size, "BLOCK_V": block, "num_warps": warps}


def _sample_token_fake(
    logits: torch.Tensor,
    noise: torch.Tensor | None,
    wide: torch.Tensor,
    tokens: torch.Tensor,
    token: torch.Tensor,
    step: torch.Tensor,
    slot: torch.Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
) -> None:
    return None


def _rejection(temperature: float, **tensors: torch.Tensor) -> str:
    return (
        f"sample_token got {describe(**tensors)}, temperature {temperature}; expected CUDA tensors "
        f"(sm_80 or newer): bf16 or fp16 logits of 1 to {MAX_VOCABULARY} values, fp32 noise [N, V] "
        "and wide [1, V], int64 tokens [N], token [1, 1], step [1], slot [1], contiguous, no "
        "gradient, temperature > 0; ask can_use_sample_token first and run sample_token_reference "
        "where it says no"
    )


_op = register_op(
    "sample_token",
    _sample_token,
    _sample_token_fake,
    mutates_args=("wide", "tokens", "token", "step", "slot"),
)


def sample_token(
    logits: torch.Tensor,
    noise: torch.Tensor | None,
    wide: torch.Tensor,
    tokens: torch.Tensor,
    token: torch.Tensor,
    step: torch.Tensor,
    slot: torch.Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> None:
    """Name token number `step`: written into tokens and token; step and slot grow by one.

    Raises ValueError where `can_use_sample_token` says no or the temperature is not positive.
    """
    _op(logits, noise, wide, tokens, token, step, slot, temperature, top_k, top_p)


def aot_signatures() -> list[tuple[Any, dict[str, str], dict[str, Any], dict[str, int]]]:
    """(kernel, signature, constexprs, options) of GLM-Image's prior, to compile without a GPU."""
    from sglang.kernels.ops.diffusion.triton.sample_token_kernels import sample_token_kernel

    special = {"logits_ptr": "*bf16", "noise_ptr": "*fp32", "wide_ptr": "*fp32"}
    special |= {"inverse_temperature": "fp32", "tail": "fp32"}
    signature = {
        name: "constexpr" if name.isupper() else special.get(name, "*i64")
        for name in sample_token_kernel.arg_names
    }
    sizes = {"V": 16384, "BLOCK_V": 16384}
    warps = {"num_warps": _tile(16384)["num_warps"]}
    rules = [(0, True, False), (50, True, False), (0, False, True)]
    return [
        (sample_token_kernel, signature, {**sizes, "TOP_K": k, "TOP_P": p, "GREEDY": g}, warps)
        for k, p, g in rules
    ]
