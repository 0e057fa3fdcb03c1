"""An engine that makes flat pictures, or whatever a test tells it to, and the server around it."""

import asyncio
from contextlib import contextmanager

import numpy as np
from fastapi.testclient import TestClient

from sglang.multimodal_gen.configs.http_args import HttpArgs
from sglang.multimodal_gen.configs.model_specs import BUNDLED_MODEL, read_model_spec
from sglang.multimodal_gen.configs.server_args import ServerArgs
from sglang.multimodal_gen.runtime.entrypoints.http_server import create_app
from sglang.multimodal_gen.runtime.entrypoints.image_store import ImageStore
from sglang.multimodal_gen.runtime.entrypoints.server_context import ServerContext
from sglang.multimodal_gen.runtime.entrypoints.server_metrics import ServerMetrics
from sglang.multimodal_gen.runtime.managers.engine_state import EngineSnapshot, EngineState
from sglang.multimodal_gen.runtime.managers.errors import EngineUnavailable
from sglang.multimodal_gen.runtime.managers.messages import (
    GenerateReply,
    GenerateRequest,
    ImageOutput,
    Progress,
)
from sglang.multimodal_gen.runtime.managers.request_handle import RequestHandle


class FakeEngine:
    """`outcome`: an exception that ends every request. `refusal`: one that `submit` raises.
    `held`: requests run until they are cancelled."""

    def __init__(self):
        self.state, self.detail = EngineState.READY, "ready on cpu"
        self.spec = read_model_spec(BUNDLED_MODEL)
        self.outcome = self.refusal = None
        self.held = False
        self.worker_pid = None
        self.asked, self.cancelled = [], []

    def submit(self, params, *, request_id, previews=0):
        if self.state is not EngineState.READY:
            raise EngineUnavailable(self.detail)
        if self.refusal is not None:
            raise self.refusal
        handle = RequestHandle(GenerateRequest(request_id, params, previews), 60.0, self._stop)
        self.asked.append(handle.request)
        asyncio.get_running_loop().call_soon(self._begin, handle)
        return handle

    def snapshot(self):
        sites = ({"op": "a.site", "status": "eager", "fused_calls": 0, "eager_calls": 3},) * 2
        totals = {"stage_seconds": {"Stage": 0.5}, "requests": {"finished": 3}}
        return EngineSnapshot(self.state, self.detail, 1, 0, 2, "cpu", sites, 64.0, **totals)

    def _begin(self, handle):
        handle.tell(Progress("denoise", 1, 2))
        if not self.held:
            handle.finish(self.outcome or _reply(handle.request))

    def _stop(self, handle, error):
        self.cancelled.append(handle.request_id)
        handle.finish(error)


def _reply(request):
    params = request.params
    images, reports = [], []
    for asked in params.expand():
        pixels = np.full((params.height, params.width, 3), asked.seed % 256, np.uint8)
        images.append(ImageOutput(asked.index, asked.prompt, asked.seed, pixels, ()))
        about = {"seed": asked.seed, "prompt": asked.prompt, "revised_prompt": None}
        reports.append(about | {"quality": params.quality})
    return GenerateReply(tuple(images), tuple(reports), 0.001)


@contextmanager
def fake_server(**http_args):
    """(client, engine) of an application in this process."""
    args, engine = HttpArgs(**http_args), FakeEngine()
    store = ImageStore(args.image_folder, args.retention)
    context = ServerContext(engine, ServerArgs(), args, store, ServerMetrics(engine))
    with TestClient(create_app(context), raise_server_exceptions=False) as client:
        yield client, engine
    context.close()


async def call(app, path, body_messages, headers=()):
    """One POST straight into the application. `body_messages`: what `receive` says; it waits for
    ever after the last. Returns the messages that were sent."""
    waiting, sent = list(body_messages), []

    async def receive():
        if not waiting:
            await asyncio.Event().wait()
        return waiting.pop(0)

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"host", b"testserver"), (b"content-type", b"application/json"), *headers],
        "server": ("testserver", 80),
        "scheme": "http",
        "http_version": "1.1",
    }
    await app(scope, receive, send)
    return sent
