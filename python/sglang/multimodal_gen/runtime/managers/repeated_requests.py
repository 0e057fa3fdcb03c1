"""Requests to many replicas: a bounded number at once, each asked again when its replica dies."""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable

from sglang.multimodal_gen.runtime.managers.engine_state import EngineTally
from sglang.multimodal_gen.runtime.managers.errors import EngineUnavailable, QueueFull, WorkerDied
from sglang.multimodal_gen.runtime.managers.messages import (
    EmitProgress,
    GenerateReply,
    GenerateRequest,
)
from sglang.multimodal_gen.runtime.managers.request_handle import RequestHandle
from sglang.multimodal_gen.runtime.managers.request_queue import STATUS

logger = logging.getLogger(__name__)

Ask = Callable[[GenerateRequest, EmitProgress], Awaitable[GenerateReply | Exception]]
REPEAT_S = 0.2  # before a request is asked again that no replica took
MAX_DEATHS = 3  # of replicas that had the same request: then it is the request that kills them


class RepeatedRequests:
    """Belongs to one event loop. `idle` is set while there is no request.

    ask: gives some replica a request; returns its reply, or the error that ended it. `at_work`:
    how many requests the replicas make at once; the owner keeps it.
    """

    def __init__(self, ask: Ask, max_waiting: int, timeout_s: float) -> None:
        self.tally = EngineTally()
        self.idle = asyncio.Event()
        self.idle.set()
        self.at_work = 1
        self.repeats = 0  # requests asked again so far
        self._ask, self._max_waiting, self._timeout_s = ask, max_waiting, timeout_s
        self._tasks: dict[RequestHandle, asyncio.Task[None]] = {}

    @property
    def running(self) -> int:
        """How many requests the replicas are at."""
        return min(len(self._tasks), self.at_work)

    @property
    def depth(self) -> int:
        """How many requests wait, here or at a replica."""
        return len(self._tasks) - self.running

    def submit(self, request: GenerateRequest) -> RequestHandle:
        """Have the request answered. Raises QueueFull."""
        if len(self._tasks) >= self.at_work + self._max_waiting:
            self.tally.requests["refused"] += 1
            free_in_s = self.tally.usual_seconds / max(1, self.at_work)
            raise QueueFull(self.depth, max(1, math.ceil(free_in_s)))
        handle = RequestHandle(request, self._timeout_s, self._stop)
        self._tasks[handle] = asyncio.create_task(self._answer(handle))
        self.idle.clear()
        return handle

    def fail_all(self, reason: str) -> None:
        """No replica will answer any more."""
        for handle in list(self._tasks):
            self._stop(handle, WorkerDied(reason))

    async def _answer(self, handle: RequestHandle) -> None:
        """Ask until there is an answer; the handle's deadline ends this task too."""
        deaths = 0
        while True:
            outcome = await self._ask(handle.request, handle.tell)
            if isinstance(outcome, EngineUnavailable | QueueFull):
                await asyncio.sleep(REPEAT_S)  # its worker died, or it is about to end
                continue
            deaths += isinstance(outcome, WorkerDied)
            if not isinstance(outcome, WorkerDied) or deaths == MAX_DEATHS:
                return self._finish(handle, outcome)
            logger.warning("request %s is asked again: %s", handle.request_id, outcome)
            self.repeats += 1

    def _stop(self, handle: RequestHandle, error: Exception) -> None:
        self._tasks[handle].cancel()
        self._finish(handle, error)

    def _finish(self, handle: RequestHandle, outcome: GenerateReply | Exception) -> None:
        del self._tasks[handle]
        if isinstance(outcome, GenerateReply):
            self.tally.on_finished(outcome)
        self.tally.requests[STATUS[type(outcome)]] += 1
        handle.finish(outcome)
        if not self._tasks:
            self.idle.set()
