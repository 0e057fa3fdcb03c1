"""What the routes of one server share."""

import asyncio
import itertools
import os
import platform
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from fastapi import Request

from sglang.multimodal_gen.configs.http_args import HttpArgs
from sglang.multimodal_gen.configs.model_specs import local_model_folder
from sglang.multimodal_gen.configs.replica_args import ReplicaArgs
from sglang.multimodal_gen.configs.sampling_params import SamplingParams
from sglang.multimodal_gen.configs.server_args import ServerArgs
from sglang.multimodal_gen.runtime.entrypoints.engine_errors import api_error
from sglang.multimodal_gen.runtime.entrypoints.http_errors import ApiError
from sglang.multimodal_gen.runtime.entrypoints.image_store import ImageStore
from sglang.multimodal_gen.runtime.entrypoints.openai_protocol import Served
from sglang.multimodal_gen.runtime.entrypoints.server_metrics import ServerMetrics
from sglang.multimodal_gen.runtime.managers.engine import Engine
from sglang.multimodal_gen.runtime.managers.engine_client import EngineClient
from sglang.multimodal_gen.runtime.managers.errors import ENGINE_ERRORS, EngineUnavailable
from sglang.multimodal_gen.runtime.managers.replica_cluster import ReplicaCluster
from sglang.multimodal_gen.runtime.managers.replicated_engine import ReplicatedEngine
from sglang.multimodal_gen.runtime.managers.request_handle import RequestHandle

T = TypeVar("T")
PICTURE_THREADS = min(8, os.cpu_count() or 1)  # that encode and keep: memory is the limit
UPLOAD_THREADS = 2  # that decode; apart, so that finished pictures wait for no new ones
MAX_PICTURE_BYTES = 2**30  # of decoded pictures to edit; a small file can hold 100 MB of them
PICTURES_RETRY_S = 5.0
BUNDLED_NAME = "bundled"


@dataclass
class ServerContext:
    """The engine, the store and the settings, behind every route of one server."""

    engine: Engine
    server_args: ServerArgs
    http_args: HttpArgs
    store: ImageStore
    metrics: ServerMetrics
    active: dict[str, list[RequestHandle]] = field(default_factory=dict)  # by the client's id
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)  # the loop keeps no reference
    _threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(PICTURE_THREADS, "sglang-pictures")
    )
    _upload_threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(UPLOAD_THREADS, "sglang-uploads")
    )

    @property
    def served(self) -> Served:
        """The model and its names. Raises ApiError 503 while nothing is known of it."""
        try:
            return Served(self.engine.spec, self.model_name, self._aliases())
        except EngineUnavailable as error:
            raise self.api_error(error) from error

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

    async def in_upload_thread(self, work: Callable[..., T], *args: object) -> T:
        """Decode what a request brought, few at a time: what waits here takes no memory yet."""
        return await asyncio.get_running_loop().run_in_executor(self._upload_threads, work, *args)

    def submit(self, params: SamplingParams, request_id: str, previews: int = 0) -> RequestHandle:
        """Hand a request to the engine; until it ends, it can be cancelled by its id.

        Several may run under one id. Raises ApiError 429 or 503 when the engine takes none, 429
        too when the pictures of waiting requests fill the memory that is set aside for them.
        """
        self._check_room(params)
        try:
            handle = self.engine.submit(
                params, request_id=self._engine_id(request_id), previews=previews
            )
        except ENGINE_ERRORS as error:
            raise self.api_error(error) from error
        self.active.setdefault(request_id, []).append(handle)
        task = asyncio.create_task(self._forget_when_ended(request_id, handle))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return handle

    def _check_room(self, params: SamplingParams) -> None:
        handles = itertools.chain.from_iterable(self.active.values())
        held = sum(_picture_bytes(handle.request.params) for handle in handles)
        new = _picture_bytes(params)
        if held and new and held + new > MAX_PICTURE_BYTES:  # one alone always runs
            text = (
                f"pictures of {held} bytes wait to be edited; try again later or send smaller ones"
            )
            raise ApiError(429, text, "queue_full", retry_after=PICTURES_RETRY_S)

    def api_error(self, error: Exception) -> ApiError:
        """The answer to one of ENGINE_ERRORS."""
        return api_error(error, self.engine.state.value)

    def _engine_id(self, request_id: str) -> str:
        """The id itself, with a number behind it while another request has it."""
        taken = {handle.request_id for handle in self.active.get(request_id, [])}
        candidates = itertools.chain([request_id], (f"{request_id}#{i}" for i in itertools.count()))
        return next(name for name in candidates if name not in taken)

    async def _forget_when_ended(self, request_id: str, handle: RequestHandle) -> None:
        with suppress(*ENGINE_ERRORS):  # whoever waits for the result hears of them
            await handle.result()
        self.active[request_id].remove(handle)
        if not self.active[request_id]:
            del self.active[request_id]

    def close(self) -> None:
        """Stop the threads and remove temporary pictures."""
        for threads in (self._threads, self._upload_threads):
            threads.shutdown(wait=False, cancel_futures=True)
        self.store.close()


def make_context(
    server_args: ServerArgs, http_args: HttpArgs, replica_args: ReplicaArgs
) -> ServerContext:
    """A context with an engine that is not started yet.

    Raises InvalidParameter for a model folder or an image folder that cannot be used, and for
    replicas where Ray is not installed.
    """
    engine = _make_engine(server_args, http_args, replica_args)
    store = ImageStore(http_args.image_folder, http_args.retention)
    return ServerContext(engine, server_args, http_args, store, ServerMetrics(engine))


def _make_engine(server_args: ServerArgs, http_args: HttpArgs, replica_args: ReplicaArgs) -> Engine:
    limits = {"max_queue": http_args.max_queue, "request_timeout": http_args.request_timeout}
    if not replica_args.wanted:
        return EngineClient(server_args, **limits)
    cluster = ReplicaCluster(
        server_args,
        replica_args,
        name=f"sglang-{platform.node()}-{http_args.port or os.getpid()}",
        request_timeout=http_args.request_timeout,
        drain_timeout=http_args.drain_timeout,
    )
    return ReplicatedEngine(server_args, cluster, **limits)


def _picture_bytes(params: SamplingParams) -> int:
    return sum(len(picture.rgb) for picture in params.image or ())


def context_of(request: Request) -> ServerContext:
    """The context of the server that a request came to."""
    return request.app.state.context
