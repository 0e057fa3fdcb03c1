"""Rank 0's end of the further ranks: start their processes, talk to them, notice when one is lost.

Each rank is a fresh interpreter on this machine, joined by a socket pair that no other process can
reach; messages on it are objects of this package. The ranks meet for their collectives through a
file in a private folder, so no port has to be free. A process, once lost, ends all: the others are
killed, waiting collectives given up, and every later call raises the same `RankLost`.
"""

import json
import logging
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from sglang.multimodal_gen import environ
from sglang.multimodal_gen.configs.parallel_layout import ParallelLayout
from sglang.multimodal_gen.runtime.distributed import parallel_state
from sglang.multimodal_gen.runtime.distributed.parallel_state import ParallelState
from sglang.multimodal_gen.utils.private_folder import PrivateFolder

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.1  # for processes that ended and steps that take too long
EXIT_TIMEOUT_S = 5.0  # for a rank that was told to end; then it is killed
_START = (
    "import importlib, json, sys; sys.path[:] = json.loads(sys.argv[1]);"
    " importlib.import_module(sys.argv[2]).main(int(sys.argv[3]))"
)


class RankLost(RuntimeError):
    """A rank of the picture ended or does not answer; the model has to be loaded again."""


class RankProcess:
    """One further rank: its process, and the pipe to it."""

    def __init__(self, rank: int, module: str) -> None:
        """`module` is imported in the new interpreter; its `main` gets the pipe's descriptor."""
        self.rank = rank
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _START, json.dumps(sys.path), module, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self.pipe = Connection(ours.detach())

    def end(self, within_s: float) -> None:
        """Wait for the process to end by itself; then kill it."""
        try:
            self.process.wait(max(0.0, within_s))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def how_it_ended(self) -> str:
        """A sentence's end about a process that is gone."""
        code = self.process.wait()
        how = signal.Signals(-code).name if code < 0 else f"status {code}"
        return f"rank {self.rank} (process {self.process.pid}) ended with {how}"


class RankProcesses:
    """All further ranks of a model."""

    def __init__(self, module: str, count: int, timeout_s: float) -> None:
        """Start ranks 1 to `count`. A step or an answer may take `timeout_s` seconds.

        Raises RuntimeError where this process already runs collectives of its own.
        """
        parallel_state.require_free()
        self._folder = PrivateFolder("sglang-ranks-")
        self.store_file = str(self._folder.path / "store")
        self.timeout_s = timeout_s
        self._joined = False
        self._lost: str | None = None
        self._lock = threading.Lock()
        self._failures: list[Any] = []  # answers of ranks that could not go on
        # of the start, then of the step at work; a load may take as long as it needs
        self._deadline: float | None = time.monotonic() + timeout_s
        self._closing = threading.Event()
        self._ranks = [RankProcess(rank, module) for rank in range(1, count + 1)]
        threading.Thread(target=self._watch, name="sglang-ranks", daemon=True).start()

    @property
    def pids(self) -> list[int]:
        """Of the ranks' processes, rank 1 first."""
        return [rank.process.pid for rank in self._ranks]

    def join(self, layout: ParallelLayout, device: torch.device) -> ParallelState:
        """Meet the other ranks, as rank 0, and end this process's part when they are closed."""
        state = parallel_state.join(0, layout, device, self.store_file, self.timeout_s)
        self._joined = True
        return state

    def send(self, messages: Sequence[Any]) -> None:
        """`messages[i]` to rank i + 1. Raises RankLost."""
        self.check()
        for rank, message in zip(self._ranks, messages, strict=True):
            try:
                rank.pipe.send(message)
            except OSError as error:
                raise self._gone(rank) from error

    def send_all(self, message: Any) -> None:
        """The same message to every rank; the next, or `answers`, must come within the time-out.

        Raises RankLost.
        """
        self._deadline = time.monotonic() + self.timeout_s
        self.send([message] * len(self._ranks))

    def answers(self) -> list[Any]:
        """One message of every rank, rank 1 first. Raises RankLost, as when one does not come."""
        try:
            return [self._answer(rank) for rank in self._ranks]
        finally:
            self._deadline = None

    def check(self) -> None:
        """Raise RankLost when a rank is known to be lost."""
        if self._lost is not None:
            raise self._loss()

    def wait_for_loss(self) -> None:
        """After an error that a lost rank may have caused: raise RankLost as soon as one is known
        to be lost; return when all live on."""
        for _ in range(10):
            self.check()
            time.sleep(LOOK_EVERY_S)

    def give_up(self, reason: str) -> None:
        """End all ranks because of `reason`; every later call raises RankLost with it."""
        with self._lock:
            if self._lost is not None:
                return
            self._lost = reason
        for rank in self._ranks:
            rank.process.kill()
        if self._joined:
            parallel_state.abort()

    def close(self) -> None:
        """End every process; none is left on return. Can be called twice."""
        if self._closing.is_set():
            return
        self._closing.set()
        for rank in self._ranks:
            rank.pipe.close()  # the end of the file tells it to end
        if self._joined:
            parallel_state.leave()
        deadline = time.monotonic() + EXIT_TIMEOUT_S
        for rank in self._ranks:
            rank.end(deadline - time.monotonic())
        self._folder.remove()

    def _answer(self, rank: RankProcess) -> Any:
        try:
            while not rank.pipe.poll(LOOK_EVERY_S):
                self.check()
            return rank.pipe.recv()
        except (EOFError, OSError) as error:
            raise self._gone(rank) from error

    def _gone(self, rank: RankProcess) -> RankLost:
        rank.end(EXIT_TIMEOUT_S)  # it has closed its pipe
        self._give_up_dead()
        return self._loss()

    def _loss(self) -> RankLost:
        """What is known of the loss, with the first failure that a rank has told of."""
        for rank in self._ranks:
            self._failures += filter(_failure, _unread(rank.pipe))
        told = min(self._failures, key=lambda answer: answer.failed_at, default=None)
        cause = f"\n{told.failure.rstrip()}\n" if told else ""
        return RankLost(f"{self._lost};{cause} load the model again")

    def _give_up_dead(self) -> None:
        """A rank that was killed is the cause; one that failed may have failed by its loss."""
        dead = [rank for rank in self._ranks if rank.process.poll() is not None]
        if dead:
            self.give_up(min(dead, key=lambda rank: rank.process.returncode).how_it_ended())

    def _watch(self) -> None:
        """The watching thread."""
        while not self._closing.wait(LOOK_EVERY_S):
            self._give_up_dead()
            if self._deadline is not None and time.monotonic() > self._deadline:
                limit = f"{self.timeout_s:g} s ({environ.COLLECTIVE_TIMEOUT.name})"
                self.give_up(f"a step or an answer took longer than {limit}")
            if self._lost is not None:
                logger.error("%s: the generator has ended", self._lost)
                return


def _failure(message: Any) -> str | None:
    return getattr(message, "failure", None)


def _unread(pipe: Connection) -> Iterator[Any]:
    try:
        while pipe.poll():
            yield pipe.recv()
    except (EOFError, OSError):
        return
