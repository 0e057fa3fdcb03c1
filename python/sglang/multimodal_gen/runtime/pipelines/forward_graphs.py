"""A transformer's forward replayed as a CUDA graph, where that gives the same bits in less time.

Launching a forward costs the host about 50 ms on FLUX.1 whatever the picture's size; a replay costs
it nothing. The first forward of a kind of input runs eagerly, so that every fused site forms its
verdict. The second is watched: where launching took the smaller part of its time, the GPU is busy
anyway (large pictures), and a graph has nothing to save. Else the third is captured, compared with
the eager output bit for bit, and timed; a graph that saves nothing is dropped.
"""

import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from sglang.kernels.ops.diffusion.bitexact_gate import (
    BitExactFusionGate,
    all_gates,
    fast_paths_enabled,
)
from sglang.multimodal_gen.runtime.layers.fused_site import observing_sites

FORWARD_GRAPH = BitExactFusionGate("denoise.cuda_graph", per_signature=True)
MAX_GRAPHS = 4  # each keeps the activations of one forward
HOST_BOUND = 0.7  # of a forward's time spent launching: from here on a graph may save some
WORTHWHILE = 0.97  # of the eager forward's time
MAX_KINDS = 1024  # remembered; prompts of every length would be without end

Forward = Callable[..., torch.Tensor]
_alive: "weakref.WeakSet[ForwardGraphs]" = weakref.WeakSet()


class ForwardGraphs:
    """Calls `forward(*args)`, eagerly or as the graph of its inputs' kind.

    Arguments are tensors, None, numbers, or tuples of these; their values may change from call to
    call. Not for forwards that run collectives or draw random numbers.
    """

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._visits: Counter[Hashable] = Counter()
        self._graphs: OrderedDict[Hashable, CapturedForward | None] = OrderedDict()
        _alive.add(self)

    def drop(self) -> None:
        """Free every graph; each kind is judged anew when it comes again."""
        self._graphs.clear()
        self._visits.clear()

    def __call__(self, variant: Hashable, *args: Any) -> torch.Tensor:
        """`variant` tells apart what the arguments do not show, such as a mounted tier."""
        leaves, _ = tree_flatten(args)
        if not _capturable(leaves):
            return self._forward(*args)
        kind = (variant, *map(_kind, leaves))
        if kind not in self._graphs:
            return self._judge(kind, args)
        graph = self._graphs[kind]
        if graph is None:
            return self._forward(*args)
        self._graphs.move_to_end(kind)
        return self._run(kind, partial(graph.replay, args), args)

    def _judge(self, kind: Hashable, args: tuple[Any, ...]) -> torch.Tensor:
        if len(self._visits) >= MAX_KINDS:
            self.drop()
        self._visits[kind] += 1
        if self._visits[kind] == 1:
            return self._forward(*args)
        return self._watch(kind, args) if self._visits[kind] == 2 else self._prove(kind, args)

    def _watch(self, kind: Hashable, args: tuple[Any, ...]) -> torch.Tensor:
        torch.cuda.synchronize()
        start = time.perf_counter()
        output = self._forward(*args)
        launched = time.perf_counter() - start
        torch.cuda.synchronize()
        if launched < HOST_BOUND * (time.perf_counter() - start):
            self._graphs[kind] = None
        return output

    def _prove(self, kind: Hashable, args: tuple[Any, ...]) -> torch.Tensor:
        captured: list[CapturedForward] = []

        def capture() -> torch.Tensor:
            with _uncounted():
                captured.append(CapturedForward(self._forward, args))
                return captured[0].replay(args)

        output = self._run(kind, capture, args)
        proven = bool(captured) and FORWARD_GRAPH.is_verified(kind)
        self._graphs[kind] = captured[0] if proven and self._saves_time(captured[0], args) else None
        if sum(graph is not None for graph in self._graphs.values()) > MAX_GRAPHS:
            self._drop_oldest()
        return output

    def _saves_time(self, graph: "CapturedForward", args: tuple[Any, ...]) -> bool:
        with _uncounted():
            replay = _seconds(partial(graph.replay, args))
            return replay < WORTHWHILE * _seconds(partial(self._forward, *args))

    def _run(
        self, kind: Hashable, fused: Callable[[], torch.Tensor], args: tuple[Any, ...]
    ) -> torch.Tensor:
        return FORWARD_GRAPH.run(fused, partial(self._forward, *args), sig=kind)

    def _drop_oldest(self) -> None:
        oldest = next(kind for kind, graph in self._graphs.items() if graph is not None)
        del self._graphs[oldest]


def drop_all_graphs() -> None:
    """Free the graphs of every model in this process, which hold the memory of a forward each."""
    for graphs in _alive:
        graphs.drop()


class CapturedForward:
    """One forward as a CUDA graph over inputs of its own."""

    def __init__(self, forward: Forward, args: tuple[Any, ...]) -> None:
        leaves, structure = tree_flatten(args)
        self._inputs = [x.clone() if isinstance(x, torch.Tensor) else x for x in leaves]
        self._graph = torch.cuda.CUDAGraph()
        before = _gate_calls()
        # thread_local: what other threads of the caller do on the GPU does not end the capture
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._output = forward(*tree_unflatten(self._inputs, structure))
        self._calls = [
            (gate, gate.fused_calls - fused, gate.eager_calls - eager)
            for gate, fused, eager in before
        ]

    def replay(self, args: tuple[Any, ...]) -> torch.Tensor:
        """The forward of other values of the same kinds; the output is the caller's own."""
        for own, given in zip(self._inputs, tree_flatten(args)[0], strict=True):
            if isinstance(own, torch.Tensor):
                own.copy_(given)
        self._graph.replay()
        for gate, fused, eager in self._calls:
            gate.fused_calls += fused
            gate.eager_calls += eager
        return self._output.clone()


def _capturable(leaves: list[Any]) -> bool:
    if not fast_paths_enabled() or observing_sites():
        return False
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return False
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    plain = all(isinstance(x, torch.Tensor | int | float | str | None) for x in leaves)
    return plain and bool(tensors) and all(tensor.is_cuda for tensor in tensors)


def _kind(leaf: Any) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        return (leaf.shape, leaf.stride(), leaf.dtype, leaf.device)
    return leaf


def _gate_calls() -> list[tuple[BitExactFusionGate, int, int]]:
    return [(gate, gate.fused_calls, gate.eager_calls) for gate in all_gates()]


@contextmanager
def _uncounted() -> Iterator[None]:
    """Inside, gates count nothing: the request asked for none of these calls."""
    before = _gate_calls()
    try:
        yield
    finally:
        for gate, fused, eager in before:
            gate.fused_calls, gate.eager_calls = fused, eager


def _seconds(call: Callable[[], torch.Tensor]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start
