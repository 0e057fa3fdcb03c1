"""GET / and its parts: a page of plain files that loads nothing from elsewhere."""

from pathlib import Path

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse

from sglang.multimodal_gen.runtime.entrypoints import openapi_schema
from sglang.multimodal_gen.runtime.entrypoints.http_errors import ApiError
from sglang.multimodal_gen.runtime.entrypoints.server_context import context_of

FOLDER = Path(__file__).parent / "playground"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# The page shows texts and pictures that come from requests; none of them can become a script.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-cache",  # an upgraded server must not meet an old page
}

_NOT_FOUND = {404: openapi_schema.answers(None, 404)[404]}

open_router = APIRouter()  # no key is asked for: the page asks for it


@open_router.get("/", response_class=HTMLResponse, responses=_NOT_FOUND)
async def playground(request: Request) -> Response:
    """The playground's page."""
    return await _file(request, "index.html")


@open_router.get(
    "/playground/{name}",
    response_class=Response,
    responses={
        200: {"description": "the file", "content": {"text/*": {}, "image/*": {}}},
        **_NOT_FOUND,
    },
)
async def part(name: str, request: Request) -> Response:
    """A script, a style sheet or the icon of the page."""
    return await _file(request, name)


async def _file(request: Request, name: str) -> Response:
    files = await context_of(request).in_thread(_files)
    if name not in files:
        text = "this installation has no such part of the playground"
        raise ApiError(404, text, "not_found")
    data = await context_of(request).in_thread(files[name].read_bytes)
    return Response(data, headers={**HEADERS, "Content-Type": MEDIA_TYPES[files[name].suffix]})


def _files() -> dict[str, Path]:
    """What can be asked for, by name: no path is ever made of a client's text."""
    folder = FOLDER.iterdir() if FOLDER.is_dir() else ()
    return {path.name: path for path in folder if path.suffix in MEDIA_TYPES}
