"""The caller's side of one request to the engine: its events, its result, and a way to stop it."""

import asyncio
from collections.abc import AsyncIterator, Callable

from sglang.multimodal_gen.runtime.managers.errors import RequestCancelled, RequestTimedOut
from sglang.multimodal_gen.runtime.managers.messages import Event, GenerateReply, GenerateRequest

MAX_EVENTS = 4096  # kept for a caller who does not read them; then the oldest go


class RequestHandle:
    """One request, from `EngineClient.submit`. Belongs to the event loop that made it.

    on_stop: called with the handle and the error that it shall end with, when the caller cancels
        or `timeout_s` seconds have passed.
    """

    def __init__(
        self,
        request: GenerateRequest,
        timeout_s: float,
        on_stop: Callable[["RequestHandle", Exception], None],
    ) -> None:
        loop = asyncio.get_running_loop()
        self.request = request
        self.queue_seconds: float | None = None  # before a worker had it; None: not known
        self._submitted = loop.time()
        self._on_stop = on_stop
        self._events: asyncio.Queue[Event | None] = asyncio.Queue(MAX_EVENTS)
        self._future: asyncio.Future[GenerateReply] = loop.create_future()
        late = RequestTimedOut(f"the request did not end within {timeout_s:g} s")
        self._deadline = loop.call_later(timeout_s, on_stop, self, late)

    @property
    def request_id(self) -> str:
        """The id that `submit` was given."""
        return self.request.request_id

    @property
    def ended(self) -> bool:
        """Whether `result` answers at once."""
        return self._future.done()

    async def events(self) -> AsyncIterator[Event]:
        """What happens to the request, until it has ended. One reader at a time."""
        while (event := await self._events.get()) is not None:
            yield event
        self._put(None)  # for a reader who comes later

    async def result(self) -> GenerateReply:
        """The finished images.

        Raises RequestCancelled, RequestTimedOut, WorkerDied, EngineFailed or InvalidParameter. The
        caller's own cancellation leaves the request running: call `cancel` to stop it.
        """
        return await asyncio.shield(self._future)

    def cancel(self) -> None:
        """Stop the request: `result` raises RequestCancelled from now on, and the worker is free
        after the step that it is at. Does nothing to a request that has ended."""
        if not self.ended:
            self._on_stop(self, RequestCancelled("the request was cancelled"))

    def begin(self) -> None:
        """The engine's: a worker has the request now."""
        self.queue_seconds = asyncio.get_running_loop().time() - self._submitted

    def tell(self, event: Event) -> None:
        """The engine's: hand an event to the reader."""
        if not self.ended:
            self._put(event)

    def finish(self, outcome: GenerateReply | Exception) -> None:
        """The engine's: end the request, once."""
        assert not self.ended, f"request {self.request_id} ended twice"
        self._deadline.cancel()
        if isinstance(outcome, Exception):
            self._future.set_exception(outcome)
            self._future.exception()  # a caller who went away is no fault to log
        else:
            self._future.set_result(outcome)
        self._put(None)

    def _put(self, event: Event | None) -> None:
        if self._events.full():
            self._events.get_nowait()
        self._events.put_nowait(event)
