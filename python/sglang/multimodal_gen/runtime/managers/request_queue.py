"""Requests in the order they came: one at the worker, a bounded number behind it."""

import asyncio
import math
from collections import deque
from collections.abc import Callable

from sglang.multimodal_gen.configs.validation import InvalidParameter
from sglang.multimodal_gen.runtime.managers.engine_state import EngineTally
from sglang.multimodal_gen.runtime.managers.errors import (
    EngineFailed,
    QueueFull,
    RequestCancelled,
    RequestTimedOut,
    WorkerDied,
    exception_of,
)
from sglang.multimodal_gen.runtime.managers.messages import (
    CancelRequest,
    GenerateReply,
    GenerateRequest,
    Preview,
    Progress,
    RequestEnded,
)
from sglang.multimodal_gen.runtime.managers.request_handle import RequestHandle

CANCEL_TIMEOUT_S = 120.0  # for one step, also of a large picture on a CPU; then the worker hangs
STATUS = {
    GenerateReply: "finished",
    InvalidParameter: "invalid",
    RequestCancelled: "cancelled",
    RequestTimedOut: "timed_out",
    EngineFailed: "failed",
    WorkerDied: "worker_died",
}


class RequestQueue:
    """First come, first served. Belongs to one event loop.

    send: gives the worker a message. kill: ends a worker that does not answer. A worker may be
    replaced behind the two once `fail_all` was called. `idle` is set while there is no request.
    """

    def __init__(
        self,
        max_waiting: int,
        timeout_s: float,
        send: Callable[[GenerateRequest | CancelRequest], None],
        kill: Callable[[], None],
    ) -> None:
        self.tally = EngineTally()
        self.idle = asyncio.Event()
        self.idle.set()
        self._max_waiting, self._timeout_s = max_waiting, timeout_s
        self._send, self._kill = send, kill
        self._waiting: deque[RequestHandle] = deque()
        self._running: RequestHandle | None = None
        self._kill_timer: asyncio.TimerHandle | None = None

    @property
    def depth(self) -> int:
        """How many requests wait."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """How many requests the worker is at: 0 or 1. A stopped one counts until its step ends."""
        return int(self._running is not None)

    def submit(self, request: GenerateRequest) -> RequestHandle:
        """Send the request, or let it wait. Raises QueueFull."""
        if self._running is not None and self.depth >= self._max_waiting:
            self.tally.requests["refused"] += 1
            raise QueueFull(self.depth, max(1, math.ceil(self.tally.usual_seconds)))
        handle = RequestHandle(request, self._timeout_s, self._stop)
        self._waiting.append(handle)
        self._advance()
        return handle

    def on_event(self, event: Progress | Preview) -> None:
        """The worker went on with the running request."""
        if self._running is not None:
            self._running.tell(event)

    def on_ended(self, message: RequestEnded) -> None:
        """The worker is done with the running request."""
        handle = self._take_running()
        assert handle is not None and handle.request_id == message.request_id, message.request_id
        if not handle.ended:
            self._finish(handle, message.reply or exception_of(message.failure))
        self._advance()

    def fail_all(self, reason: str) -> None:
        """The worker is gone, and with it every request that it had or would have had."""
        handles = [self._take_running(), *self._waiting]
        self._waiting.clear()
        for handle in handles:
            if handle is not None and not handle.ended:
                self._finish(handle, WorkerDied(reason))
        self._advance()

    def _advance(self) -> None:
        if self._running is None and self._waiting:
            self._running = self._waiting.popleft()
            self._running.begin()
            self._send(self._running.request)
        self.idle.clear() if self._running is not None else self.idle.set()

    def _stop(self, handle: RequestHandle, error: Exception) -> None:
        if handle is self._running:
            self._send(CancelRequest())
            loop = asyncio.get_running_loop()
            self._kill_timer = loop.call_later(CANCEL_TIMEOUT_S, self._kill)
        else:
            self._waiting.remove(handle)
        self._finish(handle, error)

    def _take_running(self) -> RequestHandle | None:
        if self._kill_timer is not None:
            self._kill_timer.cancel()
        handle, self._running, self._kill_timer = self._running, None, None
        return handle

    def _finish(self, handle: RequestHandle, outcome: GenerateReply | Exception) -> None:
        if isinstance(outcome, GenerateReply):
            self.tally.on_finished(outcome)
        self.tally.requests[STATUS[type(outcome)]] += 1
        handle.finish(outcome)
