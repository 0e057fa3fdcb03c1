"""Linears whose weights are cut over the ranks of an axis, and what a checkpoint loader must know.

A column-parallel linear has some of the outputs, a row-parallel one some of the inputs; the latter
adds up the parts of all ranks. A cut parameter carries its `Part`, by which the loader takes the
rank's slice of the checkpoint's full tensor.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from sglang.multimodal_gen.runtime.distributed.parallel_state import Axis


@dataclass(frozen=True)
class Part:
    """The slice of a full parameter that this rank holds.

    Axis `dim` of the full tensor is `sections` one after another, each cut into `size` equal parts
    of which rank `rank` holds its own.
    """

    dim: int
    sections: tuple[int, ...]
    rank: int
    size: int

    def of(self, full: torch.Tensor) -> torch.Tensor:
        """The rank's slice of the full tensor."""
        sections = full.split(self.sections, dim=self.dim)
        return torch.cat([s.chunk(self.size, dim=self.dim)[self.rank] for s in sections], self.dim)


def full_shape(parameter: torch.Tensor) -> torch.Size:
    """The shape that the checkpoint has a parameter in."""
    part = getattr(parameter, "part", None)
    shape = list(parameter.shape)
    if part is not None:
        shape[part.dim] = sum(part.sections)
    return torch.Size(shape)


def local_part(parameter: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    """What `parameter` holds of the checkpoint's full tensor."""
    part = getattr(parameter, "part", None)
    return full if part is None else part.of(full)


def column_parallel(linear: nn.Linear, axis: Axis) -> nn.Linear:
    """A plain linear with this rank's share of the outputs of `linear`; holds no values yet."""
    part = Part(0, (linear.out_features,), axis.rank, axis.size)
    outputs = _share_of(linear.out_features, axis)
    cut = nn.Linear(
        linear.in_features,
        outputs,
        bias=linear.bias is not None,
        device=linear.weight.device,
        dtype=linear.weight.dtype,
    )
    for parameter in cut.parameters():
        parameter.part = part
    return cut


class RowParallelLinear(nn.Module):
    """A linear with this rank's share of the inputs; the parts of all ranks are added up.

    The bias is whole on every rank and comes after the sum. Holds no values yet.
    """

    def __init__(
        self, linear: nn.Linear, axis: Axis, sections: Sequence[int] | None = None
    ) -> None:
        """`sections`: lengths of the inputs that are concatenated, each of which is cut alike."""
        super().__init__()
        sections = tuple(sections or (linear.in_features,))
        assert sum(sections) == linear.in_features, f"{sections} of {linear.in_features} inputs"
        inputs = sum(_share_of(section, axis) for section in sections)
        self.axis = axis
        self.weight = nn.Parameter(linear.weight.new_empty(linear.out_features, inputs))
        self.weight.part = Part(1, sections, axis.rank, axis.size)
        self.bias = None if linear.bias is None else nn.Parameter(torch.empty_like(linear.bias))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., inputs / ranks] -> [..., outputs], the same on every rank."""
        y = self.axis.add_up(F.linear(x, self.weight))
        return y if self.bias is None else y + self.bias


def _share_of(features: int, axis: Axis) -> int:
    assert features % axis.size == 0, f"{features} features are not {axis.size} equal parts"
    return features // axis.size
