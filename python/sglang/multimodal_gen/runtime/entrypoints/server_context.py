"""What the routes of one server share."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from fastapi import Request

from sglang.multimodal_gen.configs.http_args import HttpArgs
from sglang.multimodal_gen.configs.model_specs import local_model_folder
from sglang.multimodal_gen.configs.server_args import ServerArgs
from sglang.multimodal_gen.runtime.entrypoints.image_store import ImageStore
from sglang.multimodal_gen.runtime.entrypoints.openai_protocol import Served
from sglang.multimodal_gen.runtime.entrypoints.server_metrics import ServerMetrics
from sglang.multimodal_gen.runtime.managers.engine_client import EngineClient
from sglang.multimodal_gen.runtime.managers.request_handle import RequestHandle

if TYPE_CHECKING:
    from collections.abc import Iterator

T = TypeVar("T")
PICTURE_THREADS = 2  # that encode and decode: PIL needs no lock, memory is the limit
BUNDLED_NAME = "bundled"


@dataclass
class ServerContext:
    """The engine, the store and the settings, behind every route of one server."""

    engine: EngineClient
    server_args: ServerArgs
    http_args: HttpArgs
    store: ImageStore
    metrics: ServerMetrics
    active: dict[str, list[RequestHandle]] = field(default_factory=dict)  # by the client's id
    _threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(PICTURE_THREADS, "sglang-pictures")
    )

    @property
    def served(self) -> Served:
        """The model and its names. Raises EngineUnavailable while nothing is known of it."""
        return Served(self.engine.spec, self.model_name, self._aliases())

    @property
    def model_name(self) -> str:
        """As /v1/models says it: as asked, else the folder's name or the hub id."""
        args = self.server_args
        if self.http_args.served_model_name is not None:
            return self.http_args.served_model_name
        if args.model_path is None:
            return BUNDLED_NAME
        folder = local_model_folder(args.model_path, args.load_format)
        return args.model_path if folder is None else Path(folder).resolve().name

    def _aliases(self) -> tuple[str, ...]:
        path = self.server_args.model_path
        return () if path is None or self.http_args.served_model_name else (path,)

    async def in_thread(self, work: Callable[..., T], *args: object) -> T:
        """Run blocking work, of a picture or the disk, beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)

    @contextmanager
    def tracked(self, request_id: str, handle: RequestHandle) -> "Iterator[None]":
        """Inside, the request can be cancelled by its id; on leaving, it is if it still runs."""
        self.active.setdefault(request_id, []).append(handle)
        try:
            yield
        finally:
            handle.cancel()
            self.active[request_id].remove(handle)
            if not self.active[request_id]:
                del self.active[request_id]

    def close(self) -> None:
        """Stop the threads and remove temporary pictures."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.store.close()


def make_context(server_args: ServerArgs, http_args: HttpArgs) -> ServerContext:
    """A context with an engine that is not started yet.

    Raises InvalidParameter for a model folder or an image folder that cannot be used.
    """
    engine = EngineClient(
        server_args,
        max_queue=http_args.max_queue,
        request_timeout=http_args.request_timeout,
    )
    store = ImageStore(http_args.image_folder, http_args.retention)
    return ServerContext(engine, server_args, http_args, store, ServerMetrics(engine))


def context_of(request: Request) -> ServerContext:
    """The context of the server that a request came to."""
    return request.app.state.context
