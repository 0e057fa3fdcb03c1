"""One replica on Ray Serve: an engine, as an actor. Ray imports this; it imports no Ray."""

import os
import platform
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from sglang.multimodal_gen.configs.model_specs import ModelSpec
from sglang.multimodal_gen.configs.server_args import ServerArgs
from sglang.multimodal_gen.runtime.managers.engine_client import EngineClient
from sglang.multimodal_gen.runtime.managers.engine_state import EngineState
from sglang.multimodal_gen.runtime.managers.errors import ENGINE_ERRORS, EngineUnavailable
from sglang.multimodal_gen.runtime.managers.messages import Event, GenerateReply, GenerateRequest

ONGOING = 2  # requests of a replica: one at work and the next, so that it never waits for its next
GATHER_S = 0.2  # at most that an event waits for the next one: a message costs some 3 ms of CPU
Said = Event | GenerateReply | Exception  # the last of a request is one of the last two


@dataclass(frozen=True)
class ReplicaInfo:
    """What a replica says of itself."""

    node: str  # the machine's name
    pid: int  # of the actor
    worker_pid: int
    device: str
    spec: ModelSpec


class Replica:
    """An engine whose life is the replica's: Ray Serve replaces both when the worker dies.

    request_timeout: seconds, as of `EngineClient`. Raises EngineUnavailable when the model does
    not load.
    """

    async def __init__(self, args: ServerArgs, request_timeout: float) -> None:
        self._engine = EngineClient(args, max_queue=ONGOING, request_timeout=request_timeout)
        self._lost: str | None = None  # why the worker is gone
        await self._engine.start()
        try:
            await self._engine.wait_ready()
        except EngineUnavailable:
            await self._engine.close()
            raise

    async def generate(self, request: GenerateRequest) -> AsyncIterator[list[Said]]:
        """The events of a request, in order, and last its reply or the error that ended it.

        Those of quick steps come several at once. A caller who stops reading cancels the request.
        """
        try:
            handle = self._engine.submit(
                request.params, request_id=request.request_id, previews=request.previews
            )
        except ENGINE_ERRORS as error:
            yield [error]
            return
        events: list[Said] = []
        try:
            sent = 0.0
            async for event in handle.events():
                events.append(event)
                if time.monotonic() - sent > GATHER_S:
                    yield events
                    events, sent = [], time.monotonic()
            yield [*events, await handle.result()]
        except ENGINE_ERRORS as error:
            yield [*events, error]
        finally:
            handle.cancel()

    async def check_health(self) -> None:
        """Called by Ray Serve. Raises once the worker is gone; no second one is started here."""
        if self._lost is None and self._engine.state is not EngineState.READY:
            self._lost = self._engine.detail
            await self._engine.close()
        if self._lost is not None:
            raise EngineUnavailable(self._lost)

    async def about(self) -> ReplicaInfo:
        """Where it runs, and with what."""
        device = self._engine.snapshot().device
        return ReplicaInfo(
            platform.node(), os.getpid(), self._engine.worker_pid, device, self._engine.spec
        )

    async def __del__(self) -> None:
        """Called by Ray Serve when the last request has ended."""
        await self._engine.close()
