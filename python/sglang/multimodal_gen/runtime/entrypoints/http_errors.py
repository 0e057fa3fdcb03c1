"""Every answer that is no success has one shape: {"error": {message, type, param, code}}."""

import json
import logging
import math
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from sglang.multimodal_gen.configs.validation import InvalidParameter

logger = logging.getLogger(__name__)
INVALID_REQUEST, SERVER_ERROR = "invalid_request_error", "server_error"
MAX_MESSAGE = 500  # characters


@dataclass
class ApiError(Exception):
    """An error as the client sees it. `retry` False tells clients not to repeat the request."""

    status: int
    message: str
    code: str
    param: str | None = None
    retry_after: float | None = None  # seconds
    retry: bool = True
    allow: str | None = None  # methods, of a 405

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object of the answer."""
        kind = INVALID_REQUEST if self.status < 500 else SERVER_ERROR
        kind = "rate_limit_error" if self.status == 429 else kind
        message = self.message if len(self.message) <= MAX_MESSAGE else _cut(self.message)
        error = {"message": message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    @property
    def headers(self) -> dict[str, str]:
        """Headers beside the content type."""
        headers = {}
        if self.retry_after is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after)))
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if not self.retry:  # the official OpenAI clients repeat 409 and 5xx unless told not to
            headers["x-should-retry"] = "false"
        if self.allow is not None:
            headers["Allow"] = self.allow
        return headers

    def response(self) -> Response:
        """The whole answer."""
        return json_response(self.body, self.status, self.headers)


def json_response(
    content: Any, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """JSON in ASCII, so that lone surrogates of a request cannot break its answer."""
    return Response(to_json(content), status, headers, "application/json")


def to_json(content: Any) -> bytes:
    """`content` as compact JSON in ASCII."""
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode("ascii")


def bad_request(error: InvalidParameter) -> ApiError:
    """What a refused parameter is over HTTP: a 400 that names it."""
    return ApiError(400, str(error), "invalid_parameter", error.field)


def install_error_handlers(app: FastAPI) -> None:
    """Answer the errors of routes in the one shape. What no route foresaw is the gate's."""
    app.add_exception_handler(ApiError, _answer)
    app.add_exception_handler(InvalidParameter, lambda r, error: _answer(r, bad_request(error)))
    app.add_exception_handler(HTTPException, _of_framework)


def _answer(request: Request, error: ApiError) -> Response:
    request.state.error_code = error.code  # for the access log
    return error.response()


def unforeseen(error: Exception) -> ApiError:
    """A fault of this server: logged with its traceback, told without."""
    logger.error("unforeseen error", exc_info=error)
    text = "internal error; the server's log says more"
    return ApiError(500, text, "internal_error", retry=False)


def _of_framework(request: Request, error: HTTPException) -> Response:
    path = request.url.path[:80]
    if error.status_code == 404:
        return _answer(request, ApiError(404, f"no such path: {path}", "not_found"))
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        text = f"{request.method[:16]} is not allowed on {path}; allowed: {allowed}"
        return _answer(request, ApiError(405, text, "method_not_allowed", allow=allowed))
    return _answer(request, ApiError(error.status_code, str(error.detail), "bad_request"))


def _cut(text: str) -> str:
    return text[: MAX_MESSAGE - 3] + "..."
