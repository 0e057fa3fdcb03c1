"""Around every request: its id, the origin check, the access log, and the last net for errors."""

import json
import logging
import re
import secrets
import time
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sglang.multimodal_gen.configs.http_args import HttpArgs
from sglang.multimodal_gen.runtime.entrypoints.http_errors import ApiError, unforeseen
from sglang.multimodal_gen.runtime.entrypoints.server_metrics import ServerMetrics

access_log = logging.getLogger("sglang.access")
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
TIMED_ROUTES = ("/v1/images/generations", "/v1/images/edits")


class HttpGate:
    """ASGI middleware, the outermost one."""

    def __init__(self, app: ASGIApp, args: HttpArgs, metrics: ServerMetrics) -> None:
        self._app, self._args, self._metrics = app, args, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection event of uvicorn's."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, send)
        try:
            self._check(exchange)
            await self._app(exchange.scope, receive, exchange.send)
        except ApiError as error:
            await exchange.fail(error, receive)
        except ClientDisconnect:
            exchange.state["error_code"] = "client_disconnected"
        except Exception as error:  # the last net: logged, and answered in the one shape
            await exchange.fail(unforeseen(error), receive)
        finally:
            self._record(exchange)

    def _check(self, exchange: "_Exchange") -> None:
        asked = exchange.headers.get("x-request-id")
        if asked is not None:
            if not REQUEST_ID.fullmatch(asked):
                text = "X-Request-Id: expected 1 to 128 letters, digits or ._:-"
                raise ApiError(400, text, "invalid_request_id", "X-Request-Id")
            exchange.state["request_id"] = asked
        origin = exchange.headers.get("origin")
        if origin is not None and not self._allows(origin, exchange.headers.get("host", "")):
            text = f"pages of {origin[:80]!r} may not call this server; see --allowed-origins"
            raise ApiError(403, text, "origin_not_allowed", "Origin")

    def _allows(self, origin: str, host: str) -> bool:
        """A page of this very server may call it, and those that the operator named."""
        allowed = self._args.allowed_origins
        return "*" in allowed or origin in allowed or _host_of(origin) == host

    def _record(self, exchange: "_Exchange") -> None:
        seconds, status = time.perf_counter() - exchange.start, exchange.status
        method, route = exchange.method, exchange.route
        self._metrics.answers.labels(method, route, status).inc()
        if route in TIMED_ROUTES:
            self._metrics.latency.labels(route, status).observe(seconds)
        if access_log.isEnabledFor(logging.INFO):
            access_log.info(json.dumps(self._line(exchange, seconds)))

    def _line(self, exchange: "_Exchange", seconds: float) -> dict[str, Any]:
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "request_id": exchange.state["request_id"],
            "client": (exchange.scope.get("client") or ("",))[0],
            "method": exchange.method,
            "path": exchange.scope["path"][:200],
            "status": exchange.status,
            "seconds": round(seconds, 4),
        }
        if "error_code" in exchange.state:
            line["error"] = exchange.state["error_code"]
        job = exchange.state.get("asked")
        if job is not None and self._args.log_requests:
            line["asked"] = job.loggable()
        return line


class _Exchange:
    """One request and what has been answered so far."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._asked, self._send = scope["method"], send
        # HEAD is GET for the routes; uvicorn, who sees the scope as it came, sends no body.
        self.scope = {**scope, "method": "GET"} if self._asked == "HEAD" else scope
        self.headers = Headers(scope=scope)
        self.start = time.perf_counter()
        self.status = 0  # nothing answered
        self.state: dict[str, Any] = self.scope.setdefault("state", {})
        self.state["request_id"] = secrets.token_hex(16)

    @property
    def method(self) -> str:
        """Of a fixed set, so that a stranger cannot fill the metrics."""
        return self._asked if self._asked in ("GET", "POST", "HEAD", "OPTIONS") else "other"

    @property
    def route(self) -> str:
        """The pattern of the path, or "other"."""
        return getattr(self.scope.get("route"), "path", "other")

    async def send(self, message: Message) -> None:
        """Pass a message on; adds the request's id."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message)["X-Request-Id"] = self.state["request_id"]
        await self._send(message)

    async def fail(self, error: ApiError, receive: Receive) -> None:
        """Answer with an error, unless an answer has begun: then it can only be cut short."""
        self.state["error_code"] = error.code
        if not self.status:
            await error.response()(self.scope, receive, self.send)


def _host_of(origin: str) -> str:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""
