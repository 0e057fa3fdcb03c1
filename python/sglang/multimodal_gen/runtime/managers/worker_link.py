"""The parent's end of one worker process: start it, talk to it, notice its end, end it."""

import asyncio
import atexit
import logging
import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable
from typing import Any

from sglang.multimodal_gen import environ
from sglang.multimodal_gen.configs.server_args import ServerArgs
from sglang.multimodal_gen.runtime.managers import channel, worker_process

logger = logging.getLogger(__name__)

LIVENESS_S = 1.0  # between two looks whether a silent worker still lives
EXIT_TIMEOUT_S = 3.0  # for a worker that was told to end; then it is killed


class WorkerLink:
    """One worker process, started by the constructor, on the running event loop.

    on_message: called in the event loop with each message of the worker, in order. `ended`
    resolves to a sentence once the process is gone and its last message was delivered.
    """

    def __init__(self, args: ServerArgs, warmup: bool, on_message: Callable[[Any], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_message = on_message
        self._outgoing: queue.SimpleQueue[Any | None] = queue.SimpleQueue()
        self.ended: asyncio.Future[str] = self._loop.create_future()
        environ.let_openmp_threads_sleep()
        context = multiprocessing.get_context("spawn")
        self._inbox, worker_outbox = context.Pipe(duplex=False)
        worker_inbox, self._outbox = context.Pipe(duplex=False)
        self._process = context.Process(
            target=worker_process.main,
            args=(args, warmup, worker_inbox, worker_outbox, os.getpid()),
            name="sglang-worker",
        )
        # The kernel ends the worker when the starting *thread* ends, so it is the loop's own.
        self._process.start()
        for pipe in (worker_inbox, worker_outbox):
            pipe.close()  # else the worker's end would not be seen as the end of the file
        # Registered after multiprocessing's own handler and so called before it: that one waits.
        atexit.register(self.kill)
        for work in (self._read, self._write):
            threading.Thread(target=work, name="sglang-link", daemon=True).start()

    @property
    def pid(self) -> int:
        """Of the worker process."""
        return self._process.pid

    def send(self, message: Any) -> None:
        """Queue a message for the worker; never blocks."""
        self._outgoing.put(message)

    def kill(self) -> None:
        """End the process at once."""
        self._process.kill()

    async def close(self) -> None:
        """Tell the worker to end, kill it if it does not, and return when it is gone."""
        self._outgoing.put(None)
        try:
            await asyncio.wait_for(asyncio.shield(self.ended), EXIT_TIMEOUT_S)
        except TimeoutError:
            self.kill()
            await self.ended

    def _read(self) -> None:
        """The reading thread: deliver messages until the worker is gone, then tell that it is."""
        try:
            while True:
                while not self._inbox.poll(LIVENESS_S):
                    if not self._process.is_alive():  # and a child of its holds the pipe open
                        raise EOFError
                self._deliver(self._on_message, channel.receive(self._inbox))
        except (EOFError, OSError):
            pass  # as every worker ends
        finally:
            self._process.join(EXIT_TIMEOUT_S)
            self.kill()
            self._process.join()
            self._inbox.close()
            self._outgoing.put(None)
            atexit.unregister(self.kill)
            self._deliver(self.ended.set_result, _how_it_ended(self._process.exitcode))

    def _write(self) -> None:
        """The writing thread: until there is nothing more to say, or nobody who listens."""
        try:
            while (message := self._outgoing.get()) is not None:
                channel.send(self._outbox, message)
        except OSError:
            pass  # the worker is gone, and the reading thread tells
        finally:
            self._outbox.close()

    def _deliver(self, callback: Callable[[Any], None], value: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, value)


def _how_it_ended(exit_code: int) -> str:
    if exit_code < 0:
        return f"the worker process was ended by {signal.Signals(-exit_code).name}"
    return f"the worker process ended with status {exit_code}"
