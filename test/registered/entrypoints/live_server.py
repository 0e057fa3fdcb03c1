"""A real `sglang serve` in its own process, with the bundled model on the CPU."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

READY_S = 120.0  # on a busy machine


class LiveServer:
    """`lines`: all that it printed. Use as a context manager; nothing of it is left afterwards."""

    def __init__(self, *flags, env=None, module="sglang.cli", words=("serve",)):
        command = [sys.executable, "-m", module, *words, "--port", "0", "--device", "cpu", *flags]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | (env or {}),
        )
        self.lines, self.url = [], None
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.end()

    def wait_ready(self):
        """The server itself, once it says where it is."""
        assert self._ready.wait(READY_S) and self.url, "".join(self.lines)
        return self

    def end(self):
        """Kill it, and wait for its worker to be gone."""
        worker = self.worker_pid()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        if worker is not None:
            wait_for(lambda: not alive(worker), 10)
        self._reader.join(10)
        self.process.stdout.close()

    def terminate(self):
        """SIGTERM, as an operator sends it."""
        self.process.send_signal(signal.SIGTERM)

    def ended(self, seconds):
        """Wait for its own end. Returns the exit status and all that it printed."""
        status = self.process.wait(seconds)
        self._reader.join(10)
        return status, "".join(self.lines)

    def worker_pid(self):
        """The process that holds the model, or None."""
        path = f"/proc/{self.process.pid}/task/{self.process.pid}/children"
        if not os.path.exists(path):
            return None
        for pid in map(int, open(path).read().split()):
            if b"spawn_main" in open(f"/proc/{pid}/cmdline", "rb").read():
                return pid
        return None

    def status(self, path):
        """The status of a GET."""
        try:
            return urllib.request.urlopen(self.url + path, timeout=30).status
        except urllib.error.HTTPError as error:
            return error.code

    def _read(self):
        for line in self.process.stdout:
            self.lines.append(line)
            found = re.match(r"ready: \S+ at (http://\S+)", line)
            if found:
                self.url = found[1]
                self._ready.set()
        self._ready.set()


def alive(pid):
    """Whether a process runs (a zombie does not)."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition, seconds):
    """Wait until `condition()`; fail after `seconds`. Returns the seconds that it took."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < seconds, f"nothing after {seconds} s"
        time.sleep(0.02)
    return time.monotonic() - begin
