"""Progress of long steps: a bar on a terminal, plain log lines otherwise."""

import logging
import sys

from sglang.multimodal_gen import environ
from sglang.multimodal_gen.runtime.managers.messages import Progress

logger = logging.getLogger(__name__)


def make_display() -> "BarDisplay | PlainDisplay | SilentDisplay":
    """The display that SGLANG_DIFFUSION_PROGRESS asks for; `auto` looks at the terminal."""
    kind = environ.PROGRESS.get()
    if kind == "auto":
        kind = "bar" if sys.stderr.isatty() else "plain"
    return {"bar": BarDisplay, "plain": PlainDisplay, "off": SilentDisplay}[kind]()


class SilentDisplay:
    """Shows nothing. A display is a context manager and is called with each `Progress`."""

    def __enter__(self) -> "SilentDisplay":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __call__(self, progress: Progress) -> None:
        pass


class PlainDisplay(SilentDisplay):
    """One log line at each tenth of a long step."""

    def __call__(self, progress: Progress) -> None:
        done, total = progress.done, progress.total
        if total and (10 * done) // total > (10 * (done - 1)) // total:
            logger.info("%s: %d of %d", progress.label, done, total)


class BarDisplay(SilentDisplay):
    """A rich progress bar on stderr; it vanishes when the request ends."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

        columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bars = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = None
        self._label = None

    def __enter__(self) -> "BarDisplay":
        self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bars.stop()

    def __call__(self, progress: Progress) -> None:
        if progress.label != self._label:
            self._label = progress.label
            self._task = self._bars.add_task(progress.label, total=progress.total)
        self._bars.update(self._task, completed=progress.done)
