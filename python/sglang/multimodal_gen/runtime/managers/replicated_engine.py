"""Many engines behind one: the interface of `EngineClient`, on Ray Serve.

The server accepts, counts, cancels and keeps pictures, as for one engine; Ray Serve picks the
replica. A request whose replica dies is asked again: its bytes depend on nothing but the request.
"""

import asyncio
import logging
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from sglang.multimodal_gen.configs.server_args import ServerArgs
from sglang.multimodal_gen.runtime.managers.engine import Engine
from sglang.multimodal_gen.runtime.managers.engine_state import EngineSnapshot, EngineState
from sglang.multimodal_gen.runtime.managers.errors import EngineUnavailable
from sglang.multimodal_gen.runtime.managers.repeated_requests import RepeatedRequests
from sglang.multimodal_gen.runtime.managers.replica import ReplicaInfo
from sglang.multimodal_gen.runtime.managers.replica_cluster import ClusterStatus, ReplicaCluster

logger = logging.getLogger(__name__)

T = TypeVar("T")
POLL_S, LOADING_POLL_S = 2.0, 0.5  # between two looks at the replicas; one costs some 40 ms of CPU


class ReplicatedEngine(Engine):
    """`cluster` is this engine's to start and to close; the rest as of `EngineClient`, with
    repeats within the request's time. Ready while one replica runs; first once all do."""

    def __init__(
        self, args: ServerArgs, cluster: ReplicaCluster, *, max_queue: int, request_timeout: float
    ) -> None:
        requests = RepeatedRequests(cluster.ask, max_queue, request_timeout)
        super().__init__(args, requests, "the replicas are not started yet")
        self._cluster = cluster
        self._status = ClusterStatus({}, settled=False, failed=False, message="")
        self._about: list[ReplicaInfo] = []
        self._wants_restart = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "sglang-ray")

    async def start(self) -> None:
        """Start the replicas and return at once; the state says when they are ready."""
        await super().start()
        self._supervisor.add_done_callback(_tell_of_faults)

    @property
    def worker_pid(self) -> int | None:
        """The process id of some replica's worker, on its machine; None before the first."""
        return self._about[0].worker_pid if self._about else None

    def restart(self) -> None:
        """Replace the replicas one after another; those that run meanwhile go on answering."""
        self._wants_restart.set()

    def snapshot(self) -> EngineSnapshot:
        """Figures of this moment, over all replicas."""
        own = {"replicas": dict(self._status.states), "repeats": self._requests.repeats}
        return replace(super().snapshot(), **own)

    async def _close_workers(self) -> None:
        await self._in_thread(self._cluster.close)

    async def _in_thread(self, work: Callable[..., T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _supervise(self) -> None:
        """Deploy, and look after the replicas until the engine stops."""
        try:
            await self._in_thread(self._cluster.connect)
            _take_back_sigterm()
            await self._in_thread(self._cluster.deploy)
            while self._state is not EngineState.STOPPED:
                await self._look()
                await self._maybe_restart()
        except EngineUnavailable as error:
            logger.error("%s", error)
            self._stop(str(error))
        finally:
            self._stop("the engine's supervisor ended")

    async def _look(self) -> None:
        before, self._status = self._status, await self._in_thread(self._cluster.status)
        running = self._status.states.get("running", 0)
        self._requests.at_work = running
        if self._settled.is_set():
            self._restarts += max(0, running - before.states.get("running", 0))
            self._follow(running)
            if self._status.failed and not before.failed:
                logger.error("the restart failed, old replicas go on: %s", self._status.message)
        if running and (before.states != self._status.states or len(self._about) != running):
            await self._learn()
        if not self._settled.is_set():
            self._on_start(running)

    def _on_start(self, running: int) -> None:
        """The first start goes on, or it has ended well or badly."""
        if self._status.failed:
            self._stop(self._status.message)
        elif self._status.settled and self._about:
            self._follow(running)
            self._settled.set()

    async def _learn(self) -> None:
        """Ask the replicas where they run, and with what."""
        self._about = await self._in_thread(self._cluster.about) or self._about
        if self._about:
            self._spec = self._about[0].spec
            self._requests.tally.device = self._about[0].device

    def _follow(self, running: int) -> None:
        """Enter the state of `running` replicas, unless the end has begun."""
        states = ", ".join(f"{count} {state}" for state, count in self._status.states.items())
        state = EngineState.READY if running else EngineState.RESTARTING
        if self._state in (EngineState.DRAINING, EngineState.STOPPED):
            return
        detail = f"replicas: {states or 'none'}"
        if (state, detail) != (self._state, self._detail):
            self._enter(state, detail)

    async def _maybe_restart(self) -> None:
        """Wait for the next look, or for a restart to do."""
        pause = POLL_S if self._settled.is_set() else LOADING_POLL_S
        try:
            await asyncio.wait_for(self._wants_restart.wait(), pause)
        except TimeoutError:
            return
        self._wants_restart.clear()
        try:
            await self._in_thread(self._cluster.deploy)
        except EngineUnavailable as error:
            logger.error("no restart: %s", error)


def _take_back_sigterm() -> None:
    """Ray has put a handler before Python's that prints a stack trace as if of a crash."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
        signal.siginterrupt(signal.SIGTERM, False)  # as asyncio wants it


def _tell_of_faults(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error("unforeseen error", exc_info=task.exception())
