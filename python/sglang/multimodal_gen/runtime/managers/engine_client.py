"""The engine as the server's event loop sees it: a bounded queue before one worker process."""

import asyncio
import logging
from typing import Any

from sglang.multimodal_gen.configs.server_args import ServerArgs
from sglang.multimodal_gen.runtime.managers.engine import Engine
from sglang.multimodal_gen.runtime.managers.engine_state import EngineState
from sglang.multimodal_gen.runtime.managers.errors import exception_of
from sglang.multimodal_gen.runtime.managers.messages import (
    Preview,
    Progress,
    RequestEnded,
    WorkerFailure,
    WorkerReady,
)
from sglang.multimodal_gen.runtime.managers.request_queue import RequestQueue
from sglang.multimodal_gen.runtime.managers.worker_link import WorkerLink

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 7200.0  # a hub model's download is part of a start
FIRST_BACK_OFF_S, MAX_BACK_OFF_S = 0.5, 30.0
MAX_FIRST_STARTS = 3  # of a worker that dies without a word before any was ready


class EngineClient(Engine):
    """One worker process, started again when it dies, and the requests for it.

    max_queue: how many requests may wait behind the running one. request_timeout: seconds from
    `submit` to the end.
    """

    def __init__(
        self, args: ServerArgs, *, max_queue: int, request_timeout: float, warmup: bool = True
    ) -> None:
        requests = RequestQueue(
            max_queue,
            request_timeout,
            send=lambda message: self._link.send(message),
            kill=lambda: self._link.kill(),
        )
        super().__init__(args, requests, "the model is not loaded yet")
        self._args, self._warmup = args, warmup
        self._link: WorkerLink | None = None
        self._start_timer: asyncio.TimerHandle | None = None
        self._start_failure: WorkerFailure | None = None

    @property
    def worker_pid(self) -> int | None:
        """The process id of the worker, or None before the first."""
        return self._link and self._link.pid

    def _start_error(self) -> Exception | None:
        return self._start_failure and exception_of(self._start_failure)

    async def _close_workers(self) -> None:
        if self._link is not None:
            await self._link.close()

    async def _supervise(self) -> None:
        """Keep a worker alive until the engine stops."""
        try:
            failures = 0
            while self._state is not EngineState.STOPPED:
                finished_before = self._requests.tally.requests["finished"]
                how_it_ended = await self._one_life()
                useful = self._requests.tally.requests["finished"] > finished_before
                failures = 1 if useful else failures + 1
                self._on_death(how_it_ended, failures)
                if self._state is not EngineState.STOPPED:
                    await asyncio.sleep(min(FIRST_BACK_OFF_S * 2 ** (failures - 1), MAX_BACK_OFF_S))
                    self._restarts += 1
        finally:
            self._stop("the engine's supervisor ended")

    async def _one_life(self) -> str:
        """Start a worker and wait for its end. Returns how it ended."""
        self._start_failure = None
        try:
            self._link = WorkerLink(self._args, self._warmup, self._receive)
        except OSError as error:
            return f"no worker process could be started: {error}"
        loop = asyncio.get_running_loop()
        self._start_timer = loop.call_later(START_TIMEOUT_S, self._link.kill)
        try:
            return await asyncio.shield(self._link.ended)
        finally:
            self._start_timer.cancel()

    def _on_death(self, how_it_ended: str, failures: int) -> None:
        reason = str(self._start_error() or how_it_ended)
        logger.error("%s", reason)
        never_ready = self._requests.tally.device is None
        hopeless = never_ready and (self._start_failure or failures >= MAX_FIRST_STARTS)
        if hopeless or self._state is EngineState.DRAINING:
            self._stop(reason)
        elif self._state is not EngineState.STOPPED:
            self._settled.clear()
            self._enter(EngineState.RESTARTING, f"{reason}; the engine is started again")
        self._requests.fail_all(reason)

    def _receive(self, message: Any) -> None:
        """One message of the worker."""
        if self._state is EngineState.STOPPED:
            return  # every request has ended, and the worker is about to
        match message:
            case Progress() if not self._settled.is_set():
                self._detail = f"loading: {message.label} ({message.done} of {message.total})"
            case Progress() | Preview():
                self._requests.on_event(message)
            case RequestEnded():
                self._requests.on_ended(message)
            case WorkerReady():
                self._on_ready(message)
            case WorkerFailure():
                self._start_failure = message
            case _:
                raise AssertionError(f"unknown message {type(message).__name__}")

    def _on_ready(self, message: WorkerReady) -> None:
        self._start_timer.cancel()
        self._spec = message.spec
        self._requests.tally.on_ready(message)
        if self._state in (EngineState.LOADING, EngineState.RESTARTING):
            self._enter(EngineState.READY, f"ready on {message.device}")
            self._settled.set()
