"""Register a custom op and its fake in one call, at a small host cost in eager mode.

The op is ``torch.ops.sglang_diffusion.<name>``. What `register_op` returns calls the implementation
directly where nothing can be watching the dispatcher, and goes through ``torch.ops`` otherwise
(under torch.compile and export, inside a dispatch mode or a functorch transform, with a tensor
subclass, or when a gradient is wanted). It uses `torch.library.Library` and not
`torch.library.custom_op`, because compiled graphs pay the op's own overhead on every call.

Host cost of one call of `residual_gate_add` on an H200 machine, torch 2.11, tiny tensors: 14.8 us
for the implementation alone, 21.2 through the callable returned here, 22.4 through ``torch.ops``,
27.0 as a `torch.library.custom_op`; the eager chain costs 18.9.
``python benchmark/kernels/launch_costs.py`` prints them for the machine at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn import Parameter

NAMESPACE = "sglang_diffusion"
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_PLAIN_TYPES = (torch.Tensor, Parameter)
_STRIDED = torch.strided


def needs_dispatcher(*arguments: Any) -> bool:
    """Whether a tracer, a mode, a transform, a subclass or autograd may want to see the op."""
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
    ):
        return True
    for argument in arguments:
        if type(argument) not in _PLAIN_TYPES and isinstance(argument, torch.Tensor):
            return True
    return wants_gradient(*arguments)


def wants_gradient(*arguments: Any) -> bool:
    """Whether autograd would record an op on these arguments; the fused ops have no backward."""
    if not torch.is_grad_enabled():
        return False
    return any(isinstance(a, torch.Tensor) and a.requires_grad for a in arguments)


def kernel_reads(*tensors: torch.Tensor | None) -> bool:
    """Whether a kernel may read these, as far as their kind tells: plain, and no gradient is
    wanted. A predicate asks this first."""
    return not wants_gradient(*tensors) and is_plain(*tensors)


def is_plain(*tensors: torch.Tensor | None) -> bool:
    """Whether all are dense, of no subclass and outside of functorch transforms.

    Others can raise when asked for shape, strides or address.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    for tensor in tensors:
        if tensor is None:
            continue
        if type(tensor) not in _PLAIN_TYPES and isinstance(tensor, torch.Tensor):
            return False
        if tensor.is_nested or tensor.layout is not _STRIDED:
            return False
    return True


def describe(**tensors: torch.Tensor) -> str:
    """``x bfloat16[1, 512, 3072] cuda:0 contiguous, ...`` for the errors of the ops."""
    return ", ".join(f"{name} {_described(tensor)}" for name, tensor in tensors.items())


def _described(tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.is_nested or tensor.layout is not _STRIDED:  # without a shape or strides to tell
        return f"{dtype} {tensor.device} {'nested' if tensor.is_nested else tensor.layout}"
    strides = "contiguous" if tensor.is_contiguous() else f"strides {tensor.stride()}"
    return f"{dtype}{list(tensor.shape)} {tensor.device} {strides}"


def register_op(
    name: str, implementation: Callable, fake: Callable, mutates_args: Iterable[str] = ()
) -> Callable:
    """Register ``sglang_diffusion::<name>`` and return the callable for eager and compiled code.

    `implementation` takes tensors on any device (its annotations give the schema) and must return
    fresh tensors; `fake` returns the same metadata for fake tensors, so it runs no kernel and reads
    no data.
    """
    schema = torch.library.infer_schema(implementation, mutates_args=tuple(mutates_args))
    _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    overload = getattr(getattr(torch.ops, NAMESPACE), name).default

    def call(*arguments: Any) -> Any:
        if needs_dispatcher(*arguments):
            return overload(*arguments)
        return implementation(*arguments)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = implementation.__doc__
    return call
