"""POST /v1/images/generations and /edits, GET .../content, POST .../cancel."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from sglang.multimodal_gen.runtime.entrypoints import openapi_schema
from sglang.multimodal_gen.runtime.entrypoints.http_errors import ApiError, json_response
from sglang.multimodal_gen.runtime.entrypoints.image_answers import image_item, images_response
from sglang.multimodal_gen.runtime.entrypoints.image_files import OutputError
from sglang.multimodal_gen.runtime.entrypoints.image_stream import error_event, image_events
from sglang.multimodal_gen.runtime.entrypoints.openai_protocol import ImageJob, read_job
from sglang.multimodal_gen.runtime.entrypoints.request_body import form_body, json_body
from sglang.multimodal_gen.runtime.entrypoints.server_context import ServerContext, context_of
from sglang.multimodal_gen.runtime.managers.errors import ENGINE_ERRORS
from sglang.multimodal_gen.runtime.managers.request_handle import RequestHandle

T = TypeVar("T")
router = APIRouter(prefix="/v1/images")
open_router = APIRouter(prefix="/v1/images")  # no key is asked for
_ANSWERS = openapi_schema.answers(
    openapi_schema.IMAGES, 400, 401, 404, 408, 413, 415, 429, 500, 503, 504, 507
)


@router.post(
    "/generations", responses=_ANSWERS, openapi_extra={"requestBody": openapi_schema.json_body()}
)
async def generations(request: Request) -> Response:
    """Make pictures from text."""
    context = context_of(request)
    served = context.served
    body = await json_body(request)
    job = read_job(body, served, context.http_args)
    return await _answer(request, context, job, "image_generation")


@router.post(
    "/edits", responses=_ANSWERS, openapi_extra={"requestBody": openapi_schema.form_body()}
)
async def edits(request: Request) -> Response:
    """Make pictures from text and pictures; 400 where the model cannot."""
    context = context_of(request)
    served = context.served
    values, images = await form_body(request)
    job = await context.in_upload_thread(read_job, values, served, context.http_args, images)
    return await _answer(request, context, job, "image_edit")


@open_router.get(
    "/{image_id}/content",
    response_class=Response,
    responses={
        200: {"description": "the file", "content": {"image/*": {}}},
        **{k: v for k, v in openapi_schema.answers(None, 404, 507).items() if k != 200},
    },
)
async def content(image_id: str, request: Request) -> Response:
    """Download a kept picture. The id is the secret: no key is asked for."""
    context = context_of(request)
    image = await _store_call(context, context.store.get, image_id)
    if image is None:
        kept = f"the server keeps the newest {context.http_args.retention} pictures"
        raise ApiError(404, f"no such picture, or it is gone: {kept}", "image_not_found", "id")
    headers = {"Cache-Control": "private, max-age=3600", "X-Content-Type-Options": "nosniff"}
    return Response(image.data, headers=headers, media_type=image.media_type)


@router.post("/{request_id}/cancel", responses=openapi_schema.answers(None, 401, 404))
async def cancel(request_id: str, request: Request) -> Response:
    """Cancel what runs under an X-Request-Id; it ends within one step."""
    handles = context_of(request).active.get(request_id, [])
    if not handles:
        raise ApiError(404, "no request with this id waits or runs", "request_not_found", "id")
    for handle in handles:
        handle.cancel()
    return json_response({"id": request_id, "object": "image.request", "status": "cancelled"})


async def _answer(request: Request, context: ServerContext, job: ImageJob, kind: str) -> Response:
    if job.options.response_format == "url" and not job.options.stream:
        await _store_call(context, context.store.check_writable)
    request.state.asked = job
    handle = context.submit(job.params, request.state.request_id, job.options.partial_images)
    if job.options.stream:
        return _EventStream(_events(request, context, job, kind, handle), handle)
    return await _whole(request, context, job, handle)


async def _whole(
    request: Request, context: ServerContext, job: ImageJob, handle: RequestHandle
) -> Response:
    async with _cancelled_on_disconnect(request.receive, handle):
        try:
            reply = await handle.result()
        except ENGINE_ERRORS as error:
            raise context.api_error(error) from error
    base_url, store = str(request.base_url), context.store
    data = await asyncio.gather(
        *(
            context.in_thread(image_item, image.pixels, report, job, store, base_url)
            for image, report in zip(reply.images, reply.reports, strict=True)
        )
    )
    body = await context.in_thread(images_response, data, reply, job, request.state.request_id)
    context.metrics.images.labels(job.params.output_format).inc(len(reply.images))
    headers = {"Server-Timing": _timing(reply.seconds, handle.queue_seconds)}
    return Response(body, headers=headers, media_type="application/json")


def _timing(engine_s: float, queue_s: float | None) -> str:
    """The header's value, in milliseconds."""
    timing = f"engine;dur={1e3 * engine_s:.2f}"
    return timing if queue_s is None else f"{timing}, queue;dur={1e3 * queue_s:.2f}"


async def _events(
    request: Request, context: ServerContext, job: ImageJob, kind: str, handle: RequestHandle
) -> AsyncIterator[bytes]:
    async with _cancelled_on_disconnect(request.receive, handle):
        try:
            async for chunk in image_events(context, job, kind, handle):
                yield chunk
        except ENGINE_ERRORS as error:
            answer = context.api_error(error)
            request.state.error_code = answer.code
            yield error_event(answer)


class _EventStream(StreamingResponse):
    """Server-sent events of one request, which does not outlive them."""

    def __init__(self, chunks: AsyncIterator[bytes], handle: RequestHandle) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(chunks, headers=headers, media_type="text/event-stream")
        self._handle = handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream. A client may be gone before its first byte."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._handle.cancel()


async def _store_call(context: ServerContext, work: Callable[..., T], *args: object) -> T:
    try:
        return await context.in_thread(work, *args)
    except OutputError as error:
        text = f"{error}; ask for response_format=b64_json, or free the server's image folder"
        raise ApiError(507, text, "image_store_unavailable", retry=False) from error


@asynccontextmanager
async def _cancelled_on_disconnect(receive: Receive, handle: RequestHandle) -> AsyncIterator[None]:
    """Inside, a client that goes away cancels its request."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            continue
        handle.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        handle.cancel()  # also when this server gives up; an ended request does not mind
