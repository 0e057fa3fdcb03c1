"""Messages over a pipe between a parent and the process that it started.

Arrays travel beside the pickled rest as raw bytes, uncopied; they arrive read-only. Both ends are
this program: nothing from a network is ever unpickled.
"""

import pickle
from multiprocessing.connection import Connection
from typing import Any


def pack(message: Any) -> list[bytes | memoryview]:
    """The frames of a message: how many arrays, the pickled message, the arrays."""
    arrays: list[pickle.PickleBuffer] = []
    content = pickle.dumps(message, protocol=5, buffer_callback=arrays.append)
    return [len(arrays).to_bytes(2), content, *(array.raw() for array in arrays)]


def send(pipe: Connection, message: Any) -> None:
    """Write one message; blocks while the pipe is full. Raises OSError when nobody reads."""
    for frame in pack(message):
        pipe.send_bytes(frame)


def receive(pipe: Connection) -> Any:
    """Read one message; blocks until it is there. Raises EOFError when nobody writes any more."""
    count = int.from_bytes(pipe.recv_bytes())
    content = pipe.recv_bytes()
    return pickle.loads(content, buffers=[pipe.recv_bytes() for _ in range(count)])
