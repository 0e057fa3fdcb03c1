"""Ranks as threads of one process: the collectives of an `Axis` without any process group."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import torch

T = TypeVar("T")


@dataclass
class ThreadAxis:
    """One rank's end; the ranks of a world share `slots` and `barrier`."""

    size: int
    rank: int
    slots: list[torch.Tensor | None]
    barrier: threading.Barrier = field(repr=False)

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """As `Axis.all_gather`."""
        self.slots[self.rank] = x
        self.barrier.wait(30)
        found = [slot.clone() for slot in self.slots]
        self.barrier.wait(30)
        return found

    def all_to_all(self, send: torch.Tensor) -> torch.Tensor:
        """As `Axis.all_to_all`."""
        return torch.stack([sent[self.rank] for sent in self.all_gather(send)])

    def begin_all_to_all(self, send: torch.Tensor) -> Callable[[], torch.Tensor]:
        """As `Axis.begin_all_to_all`."""
        received = self.all_to_all(send)
        return lambda: received

    def add_up(self, x: torch.Tensor) -> torch.Tensor:
        """As `Axis.add_up`: in rank order, so that every rank has the same bits."""
        return x.copy_(sum(self.all_gather(x)))


def on_every_rank(size: int, run: Callable[[ThreadAxis], T]) -> list[T]:
    """`run(axis)` on `size` ranks at once; the results in rank order."""
    slots, barrier = [None] * size, threading.Barrier(size)
    axes = [ThreadAxis(size, rank, slots, barrier) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(torch.no_grad()(run), axes))
