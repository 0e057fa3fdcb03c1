"""The life of a server process: listen, load, serve, drain."""

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import Iterator

import uvicorn

from sglang.multimodal_gen.runtime.entrypoints.console import print_error
from sglang.multimodal_gen.runtime.entrypoints.http_protocol import HttpProtocol
from sglang.multimodal_gen.runtime.entrypoints.http_server import create_app
from sglang.multimodal_gen.runtime.entrypoints.server_context import ServerContext
from sglang.multimodal_gen.runtime.managers.errors import EngineUnavailable
from sglang.multimodal_gen.runtime.managers.replicated_engine import ReplicatedEngine

PROG = "sglang serve"
LAST_ANSWERS_S = 5  # for answers to be written once the engine has ended
KEEP_ALIVE_S = 30


async def serve(context: ServerContext, listener: socket.socket) -> int:
    """Serve on `listener` until a signal. Returns 0, or 1 when the model did not load."""
    server = _Server(context)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.handle_exit, number, None)
    if isinstance(context.engine, ReplicatedEngine):
        loop.add_signal_handler(signal.SIGHUP, context.engine.restart)
    try:
        await context.engine.start()
        announcing = asyncio.create_task(_announce(context, server, listener))
        await server.serve(sockets=[listener])
        announcing.cancel()
    finally:
        await context.engine.close()
        context.close()
    return int(server.failed)


class _Server(uvicorn.Server):
    """uvicorn, with the engine drained between the last connection accepted and the end."""

    def __init__(self, context: ServerContext) -> None:
        drain = context.http_args.drain_timeout
        super().__init__(
            uvicorn.Config(
                create_app(context),
                http=HttpProtocol,
                log_config=None,
                access_log=False,  # http_gate.py writes one
                lifespan="off",
                ws="none",
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=int(drain) + LAST_ANSWERS_S,
            )
        )
        self._engine, self._drain_s = context.engine, drain
        self.failed = False

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `serve`: uvicorn's own handling would end the process by them again."""
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more, answer what was accepted, end."""
        draining = asyncio.create_task(self._engine.drain(self._drain_s))
        await super().shutdown(sockets)
        if self.force_exit:  # a second Ctrl-C
            draining.cancel()
        await asyncio.wait([draining])


async def _announce(context: ServerContext, server: _Server, listener: socket.socket) -> None:
    """One line when pictures can be asked for; the end of the server when they never will."""
    begin = time.perf_counter()
    try:
        await context.engine.wait_ready()
    except EngineUnavailable as error:
        if not server.should_exit:
            print_error(PROG, error)
            server.failed = server.should_exit = True
        return
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    seconds = time.perf_counter() - begin
    print(f"ready: {context.model_name} at http://{shown}:{port} ({seconds:.1f} s)", flush=True)
