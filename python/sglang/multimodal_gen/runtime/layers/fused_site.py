"""One way to run a fused site: behind its gate, with the eager chain always at hand."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from sglang.kernels.ops.diffusion.bitexact_gate import BitExactFusionGate


@dataclass
class SiteRecord:
    """One kind of site as an observed run met it: a gate at one input signature."""

    gate: BitExactFusionGate
    signature: tuple[Any, ...]
    fused: Callable[..., Any] | None  # None: the predicate rejects this input
    reference: Callable[..., Any]
    args: tuple[Any, ...]  # of the first call
    calls: int = 0


_observed: dict[tuple[Any, ...], SiteRecord] | None = None


def run_site(
    gate: BitExactFusionGate,
    fused: Callable[..., Any] | None,
    reference: Callable[..., Any],
    *args: Any,
) -> Any:
    """`fused(*args)` once the gate has proven it for this signature, else `reference(*args)`.

    `fused` is None where the op's predicate rejects the input; the gate counts that. Under
    torch.compile every site steps aside, so that no fallback is baked into a graph.
    """
    if torch.compiler.is_compiling():
        return reference(*args)
    signature = _signature(args)
    if _observed is not None:
        record = SiteRecord(gate, signature, fused, reference, args)
        _observed.setdefault((gate.name, signature), record).calls += 1
    if fused is None:
        gate.note_eager(rejection(args))
        return reference(*args)
    return gate.run(partial(fused, *args), partial(reference, *args), sig=signature)


def takes(predicate: Callable[..., bool], *args: Any, **options: Any) -> bool:
    """`predicate(*args, **options)`, or False under torch.compile: predicates read addresses, which
    traced tensors do not have, and every site steps aside there."""
    return not torch.compiler.is_compiling() and predicate(*args, **options)


@contextmanager
def observe_sites() -> Iterator[dict[tuple[Any, ...], SiteRecord]]:
    """Collect a record of every kind of site that runs inside; keeps its first inputs alive."""
    global _observed
    _observed = {}
    try:
        yield _observed
    finally:
        _observed = None


def observing_sites() -> bool:
    """Whether a run is being observed: every site must then really be called."""
    return _observed is not None


def rejection(args: tuple[Any, ...]) -> str:
    """Why a predicate said no, as far as the input's kind tells."""
    first = args[0]
    dtype = str(first.dtype).removeprefix("torch.")
    return f"the kernel does not take {dtype} {list(first.shape)} on {first.device.type}"


def _signature(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple((a.shape, a.stride(), a.dtype) for a in args if isinstance(a, torch.Tensor))
