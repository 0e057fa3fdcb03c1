"""What the server asks of an engine: one worker process, or many of them on Ray Serve."""

import asyncio
import logging
from abc import ABC, abstractmethod

from sglang.multimodal_gen.configs.model_specs import ModelSpec, known_spec
from sglang.multimodal_gen.configs.sampling_params import SamplingParams
from sglang.multimodal_gen.configs.server_args import ServerArgs
from sglang.multimodal_gen.runtime.managers.engine_state import EngineSnapshot, EngineState
from sglang.multimodal_gen.runtime.managers.errors import EngineUnavailable
from sglang.multimodal_gen.runtime.managers.messages import GenerateRequest
from sglang.multimodal_gen.runtime.managers.repeated_requests import RepeatedRequests
from sglang.multimodal_gen.runtime.managers.request_handle import RequestHandle
from sglang.multimodal_gen.runtime.managers.request_queue import RequestQueue

logger = logging.getLogger(__name__)


class Engine(ABC):
    """The life of an engine and its accepted requests; how they are answered is the subclass's.

    Holds no torch object; all methods belong to one event loop.
    Raises InvalidParameter when a local model's folder or configs cannot be read.
    """

    def __init__(
        self, args: ServerArgs, requests: RequestQueue | RepeatedRequests, detail: str
    ) -> None:
        self._spec = known_spec(args.model_path, args.load_format, args.backend)
        self._requests = requests
        self._state, self._detail = EngineState.LOADING, detail
        self._settled = asyncio.Event()  # the first start has ended, well or badly
        self._supervisor: asyncio.Task[None] | None = None
        self._restarts = 0

    async def start(self) -> None:
        """Start what answers and return at once; the state says when it is ready."""
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
    @abstractmethod
    def worker_pid(self) -> int | None:
        """The process id of a worker, or None before the first."""

    async def wait_ready(self) -> None:
        """Return when requests are taken. Raises EngineUnavailable, caused by the load's error."""
        await self._settled.wait()  # the supervisor gives every start its deadline
        if self._state is not EngineState.READY:
            raise EngineUnavailable(self._detail) from self._start_error()

    def submit(
        self, params: SamplingParams, *, request_id: str, previews: int = 0
    ) -> RequestHandle:
        """Queue a request whose parameters already fit the model.

        previews: pictures of the current estimate to send for each image, evenly spaced.
        Raises EngineUnavailable, or QueueFull with the seconds after which to try again.
        """
        if self._state is not EngineState.READY:
            raise EngineUnavailable(self._detail)
        return self._requests.submit(GenerateRequest(request_id, params, previews))

    def snapshot(self) -> EngineSnapshot:
        """Figures of this moment."""
        tally = self._requests.tally
        return EngineSnapshot(
            state=self._state,
            detail=self._detail,
            queue_depth=self._requests.depth,
            running=self._requests.running,
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
                await asyncio.wait_for(self._requests.idle.wait(), timeout_s)
            except TimeoutError:
                logger.warning("requests were still running after %g s of draining", timeout_s)
        await self.close()

    async def close(self) -> None:
        """End what answers. Requests that have not ended raise WorkerDied."""
        self._stop("the engine was closed")
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait([self._supervisor])
        await self._close_workers()

    @abstractmethod
    async def _supervise(self) -> None:
        """Keep what answers alive until the engine stops."""

    @abstractmethod
    async def _close_workers(self) -> None:
        """End every process."""

    def _start_error(self) -> Exception | None:
        """What the load raised, where that is known."""
        return None

    def _stop(self, reason: str) -> None:
        if self._state is not EngineState.STOPPED:
            self._enter(EngineState.STOPPED, reason)
        self._settled.set()
        self._requests.fail_all(f"{reason} before the request ended")

    def _enter(self, state: EngineState, detail: str) -> None:
        self._state, self._detail = state, detail
        logger.info("engine %s: %s", state, detail)
