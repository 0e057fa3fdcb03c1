"""Finished requests as OpenAI answers: encoding, keeping, and the JSON around it.

These functions block; run them off the event loop.
"""

import base64
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sglang.multimodal_gen.runtime.entrypoints.http_errors import to_json
from sglang.multimodal_gen.runtime.entrypoints.image_files import OutputError, encode_image
from sglang.multimodal_gen.runtime.entrypoints.image_store import ImageStore
from sglang.multimodal_gen.runtime.entrypoints.openai_protocol import ImageJob
from sglang.multimodal_gen.runtime.managers.messages import GenerateReply, Preview

logger = logging.getLogger(__name__)

# OpenAI's clients expect the field; nothing here is counted in tokens.
NO_TOKENS = {
    "input_tokens": 0,
    "input_tokens_details": {"image_tokens": 0, "text_tokens": 0},
    "output_tokens": 0,
    "total_tokens": 0,
}
CONTENT_PATH = "/v1/images/{id}/content"
NOT_KEPT = "the server's image folder is full or gone: what has no url is in b64_json"


def encode(pixels: np.ndarray, job: ImageJob) -> bytes:
    """File bytes of `pixels` [height, width, 3] uint8, as the request's format asks."""
    from PIL import Image

    params = job.params
    return encode_image(Image.fromarray(pixels), params.output_format, params.output_compression)


def image_item(
    pixels: np.ndarray, report: dict[str, Any], job: ImageJob, store: ImageStore, base_url: str
) -> dict[str, Any]:
    """One entry of an answer's `data`.

    A picture that a url shall lead to but that cannot be kept is in the answer itself: it is made,
    and must not be lost.
    """
    file = encode(pixels, job)
    item = {"b64_json": text_of(file)}
    if job.options.response_format == "url":
        try:
            item = {"url": picture_url(base_url, store.keep(file, job.params.output_format))}
        except OutputError as error:
            logger.error("%s", error)
    return item | _about(report)


def images_response(
    data: Sequence[dict[str, Any]], reply: GenerateReply, job: ImageJob, request_id: str
) -> bytes:
    """The body of an answer that is not streamed; `data` as from `image_item`, in prompt order."""
    warnings = _warnings(job, reply.reports[0])
    if job.options.response_format == "url" and not all("url" in item for item in data):
        warnings.append(NOT_KEPT)
    about = {"id": request_id, "data": data, "usage": NO_TOKENS, "warnings": warnings}
    return to_json(_head(job, reply.reports[0]) | about)


def completed_event(kind: str, file: bytes, job: ImageJob, report: dict[str, Any]) -> dict:
    """The event of a finished picture; `kind` is "image_generation" or "image_edit"."""
    head = _head(job, report)
    quality = head.pop("quality", "auto")
    return {
        "type": f"{kind}.completed",
        "b64_json": text_of(file),
        "created_at": head.pop("created"),
        "quality": quality,
        "usage": NO_TOKENS,
        **head,
        **_about(report),
        "warnings": _warnings(job, report),
    }


def partial_event(kind: str, file: bytes, job: ImageJob, preview: Preview, index: int) -> dict:
    """The event of a preview, the `index`-th of its picture."""
    head = _head(job, {"quality": "lossless"})
    return {
        "type": f"{kind}.partial_image",
        "b64_json": text_of(file),
        "created_at": head.pop("created"),
        "partial_image_index": index,
        "image_index": preview.image_index,
        "step": preview.step,
        "total_steps": preview.total,
        "quality": "high" if job.params.quality == "high" else "auto",
        **head,
    }


def text_of(file: bytes) -> str:
    """Base64."""
    return base64.b64encode(file).decode("ascii")


def picture_url(base_url: str, image_id: str) -> str:
    """Where a kept picture can be downloaded."""
    return base_url.rstrip("/") + CONTENT_PATH.format(id=image_id)


def _head(job: ImageJob, report: Mapping[str, Any]) -> dict[str, Any]:
    params = job.params
    head = {
        "created": int(time.time()),
        "size": f"{params.width}x{params.height}",
        "output_format": params.output_format,
        "background": "opaque",
    }
    # OpenAI's word where it is one; `report` has the tier by its own name.
    return head | ({"quality": "high"} if report["quality"] == "high" else {})


def _warnings(job: ImageJob, report: Mapping[str, Any]) -> list[str]:
    asked, got = job.params.quality, report["quality"]
    fallen_back = [f"quality={asked} was asked for, but the picture is {got}; see report"]
    return [*job.warnings, *(fallen_back if got != asked else [])]


def _about(report: dict[str, Any]) -> dict[str, Any]:
    revised = report["revised_prompt"]
    about = {"seed": report["seed"], "report": report}
    return about | ({} if revised is None else {"revised_prompt": revised})
