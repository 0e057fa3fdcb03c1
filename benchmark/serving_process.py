"""A `sglang serve` of a bench's own, on a free port."""

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
END_S = 90.0  # to drain, and to end


@contextmanager
def own_server(flags: Sequence[str], start_s: float) -> Iterator[str]:
    """The address of a server with these flags, ready within `start_s` seconds; it ends with the
    block. Raises RuntimeError, with what it printed, when it does not become ready."""
    command = [sys.executable, "-m", "sglang.cli", "serve", "--port", "0", *flags]
    path = os.pathsep.join(filter(None, [str(ROOT / "python"), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    output = _Output(process)
    try:
        yield output.address(start_s)
    finally:
        process.terminate()
        try:
            process.wait(END_S)
        finally:
            process.kill()


class _Output:
    """What the server prints, read all the time so that it never waits for a reader."""

    def __init__(self, process: subprocess.Popen) -> None:
        self._process, self._lines, self._found = process, [], None
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def address(self, seconds: float) -> str:
        """Wait for the line that says where the server is."""
        end = time.monotonic() + seconds
        while self._found is None:
            status = self._process.poll()
            if status is not None or time.monotonic() > end:
                late = f"was not ready within {seconds:g} s"
                what = late if status is None else f"ended with {status} before it was ready"
                self._reader.join(1)
                raise RuntimeError(f"the server {what}:\n{''.join(self._lines[-40:])}")
            time.sleep(0.05)
        return self._found

    def _read(self) -> None:
        for line in self._process.stdout:
            self._lines.append(line)
            ready = re.match(r"ready: \S+ at (http://\S+)", line)
            self._found = ready[1] if ready else self._found
