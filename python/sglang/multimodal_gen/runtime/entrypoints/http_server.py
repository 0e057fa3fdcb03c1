"""The FastAPI application: routes, the key, and what stands around them."""

import hmac

from fastapi import Depends, FastAPI, Request
from starlette.middleware.cors import CORSMiddleware

from sglang.multimodal_gen.runtime.entrypoints import http_images, http_playground, http_status
from sglang.multimodal_gen.runtime.entrypoints.http_errors import ApiError, install_error_handlers
from sglang.multimodal_gen.runtime.entrypoints.http_gate import HttpGate
from sglang.multimodal_gen.runtime.entrypoints.server_context import ServerContext, context_of
from sglang.multimodal_gen.version import package_version

TITLE = "sglang image generation"


def create_app(context: ServerContext) -> FastAPI:
    """The application of one server. The caller starts and closes the engine."""
    # The documentation pages of FastAPI load scripts from elsewhere; the schema stays.
    app = FastAPI(
        title=TITLE,
        version=package_version(),
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.context = context
    install_error_handlers(app)
    app.include_router(http_status.open_router)
    app.include_router(http_images.open_router)
    app.include_router(http_playground.open_router)
    for router in (http_images.router, http_status.router):
        app.include_router(router, dependencies=[Depends(_require_key)])
    origins = context.http_args.allowed_origins
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            # Whatever a page asks for: OpenAI's client has a dozen headers of its own, and what no
            # route takes is an error in the one shape.
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After", "Server-Timing"],
        )
    app.add_middleware(HttpGate, args=context.http_args, metrics=context.metrics)
    return app


async def _require_key(request: Request) -> None:
    key = context_of(request).http_args.api_key
    if key is None:
        return
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    # Compared in constant time, so that an answer's delay tells nothing of the key.
    right = hmac.compare_digest(given.strip().encode("utf-8", "replace"), key.encode())
    if scheme.lower() != "bearer" or not right:
        text = "the API key is missing or wrong; send 'Authorization: Bearer KEY'"
        raise ApiError(401, text, "invalid_api_key", "Authorization")
