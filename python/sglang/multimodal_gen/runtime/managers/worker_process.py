"""The worker process of a server, as `WorkerLink` starts it. Light until torch is needed."""

import ctypes
import logging
import os
import queue
import signal
import sys
import threading
from multiprocessing.connection import Connection

from sglang.multimodal_gen.configs.server_args import ServerArgs
from sglang.multimodal_gen.runtime.managers import channel
from sglang.multimodal_gen.runtime.managers.messages import CancelRequest, GenerateRequest

EXIT_TIMEOUT_S = 2.0  # for a clean end once the parent has closed the pipe
PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Mailbox:
    """What the parent wants: read by a thread of its own, so that a cancel overtakes the work.

    When the parent closes the pipe or dies, the process ends: cleanly if it can, else at once.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._requests: queue.SimpleQueue[GenerateRequest | None] = queue.SimpleQueue()
        self._closed = self._cancelled = False
        threading.Thread(target=self._read, name="mailbox", daemon=True).start()

    def next(self) -> GenerateRequest | None:
        """Wait for a request; None when the parent has closed the pipe."""
        return self._requests.get()

    @property
    def wants_stop(self) -> bool:
        """Whether the request at work is to end at its next step."""
        return self._closed or self._cancelled

    def _read(self) -> None:
        try:
            while True:
                message = channel.receive(self._pipe)
                # The parent sends a request only when the one before has ended.
                self._cancelled = isinstance(message, CancelRequest)
                if not self._cancelled:
                    self._requests.put(message)
        except (EOFError, OSError):
            self._closed = True
            self._requests.put(None)
            timer = threading.Timer(EXIT_TIMEOUT_S, os._exit, (1,))
            timer.daemon = True
            timer.start()


def main(
    args: ServerArgs, warmup: bool, inbox: Connection, outbox: Connection, parent: int
) -> None:
    """Load the model, then answer requests until the parent closes `inbox`."""
    end_with_parent(parent)
    for ignored in (signal.SIGINT, signal.SIGTERM):  # the parent decides; both reach whole groups
        signal.signal(ignored, signal.SIG_IGN)
    _configure_logging(args.log_level)
    mailbox = Mailbox(inbox)  # before the load, which it can end
    from sglang.multimodal_gen.runtime.managers.worker_loop import serve

    serve(args, warmup, mailbox, outbox)


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies; on Linux. Elsewhere the closed pipe
    tells."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the call
            os._exit(1)


def _configure_logging(level: str) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s worker: %(message)s"))
    logger = logging.getLogger("sglang")
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(level.upper())
