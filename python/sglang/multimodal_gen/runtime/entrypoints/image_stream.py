"""Pictures as OpenAI's server-sent events; each step is a comment, which every client skips.

    : {"type": "image_generation.progress", "label": "denoise", "step": 3, "total_steps": 20}
    event: image_generation.partial_image
    data: {"type": "image_generation.partial_image", "b64_json": ..., "partial_image_index": 0, ...}
    event: image_generation.completed
    data: {"type": "image_generation.completed", "b64_json": ..., ...}

OpenAI's client hands any event with data to its user, so progress must not be one. A failure is
`event: error` with the error object that an answer would have had.
"""

from collections import Counter
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from sglang.multimodal_gen.runtime.entrypoints.http_errors import ApiError, to_json
from sglang.multimodal_gen.runtime.entrypoints.image_answers import (
    completed_event,
    encode,
    partial_event,
)
from sglang.multimodal_gen.runtime.entrypoints.openai_protocol import ImageJob
from sglang.multimodal_gen.runtime.managers.messages import Preview, Progress
from sglang.multimodal_gen.runtime.managers.request_handle import RequestHandle

if TYPE_CHECKING:
    from sglang.multimodal_gen.runtime.entrypoints.server_context import ServerContext


async def image_events(
    context: "ServerContext", job: ImageJob, kind: str, handle: RequestHandle
) -> AsyncIterator[bytes]:
    """The bytes of the stream; `kind` is "image_generation" or "image_edit".

    Raises what `handle.result` does.
    """
    yield _comment({"type": f"{kind}.queued", "id": handle.request_id})
    sent: Counter[int] = Counter()
    async for event in handle.events():
        if isinstance(event, Progress):
            yield _progress(kind, event)
        else:
            yield await context.in_thread(_preview, kind, job, event, sent[event.image_index])
            sent[event.image_index] += 1
    reply = await handle.result()
    for image, report in zip(reply.images, reply.reports, strict=True):
        yield await context.in_thread(_completed, kind, job, image.pixels, report)
        context.metrics.images.labels(job.params.output_format).inc()


def error_event(error: ApiError) -> bytes:
    """The last event of a stream that failed."""
    return _event("error", error.body)


def _progress(kind: str, event: Progress) -> bytes:
    what = {"label": event.label, "step": event.done, "total_steps": event.total}
    return _comment({"type": f"{kind}.progress", **what})


def _preview(kind: str, job: ImageJob, preview: Preview, index: int) -> bytes:
    event = partial_event(kind, encode(preview.pixels, job), job, preview, index)
    return _event(event["type"], event)


def _completed(kind: str, job: ImageJob, pixels: Any, report: dict[str, Any]) -> bytes:
    event = completed_event(kind, encode(pixels, job), job, report)
    return _event(event["type"], event)


def _event(name: str, content: dict[str, Any]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode("ascii"), to_json(content))


def _comment(content: dict[str, Any]) -> bytes:
    return b": %s\n\n" % to_json(content)
