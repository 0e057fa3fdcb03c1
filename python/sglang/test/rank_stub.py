"""A further rank that only does as it is told: for tests of how rank 0 notices what befalls it."""

import os
import signal
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection


@dataclass(frozen=True)
class Told:
    """An answer, with a failure as `Answer` has it."""

    text: str | None = None
    failure: str | None = None
    failed_at: float = 0.0


def main(descriptor: int) -> None:
    """Say "ready", then obey one word after another until the pipe is closed."""
    pipe = Connection(descriptor)
    pipe.send(Told("ready"))
    try:
        while True:
            _obey(pipe, pipe.recv())
    except EOFError:
        return


def _obey(pipe: Connection, word: str) -> None:
    if word == "stay":  # whatever happens to the pipe
        pipe.send(Told("stay"))
        time.sleep(600)
    elif word == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif word == "fail":
        pipe.send(Told(failure="ValueError: a weight is missing", failed_at=time.monotonic()))
        os._exit(1)
    elif word != "hang":
        pipe.send(Told(word))
