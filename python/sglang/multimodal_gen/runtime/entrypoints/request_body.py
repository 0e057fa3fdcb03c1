"""Reading a request's body: of the right type, within its size, within a time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from fastapi import Request
from starlette.exceptions import HTTPException
from starlette.types import Receive

from sglang.multimodal_gen.configs.condition_image import MAX_FILE_BYTES, MAX_IMAGES_GIVEN
from sglang.multimodal_gen.configs.validation import InvalidParameter
from sglang.multimodal_gen.runtime.entrypoints.form_values import read_form
from sglang.multimodal_gen.runtime.entrypoints.http_errors import ApiError
from sglang.multimodal_gen.runtime.entrypoints.strict_json import BODY, parse_object

MAX_JSON_BYTES = 2 * 2**20  # prompts are at most 64 KiB each
MAX_FORM_BYTES = MAX_FILE_BYTES + 2**20
MAX_FORM_FIELDS = 64
BODY_TIMEOUT_S = 60.0
MAX_DISCARDED_BYTES, DISCARD_TIMEOUT_S = 2**28, 2.0


async def json_body(request: Request) -> dict[str, Any]:
    """The JSON object of the body. Raises ApiError 408, 413 or 415, or InvalidParameter."""
    _check_type(request, "application/json")
    async with _bounded(request, MAX_JSON_BYTES) as bounded:
        data = await bounded.body()
    return parse_object(data)


async def form_body(request: Request) -> tuple[dict[str, Any], list[bytes]]:
    """The fields and uploaded pictures of a multipart form. Raises like `json_body`."""
    _check_type(request, "multipart/form-data")
    async with _bounded(request, MAX_FORM_BYTES) as bounded:
        try:
            async with bounded.form(
                max_files=MAX_IMAGES_GIVEN, max_fields=MAX_FORM_FIELDS, max_part_size=2**17
            ) as form:
                return await read_form(form)
        except HTTPException as error:  # what Starlette makes of a malformed form
            raise InvalidParameter(BODY, str(error.detail)[:200]) from None


@asynccontextmanager
async def _bounded(request: Request, limit: int) -> AsyncIterator[Request]:
    """The request with a body of at most `limit` bytes that comes in time."""
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            yield Request(request.scope, _Bounded(request, limit))
    except TimeoutError:
        text = f"the body did not arrive within {BODY_TIMEOUT_S:g} s"
        raise ApiError(408, text, "body_timeout", BODY, retry=False) from None
    except ApiError:
        await _discard(request.receive)
        raise


async def _discard(receive: Receive) -> None:
    """Read on for a while: many clients look for an answer only when all is sent."""
    with suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_TIMEOUT_S):
            seen, more = 0, True
            while more and seen < MAX_DISCARDED_BYTES:
                message = await receive()
                seen += len(message.get("body", b""))
                more = message.get("more_body", False)


class _Bounded:
    """`receive` of a request that raises 413 once the body is longer than `limit` bytes."""

    def __init__(self, request: Request, limit: int) -> None:
        self._receive, self._limit, self._seen = request.receive, limit, 0
        self._declared = request.headers.get("content-length", "")

    async def __call__(self) -> dict[str, Any]:
        if self._declared.isdecimal() and int(self._declared[:20]) > self._limit:
            raise self._too_large()
        message = await self._receive()
        self._seen += len(message.get("body", b""))
        if self._seen > self._limit:
            raise self._too_large()
        return message

    def _too_large(self) -> ApiError:
        text = f"the body is too large; expected at most {self._limit} bytes"
        return ApiError(413, text, "body_too_large", BODY)


def _check_type(request: Request, expected: str) -> None:
    got = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if got != expected:
        shown = repr(got[:80]) if got else "none"
        text = f"content type: got {shown}, expected {expected}"
        raise ApiError(415, text, "unsupported_media_type", BODY)
