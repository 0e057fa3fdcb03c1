"""uvicorn's HTTP/1.1, with bytes that are no HTTP refused in the shape of every other error."""

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from sglang.multimodal_gen.runtime.entrypoints.http_errors import ApiError, to_json


class HttpProtocol(H11Protocol):
    """One connection of a client."""

    def send_400_response(self, msg: str) -> None:
        """Answer what could not be parsed, and close: nothing after it could be either."""
        body = to_json(ApiError(400, msg, "invalid_http").body)
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        events = (
            h11.Response(status_code=400, headers=headers),
            h11.Data(data=body),
            h11.EndOfMessage(),
        )
        for event in events:
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
