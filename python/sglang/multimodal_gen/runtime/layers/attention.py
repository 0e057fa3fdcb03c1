"""Attention through one pinned SDPA backend: a mask, stride or dtype never switches it silently."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from sglang.multimodal_gen.configs.validation import rejected
from sglang.multimodal_gen.runtime.distributed.parallel_state import Axis
from sglang.multimodal_gen.runtime.distributed.ulysses import (
    WHOLE,
    UlyssesAttention,
    WholeSequence,
)
from sglang.multimodal_gen.runtime.layers.condition_memory import LayerMemory

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


class AttentionBackend:
    """The backend this process runs; one object is shared by every attention layer of a model."""

    parts = 1  # that the heads are shared out to

    def __init__(self, name: str) -> None:
        if name not in BACKENDS:
            raise ValueError(f"attention_backend: got {name!r}, expected one of {sorted(BACKENDS)}")
        self.name = name

    def share(self, device: torch.device, *lengths: int) -> WholeSequence:
        """The tokens that this rank holds of a sequence of streams: all of them."""
        return WHOLE

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        memory: LayerMemory | None = None,
    ) -> torch.Tensor:
        """Softmax attention without a mask.

        q, k, v: [B, S, H, E]; returns [B, S, H * E]. `memory` keeps keys and values, or stands
        before them. Raises RuntimeError where the pinned backend cannot run this dtype or shape,
        instead of taking another one.
        """
        if memory is not None:
            k, v = memory.exchange(k, v)
        with sdpa_kernel(BACKENDS[self.name]):
            out = F.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            )
        return out.transpose(1, 2).flatten(2, 3)

    def begin(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> Callable[[], torch.Tensor]:
        """The same, at once; the call returns it. Ranks that share tokens exchange meanwhile."""
        out = self(q, k, v)
        return lambda: out


def make_attention(name: str, ulysses: Axis) -> AttentionBackend | UlyssesAttention:
    """The attention of a model's layers; over cut sequences where ranks share the tokens."""
    backend = AttentionBackend(name)
    return backend if ulysses.size == 1 else UlyssesAttention(backend, ulysses)


def resolve_attention_backend(name: str, device: torch.device, dtype: torch.dtype) -> str:
    """The backend that `auto` means here: cuDNN for half precision on CUDA (530-594 TFLOP/s on an
    H200 against 294-349 for flash), efficient for fp32 on CUDA, flash on the CPU."""
    if name != "auto":
        if device.type == "cpu" and name in ("cudnn", "efficient"):
            raise rejected("attention_backend", name, "auto, flash or math on a CPU")
        return name
    if device.type != "cuda":
        return "flash"
    return "efficient" if dtype == torch.float32 else "cudnn"
