"""uvicorn's HTTP/1.1, with bytes that are no HTTP refused in the shape of every other error, and
with an end to connections that ask for nothing."""

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from sglang.multimodal_gen.runtime.entrypoints.http_errors import ApiError, to_json

REQUEST_WAIT_S = 30.0  # for the next request, its headers whole


class HttpProtocol(H11Protocol):
    """One connection of a client."""

    _end: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """The client has so long for its first request. uvicorn would wait for ever."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Bytes buy no time, only a request does: one byte a second is no request."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """The next request may come, in its time; so must the rest of a body that was refused."""
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """The end."""
        super().connection_lost(exc)
        self._stop_watch()

    def send_400_response(self, msg: str) -> None:
        """Answer what could not be parsed, and close: nothing after it could be either."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):  # else it has its answer
            self._send_error(ApiError(400, msg, "invalid_http"))
        self.transport.close()

    def _send_error(self, error: ApiError) -> None:
        body = to_json(error.body)
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        events = (
            h11.Response(status_code=error.status, headers=headers),
            h11.Data(data=body),
            h11.EndOfMessage(),
        )
        for event in events:
            self.transport.write(self.conn.send(event) or b"")

    def _watch(self) -> None:
        """Close the connection in a while, unless an answer is on its way."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_watch()
        elif self._end is None and not self.transport.is_closing():
            self._end = self.loop.call_later(REQUEST_WAIT_S, self.transport.close)

    def _stop_watch(self) -> None:
        if self._end is not None:
            self._end.cancel()
            self._end = None
