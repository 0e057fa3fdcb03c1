"""The engine as the server's event loop sees it: a bounded queue before one worker process."""

import asyncio
import logging
from typing import Any

from sglang.multimodal_gen.configs.model_specs import ModelSpec, known_spec
from sglang.multimodal_gen.configs.sampling_params import SamplingParams
from sglang.multimodal_gen.configs.server_args import ServerArgs
from sglang.multimodal_gen.runtime.managers.engine_state import EngineSnapshot, EngineState
from sglang.multimodal_gen.runtime.managers.errors import EngineUnavailable, exception_of
from sglang.multimodal_gen.runtime.managers.messages import (
    GenerateRequest,
    Preview,
    Progress,
    RequestEnded,
    WorkerFailure,
    WorkerReady,
)
from sglang.multimodal_gen.runtime.managers.request_handle import RequestHandle
from sglang.multimodal_gen.runtime.managers.request_queue import RequestQueue
from sglang.multimodal_gen.runtime.managers.worker_link import WorkerLink

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 7200.0  # a hub model's download is part of a start
FIRST_BACK_OFF_S, MAX_BACK_OFF_S = 0.5, 30.0
MAX_FIRST_STARTS = 3  # of a worker that dies without a word before any was ready


class EngineClient:
    """One worker process, started again when it dies, and the requests for it.

    max_queue: how many requests may wait behind the running one. request_timeout: seconds from
    `submit` to the end. Holds no torch object; all methods belong to one event loop.
    Raises InvalidParameter when a local model's folder or configs cannot be read.
    """

    def __init__(
        self, args: ServerArgs, *, max_queue: int, request_timeout: float, warmup: bool = True
    ) -> None:
        self._spec = known_spec(args.model_path, args.load_format, args.backend)
        self._args, self._warmup = args, warmup
        self._state, self._detail = EngineState.LOADING, "the model is not loaded yet"
        self._settled = asyncio.Event()
        self._link: WorkerLink | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._start_timer: asyncio.TimerHandle | None = None
        self._start_failure: WorkerFailure | None = None
        self._restarts = 0
        self._queue = RequestQueue(
            max_queue,
            request_timeout,
            send=lambda message: self._link.send(message),
            kill=lambda: self._link.kill(),
        )

    async def start(self) -> None:
        """Start the worker and return at once; the state says when it is ready."""
        assert self._supervisor is None, "an engine is started once"
        self._supervisor = asyncio.create_task(self._supervise())

    @property
    def state(self) -> EngineState:
        """Where the engine is in its life."""
        return self._state

    @property
    def detail(self) -> str:
        """The state in words, with the reason."""
        return self._detail

    @property
    def spec(self) -> ModelSpec:
        """The model's defaults and rules. Raises EngineUnavailable for a hub id not yet loaded."""
        if self._spec is None:
            raise EngineUnavailable(self._detail)
        return self._spec

    @property
    def worker_pid(self) -> int | None:
        """The process id of the worker, or None before the first."""
        return self._link and self._link.pid

    async def wait_ready(self) -> None:
        """Return when requests are taken. Raises EngineUnavailable, caused by the load's error."""
        await self._settled.wait()  # the supervisor gives every start its deadline
        if self._state is not EngineState.READY:
            cause = self._start_failure and exception_of(self._start_failure)
            raise EngineUnavailable(self._detail) from cause

    def submit(
        self, params: SamplingParams, *, request_id: str, previews: int = 0
    ) -> RequestHandle:
        """Queue a request whose parameters already fit the model.

        previews: pictures of the current estimate to send for each image, evenly spaced.
        Raises EngineUnavailable, or QueueFull with the seconds after which to try again.
        """
        if self._state is not EngineState.READY:
            raise EngineUnavailable(self._detail)
        return self._queue.submit(GenerateRequest(request_id, params, previews))

    def snapshot(self) -> EngineSnapshot:
        """Figures of this moment."""
        tally = self._queue.tally
        return EngineSnapshot(
            state=self._state,
            detail=self._detail,
            queue_depth=self._queue.depth,
            running=self._queue.running,
            restarts=self._restarts,
            device=tally.device,
            sites=tally.sites,
            peak_memory_mb=tally.peak_memory_mb,
            stage_seconds=dict(tally.stage_seconds),
            requests=dict(tally.requests),
        )

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, finish the accepted ones within `timeout_s`, then close."""
        if self._state is EngineState.READY:
            self._enter(EngineState.DRAINING, "the engine finishes its last requests")
            try:
                await asyncio.wait_for(self._queue.idle.wait(), timeout_s)
            except TimeoutError:
                logger.warning("requests were still running after %g s of draining", timeout_s)
        await self.close()

    async def close(self) -> None:
        """End the worker. Requests that have not ended raise WorkerDied."""
        self._stop("the engine was closed")
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait([self._supervisor])
        if self._link is not None:
            await self._link.close()

    async def _supervise(self) -> None:
        """Keep a worker alive until the engine stops."""
        try:
            failures = 0
            while self._state is not EngineState.STOPPED:
                finished_before = self._queue.tally.requests["finished"]
                how_it_ended = await self._one_life()
                useful = self._queue.tally.requests["finished"] > finished_before
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
        reason = self._start_failure.message if self._start_failure else how_it_ended
        logger.error("%s", reason)
        never_ready = self._queue.tally.device is None
        hopeless = never_ready and (self._start_failure or failures >= MAX_FIRST_STARTS)
        if hopeless or self._state is EngineState.DRAINING:
            self._stop(reason)
        elif self._state is not EngineState.STOPPED:
            self._settled.clear()
            self._enter(EngineState.RESTARTING, f"{reason}; the engine is started again")
        self._queue.fail_all(reason)

    def _receive(self, message: Any) -> None:
        """One message of the worker."""
        if self._state is EngineState.STOPPED:
            return  # every request has ended, and the worker is about to
        match message:
            case Progress() if not self._settled.is_set():
                self._detail = f"loading: {message.label} ({message.done} of {message.total})"
            case Progress() | Preview():
                self._queue.on_event(message)
            case RequestEnded():
                self._queue.on_ended(message)
            case WorkerReady():
                self._on_ready(message)
            case WorkerFailure():
                self._start_failure = message
            case _:
                raise AssertionError(f"unknown message {type(message).__name__}")

    def _on_ready(self, message: WorkerReady) -> None:
        self._start_timer.cancel()
        self._spec = message.spec
        self._queue.tally.on_ready(message)
        if self._state in (EngineState.LOADING, EngineState.RESTARTING):
            self._enter(EngineState.READY, f"ready on {message.device}")
            self._settled.set()

    def _stop(self, reason: str) -> None:
        if self._state is not EngineState.STOPPED:
            self._enter(EngineState.STOPPED, reason)
        self._settled.set()
        self._queue.fail_all(f"{reason} before the request ended")

    def _enter(self, state: EngineState, detail: str) -> None:
        self._state, self._detail = state, detail
        logger.info("engine %s: %s", state, detail)
