"""Which rank this process is, and the axes along which its collectives run.

Ranks form a grid of cfg x ulysses x tp, tp fastest. A model gets its `ParallelState` when it is
built; `SINGLE` is the only rank's, whose axes run no collective. Every collective has the time-out
given to `join`.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from sglang.multimodal_gen.configs.parallel_layout import ParallelLayout

T = TypeVar("T")


@dataclass(frozen=True)
class Axis:
    """The ranks that differ from this one along one axis of the grid, in order."""

    size: int = 1
    rank: int = 0  # of this process along the axis
    group: dist.ProcessGroup | None = None  # None where the axis has one rank

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's `x`, which has the same shape and dtype everywhere."""
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x, group=self.group)
        return parts

    def all_to_all(self, send: torch.Tensor) -> torch.Tensor:
        """Row r of `send` [size, ...] goes to rank r; row r of the result came from it."""
        received = torch.empty_like(send)
        dist.all_to_all_single(received, send, group=self.group)
        return received

    def begin_all_to_all(self, send: torch.Tensor) -> Callable[[], torch.Tensor]:
        """`all_to_all`, whose result comes from the call: kernels launched before it overlap."""
        received = torch.empty_like(send)
        work = dist.all_to_all_single(received, send, group=self.group, async_op=True)

        def finish() -> torch.Tensor:
            work.wait()
            return received

        return finish

    def add_up(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's `x`, in place; the same bits on every rank."""
        dist.all_reduce(x, group=self.group)
        return x

    def share_branches(
        self, run: Callable[[T], torch.Tensor], branches: Sequence[T]
    ) -> list[torch.Tensor]:
        """`[run(branch) for branch in branches]`; several branches on several ranks: one each."""
        if self.size == 1 or len(branches) == 1:
            return [run(branch) for branch in branches]
        assert len(branches) == self.size, f"{len(branches)} branches on {self.size} ranks"
        return self.all_gather(run(branches[self.rank]))


@dataclass(frozen=True)
class ParallelState:
    """This process's place in the grid."""

    rank: int
    layout: ParallelLayout
    cfg: Axis
    ulysses: Axis
    tp: Axis


SINGLE = ParallelState(0, ParallelLayout(), Axis(), Axis(), Axis())


def world_size() -> int:
    """Ranks that this process makes pictures with; where it is 1, no forward has collectives."""
    return dist.get_world_size() if dist.is_initialized() else 1


def require_free() -> None:
    """Raise RuntimeError where this process already runs collectives: torch has one group of all
    ranks for a process."""
    if dist.is_initialized():
        raise RuntimeError(
            "num_gpus > 1: torch.distributed is already in use in this process (by another"
            " generator or by the program itself); close the other one or use another process"
        )


def join(
    rank: int, layout: ParallelLayout, device: torch.device, store_file: str, timeout_s: float
) -> ParallelState:
    """Meet the other ranks through `store_file` (NCCL on GPUs, gloo on the CPU).

    Blocks until every rank has come, at most `timeout_s` seconds. Raises like `require_free`, and
    torch's DistError on a time-out.
    """
    require_free()
    on_gpu = device.type == "cuda"
    # NCCL's own watchdog ends the whole process: rank 0, which has the same time-out, comes first.
    timeout = timedelta(seconds=2 * timeout_s if on_gpu else timeout_s)
    hook = sys.excepthook
    dist.init_process_group(
        backend="nccl" if on_gpu else "gloo",
        store=dist.FileStore(store_file, layout.world),
        rank=rank,
        world_size=layout.world,
        timeout=timeout,
        device_id=device if on_gpu else None,
    )
    sys.excepthook = hook  # torch's prefixes the caller's tracebacks, once more for every group
    return ParallelState(rank, layout, **_axes(rank, layout, timeout))


def broadcast(tensor: torch.Tensor) -> torch.Tensor:
    """Rank 0's `tensor`, in place, on every rank of the grid."""
    dist.broadcast(tensor, src=0)
    return tensor


def leave() -> None:
    """End this process's part in the grid."""
    if dist.is_initialized():
        dist.destroy_process_group()


def abort() -> None:
    """Give up NCCL's collectives, which would wait for a lost rank; from any thread. Gloo's end by
    themselves when the rank's process does."""
    if dist.is_initialized() and dist.get_backend() == "nccl":
        dist.distributed_c10d._abort_process_group()


def _axes(rank: int, layout: ParallelLayout, timeout: timedelta) -> dict[str, Axis]:
    """Every rank makes every group, in the same order, as torch asks."""
    grid = torch.arange(layout.world).view(layout.cfg, layout.ulysses, layout.tp)
    axes = {}
    for dim, name in enumerate(("cfg", "ulysses", "tp")):
        lines = grid.movedim(dim, -1).reshape(-1, grid.shape[dim]).tolist()
        axes[name] = _axis(rank, lines, timeout)
    return axes


def _axis(rank: int, lines: list[list[int]], timeout: timedelta) -> Axis:
    size = len(lines[0])
    own = next(line for line in lines if rank in line)
    if size == 1:
        return Axis()
    if len(lines) == 1:
        return Axis(size, own.index(rank), dist.group.WORLD)
    groups = [dist.new_group(line, timeout=timeout) for line in lines]
    return Axis(size, own.index(rank), groups[lines.index(own)])
