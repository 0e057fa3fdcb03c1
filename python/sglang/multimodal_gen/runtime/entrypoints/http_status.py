"""Models, health, server information and metrics."""

import dataclasses
import time
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse

from sglang.multimodal_gen.configs.sampling_params import SamplingParams
from sglang.multimodal_gen.runtime.entrypoints import openapi_schema
from sglang.multimodal_gen.runtime.entrypoints.engine_errors import RESTART_S
from sglang.multimodal_gen.runtime.entrypoints.http_errors import ApiError, json_response
from sglang.multimodal_gen.runtime.entrypoints.openai_protocol import SAMPLING_NAMES
from sglang.multimodal_gen.runtime.entrypoints.server_context import ServerContext, context_of
from sglang.multimodal_gen.runtime.managers.engine_state import EngineState
from sglang.multimodal_gen.runtime.managers.errors import ENGINE_ERRORS
from sglang.multimodal_gen.version import package_version

STARTED = int(time.time())
CANARY_SIDE = 256  # pixels, at most, of the picture of /health_generate

open_router = APIRouter()  # no key is asked for
router = APIRouter()


@open_router.get("/health", responses=openapi_schema.answers(None, 503))
async def health(request: Request) -> Response:
    """200 once pictures are made, else 503 with the reason."""
    engine = context_of(request).engine
    if engine.state is not EngineState.READY:
        raise ApiError(503, engine.detail, engine.state.value, retry_after=RESTART_S)
    replicas = engine.snapshot().replicas
    return json_response(
        {"status": engine.state.value} | ({"replicas": replicas} if replicas else {})
    )


@router.get("/health_generate", responses=openapi_schema.answers(None, 401, 429, 500, 503, 504))
async def health_generate(request: Request) -> Response:
    """Really make a small picture in one step, through the queue."""
    context = context_of(request)
    handle = context.submit(_canary(context), request.state.request_id)
    try:
        reply = await handle.result()
    except ENGINE_ERRORS as error:
        raise context.api_error(error) from error
    return json_response({"status": "ready", "seconds": round(reply.seconds, 4)})


@router.get("/v1/models", responses=openapi_schema.answers(None, 401))
async def models(request: Request) -> Response:
    """The one model that is served."""
    return json_response({"object": "list", "data": [_model(context_of(request))]})


@router.get("/v1/models/{name:path}", responses=openapi_schema.answers(None, 401, 404, 503))
async def model(name: str, request: Request) -> Response:
    """The model, by a name that requests may give it."""
    context = context_of(request)
    context.served.check_name(name)
    return json_response(_model(context))


@router.get("/server_info", responses=openapi_schema.answers(None, 401))
async def server_info(request: Request) -> Response:
    """Settings, defaults, limits and the state of the engine."""
    context = context_of(request)
    http = dataclasses.asdict(context.http_args) | {"api_key": None}
    engine = context.engine
    now = {"state": engine.state.value, "worker_pid": engine.worker_pid}
    return json_response(
        {
            "version": package_version(),
            "model": context.model_name,
            "defaults": _defaults(context),
            "abilities": _abilities(context),
            "server_args": dataclasses.asdict(context.server_args),
            "http_args": http | {"needs_key": context.http_args.api_key is not None},
            "engine": dataclasses.asdict(engine.snapshot()) | now,
            "images_kept": len(context.store),
        }
    )


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Metrics in Prometheus' text format."""
    text = context_of(request).metrics.text()
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


def _model(context: ServerContext) -> dict[str, Any]:
    return {
        "id": context.model_name,
        "object": "model",
        "created": STARTED,
        "owned_by": "sglang",
        "defaults": _defaults(context),
        "abilities": _abilities(context),
    }


def _defaults(context: ServerContext) -> dict[str, Any] | None:
    """What a request gets for what it leaves out; None while the model is not known."""
    try:
        params = SamplingParams(prompt="").fit(context.served.spec)
    except ApiError:
        return None
    names = [name for name in SAMPLING_NAMES if name != "prompt"]
    return {name: getattr(params, name) for name in names}


def _abilities(context: ServerContext) -> dict[str, Any] | None:
    """What the model can do; None while it is not known."""
    try:
        spec = context.served.spec
    except ApiError:
        return None
    return {
        "edits": spec.edits,
        "max_condition_images": spec.max_condition_images if spec.edits else 0,
        "size_multiple": spec.size_multiple,
        "prompt_enhancer": spec.has_prompt_enhancer,
    }


def _canary(context: ServerContext) -> SamplingParams:
    spec = context.served.spec
    side = min(spec.width, spec.height, CANARY_SIDE // spec.size_multiple * spec.size_multiple)
    asked = SamplingParams(prompt="a red apple", width=side, height=side, num_inference_steps=1)
    return asked.fit(spec)
