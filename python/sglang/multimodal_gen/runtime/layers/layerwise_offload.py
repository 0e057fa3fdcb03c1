"""A transformer's blocks in host memory, each on the GPU only while it runs.

Two buffers of the largest block's size are all that the blocks take there. While one block
computes, the weights of the next are copied into the other buffer by a stream of their own.

diffusers' group offloading would not do: between forwards it also takes away the layers outside of
the blocks, which GLM-Image's conditioning and FLUX.1's modulation rows run there, and it copies
weights one by one, which parts the packed projections.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from sglang.multimodal_gen.runtime.layers.packed_projections import pack_projections

ALIGNMENT = 256  # bytes, as the allocator's


def offload_blocks(transformer: nn.Module, device: torch.device) -> nn.Module:
    """The transformer, whose blocks take turns on `device` and
    all else of which stays there. Layers of blocks that run before them, which a transformer names
    in `hoisted_layers`, have turns of their own. Between its turns a weight is empty."""
    pack_projections(transformer)
    blocks = blocks_of(transformer)
    inside = {id(parameter) for block in blocks for parameter in block.parameters()}
    for tensor in (*transformer.parameters(), *transformer.buffers()):
        if id(tensor) not in inside:
            tensor.data = tensor.data.to(device)
    hoisted = getattr(transformer, "hoisted_layers", tuple)()
    early = [layer for layer in hoisted if id(next(layer.parameters())) in inside]
    transformer.layerwise_offload = LayerwiseOffload([*early, *blocks], device)
    return transformer


def blocks_of(transformer: nn.Module) -> list[nn.Module]:
    """The elements of its module lists, in the order in which they run."""
    lists = [child for child in transformer.children() if isinstance(child, nn.ModuleList)]
    return [block for blocks in lists for block in blocks]


def is_offloaded(transformer: nn.Module) -> bool:
    """Whether weights of its blocks are there only while they run."""
    return hasattr(transformer, "layerwise_offload")


@dataclass(frozen=True)
class Weight:
    """A parameter and where it is in the bytes of its turn."""

    parameter: nn.Parameter
    at: int
    dtype: torch.dtype
    shape: torch.Size

    def view(self, data: torch.Tensor) -> torch.Tensor:
        """It in these bytes."""
        end = self.at + self.shape.numel() * self.dtype.itemsize
        return data[self.at : end].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class HostBlock:
    """The weights of one turn, side by side in host memory."""

    data: torch.Tensor  # uint8, pinned where a GPU reads it
    weights: list[Weight]

    @classmethod
    def of(cls, parameters: Iterable[nn.Parameter], pinned: bool) -> "HostBlock":
        """Weights that share a storage, as packed projections do, keep adjoining."""
        weights, size, last = [], 0, None
        for parameter in sorted(parameters, key=_address):
            storage = parameter.untyped_storage().data_ptr()
            if storage != last:
                size, last = -(-size // ALIGNMENT) * ALIGNMENT, storage
            weights.append(Weight(parameter, size, parameter.dtype, parameter.shape))
            size += parameter.nbytes
        data = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        for weight in weights:
            weight.view(data).copy_(weight.parameter.data)
        return cls(data, weights)


def _own_parameters(modules: Sequence[nn.Module]) -> Iterator[list[nn.Parameter]]:
    taken: set[int] = set()
    for module in modules:
        own = [parameter for parameter in module.parameters() if id(parameter) not in taken]
        taken |= set(map(id, own))
        yield own


def _address(parameter: torch.Tensor) -> tuple[int, int]:
    return parameter.untyped_storage().data_ptr(), parameter.storage_offset()


class LayerwiseOffload:
    """Lets modules take turns in two buffers on `device`, best in the order given. A weight of two
    modules belongs to the first."""

    def __init__(self, modules: Sequence[nn.Module], device: torch.device) -> None:
        self._device, self._on_gpu = device, device.type == "cuda"
        self._host = list(self._moved(modules))
        size = max(len(block.data) for block in self._host)
        self._buffers = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
        self._views = [
            [[weight.view(buffer) for weight in block.weights] for buffer in self._buffers]
            for block in self._host
        ]
        self._holds: list[int | None] = [None, None]  # the module whose weights a buffer has
        self._idle = [True, True]
        if self._on_gpu:
            self._stream = torch.cuda.Stream(device)
            self._copied, self._used = ([torch.cuda.Event() for _ in range(2)] for _ in range(2))
        for index, module in enumerate(modules):
            module.register_forward_pre_hook(partial(self._enter, index))
            module.register_forward_hook(partial(self._leave, index), always_call=True)

    def _moved(self, modules: Sequence[nn.Module]) -> Iterator[HostBlock]:
        """One by one, so that no more than one is in memory twice."""
        for own in _own_parameters(modules):
            block = HostBlock.of(own, self._on_gpu)
            self._release(block)
            yield block

    def _enter(self, index: int, block: nn.Module, args: Any) -> None:
        if index not in self._holds:
            self._fetch(index, self._idle.index(True))  # of two, one may be inside the other
        slot = self._holds.index(index)
        self._idle[slot] = False
        if self._on_gpu:
            torch.cuda.current_stream(self._device).wait_event(self._copied[slot])
        for weight, view in zip(self._host[index].weights, self._views[index][slot], strict=True):
            weight.parameter.data = view
        following = (index + 1) % len(self._host)
        if following not in self._holds and self._idle[1 - slot]:
            self._fetch(following, 1 - slot)

    def _fetch(self, index: int, slot: int) -> None:
        self._holds[slot] = index
        data = self._host[index].data
        with self._copying():
            if self._on_gpu:
                self._stream.wait_event(self._used[slot])
            self._buffers[slot][: len(data)].copy_(data, non_blocking=True)
            if self._on_gpu:
                self._copied[slot].record(self._stream)

    def _leave(self, index: int, block: nn.Module, args: Any, output: Any) -> None:
        slot = self._holds.index(index)
        self._idle[slot] = True
        if self._on_gpu:
            self._used[slot].record(torch.cuda.current_stream(self._device))
        self._release(self._host[index])

    def _release(self, block: HostBlock) -> None:
        for weight in block.weights:
            weight.parameter.data = torch.empty(0, dtype=weight.dtype, device=self._device)

    def _copying(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream) if self._on_gpu else nullcontext()
