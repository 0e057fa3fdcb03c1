"""What one denoising step asks of the GPU: its GEMMs, its attentions, and the bytes of the rest."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from timing import time_us
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sglang.multimodal_gen.runtime.layers.attention import AttentionBackend
from sglang.multimodal_gen.runtime.profiling import family_of

if TYPE_CHECKING:
    from denoise_arms import DenoiseCase

aten = torch.ops.aten
# packet -> (rows x inner, where the weight is, whether it is [out, in])
GEMMS = {aten.linear: (0, 1, True), aten.mm: (0, 1, False), aten.addmm: (1, 2, False)}
BATCHED_GEMMS = {aten.bmm: (0, 1), aten.baddbmm: (1, 2)}
ATTENTIONS = {
    aten.scaled_dot_product_attention,
    aten._scaled_dot_product_cudnn_attention,
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_efficient_attention,
}


@dataclass(frozen=True)
class Gemm:
    """[rows, inner] @ [inner, out]; `bias` where one is added in the same op."""

    rows: int
    inner: int
    out: int
    bias: bool

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.inner * self.out


@dataclass(frozen=True)
class Attention:
    """batch x heads softmax attentions of `queries` over `keys` tokens."""

    batch: int
    heads: int
    queries: int
    keys: int
    head_size: int

    @property
    def flops(self) -> int:
        return 4 * self.batch * self.heads * self.queries * self.keys * self.head_size


@dataclass(frozen=True)
class OpCounts:
    """Ops of some steps, and bytes read and written by kernel family (GEMM, attention: none)."""

    gemms: Counter[Gemm] = field(default_factory=Counter)
    attentions: Counter[Attention] = field(default_factory=Counter)
    family_bytes: Counter[str] = field(default_factory=Counter)

    def __sub__(self, other: "OpCounts") -> "OpCounts":
        return OpCounts(
            self.gemms - other.gemms,
            self.attentions - other.attentions,
            self.family_bytes - other.family_bytes,
        )

    @property
    def gemm_flops(self) -> int:
        return sum(count * gemm.flops for gemm, count in self.gemms.items())

    @property
    def attention_flops(self) -> int:
        return sum(count * attention.flops for attention, count in self.attentions.items())


class OpCounter(TorchDispatchMode):
    """Context manager that counts the aten ops called inside."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = OpCounts()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        self._note(func, args, [args, kwargs, output])
        return output

    def _note(self, func: Any, args: tuple, touched: list[Any]) -> None:
        packet = func.overloadpacket
        if packet in GEMMS:
            self.counts.gemms[_gemm(args, *GEMMS[packet])] += 1
        elif packet in BATCHED_GEMMS:
            left, right = (args[i] for i in BATCHED_GEMMS[packet])
            self.counts.gemms[Gemm(*left.shape[-2:], right.shape[-1], False)] += left.shape[0]
        elif packet in ATTENTIONS:
            q, k = args[0], args[1]
            self.counts.attentions[Attention(*q.shape[:3], k.shape[2], q.shape[3])] += 1
        elif func.namespace == "aten" and not func.is_view:
            family = family_of(f"aten::{packet.__name__}")
            self.counts.family_bytes[family] += sum(map(tensor_bytes, _tensors(touched)))


def per_step(case: "DenoiseCase", arm: str) -> OpCounts:
    """Ops of one step of an arm: those of a run of two less those of a run of one, so that what is
    done once an image drops out."""
    counts = []
    for steps in (1, 2):
        with OpCounter() as counter:
            case.run(arm, steps)
        counts.append(counter.counts)
    return counts[1] - counts[0]


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the elements behind a tensor; an expanded dimension counts once."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride else min(size, 1)
    return elements * tensor.element_size()


def floor_ms(counts: OpCounts, attention_backend: str, dtype: torch.dtype) -> float:
    """Milliseconds of the GEMMs and attentions of `counts`, each timed alone, L2 cold."""
    assert counts.gemms and counts.attentions, "the floor needs the ops of a plain, eager step"
    us = sum(count * gemm_time_us(gemm, dtype) for gemm, count in counts.gemms.items())
    backend = AttentionBackend(attention_backend)
    for shape, count in counts.attentions.items():
        us += count * attention_time_us(shape, backend, dtype)
    return us / 1e3


def gemm_time_us(gemm: Gemm, dtype: torch.dtype) -> float:
    """Median GPU microseconds of one linear layer, on random data."""
    x, weight = (
        torch.randn(n, gemm.inner, device="cuda", dtype=dtype) for n in (gemm.rows, gemm.out)
    )
    bias = torch.randn(gemm.out, device="cuda", dtype=dtype) if gemm.bias else None
    return time_us(lambda: F.linear(x, weight, bias), iterations=30)


def attention_time_us(shape: Attention, backend: AttentionBackend, dtype: torch.dtype) -> float:
    """Median GPU microseconds of one attention, on random data."""
    q, k, v = (
        torch.randn(shape.batch, tokens, shape.heads, shape.head_size, device="cuda", dtype=dtype)
        for tokens in (shape.queries, shape.keys, shape.keys)
    )
    return time_us(lambda: backend(q, k, v), iterations=30)


def _gemm(args: tuple, left: int, right: int, transposed: bool) -> Gemm:
    x, weight = args[left], args[right]
    inner = x.shape[-1]
    out = weight.shape[0 if transposed else 1]
    bias = left == 1 or (transposed and len(args) > 2 and args[2] is not None)
    return Gemm(x.numel() // inner, inner, out, bias)


def _tensors(tree: Any) -> Iterable[torch.Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
