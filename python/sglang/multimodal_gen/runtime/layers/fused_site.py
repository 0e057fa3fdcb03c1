"""One way to run a fused site: behind its gate, with the eager chain always at hand."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from sglang.kernels.ops.diffusion.bitexact_gate import BitExactFusionGate


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
    if fused is None:
        gate.note_eager(_rejection(args))
        return reference(*args)
    return gate.run(partial(fused, *args), partial(reference, *args), sig=_signature(args))


def _signature(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple((a.shape, a.stride(), a.dtype) for a in args if isinstance(a, torch.Tensor))


def _rejection(args: tuple[Any, ...]) -> str:
    first = args[0]
    return (
        f"the kernel does not take {str(first.dtype).removeprefix('torch.')} on {first.device.type}"
    )
