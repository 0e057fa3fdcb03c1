"""What each rank of bench_collectives.py times, all of them at once."""

import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from sglang.multimodal_gen.configs.parallel_layout import ParallelLayout
from sglang.multimodal_gen.runtime.distributed import parallel_state
from sglang.multimodal_gen.runtime.distributed.parallel_state import Axis
from sglang.multimodal_gen.runtime.distributed.ulysses import SequenceShare

TIMEOUT_S = 120.0
WARM, RUNS = 10, 50
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Shapes:
    """One model at one size."""

    streams: tuple[int, ...]  # tokens
    heads: int
    head_size: int
    velocity: tuple[int, ...]


@dataclass(frozen=True)
class CollectiveRow:
    """One row of collectives.json; `mb_sent` by one rank to the others."""

    model: str
    op: str
    ranks: int
    shape: list[int]
    mb_sent: float
    us: float
    gbps: float


@dataclass(frozen=True)
class Start:
    """What a further rank needs to join."""

    rank: int
    ranks: int
    device: str
    store_file: str
    models: dict[str, Shapes]


def main(descriptor: int) -> None:
    """A further rank: measure with the others, then end."""
    pipe = Connection(descriptor)
    pipe.send("ready")
    start: Start = pipe.recv()
    device = torch.device(start.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    layout = ParallelLayout(ulysses=start.ranks)
    state = parallel_state.join(start.rank, layout, device, start.store_file, TIMEOUT_S)
    pipe.send(len(list(measure(state.ulysses, device, start.models))))
    parallel_state.leave()
    os._exit(0)


def measure(axis: Axis, device: torch.device, models: dict[str, Shapes]) -> Iterator[CollectiveRow]:
    """The rows of every model, by all ranks at once."""
    for model, shapes in models.items():
        for op, shape, mb_sent, call in calls(shapes, axis, device):
            us = 1e6 * seconds(call, device)
            gbps = 1e3 * mb_sent / us
            yield CollectiveRow(model, op, axis.size, list(shape), mb_sent, us, gbps)


def calls(
    shapes: Shapes, axis: Axis, device: torch.device
) -> Iterator[tuple[str, tuple[int, ...], float, Callable[[], object]]]:
    """(op, shape on one rank, MB that a rank sends, call) of one model."""
    hidden, others = shapes.heads * shapes.head_size, (axis.size - 1) / axis.size
    share = SequenceShare(axis, shapes.streams, device)
    local = (1, sum(share.parts), shapes.heads, shapes.head_size)
    q, k, v = (torch.randn(local, device=device, dtype=DTYPE) for _ in range(3))

    def exchange() -> torch.Tensor:
        joint = share.heads(q, k, v)[0]
        return share.tokens(joint.flatten(2))

    yield "exchange", local, 4 * others * q.numel() * q.element_size() / 1e6, exchange

    sums = torch.zeros(1, sum(shapes.streams), hidden, device=device, dtype=DTYPE)
    sent = 2 * others * sums.numel() * sums.element_size() / 1e6
    yield "add_up", tuple(sums.shape), sent, lambda: axis.add_up(sums)

    if axis.size == 2:  # branches of guidance
        velocity = torch.randn(shapes.velocity, device=device, dtype=DTYPE)
        sent = velocity.numel() * velocity.element_size() / 1e6
        yield "guidance", shapes.velocity, sent, lambda: axis.all_gather(velocity)


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """The median of RUNS calls, each waited for, after WARM."""
    taken = []
    for _ in range(WARM + RUNS):
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[WARM:])
