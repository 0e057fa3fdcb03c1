"""How a request to the engine can end without a picture. A bad value is `InvalidParameter`."""

from sglang.multimodal_gen.configs.validation import InvalidParameter
from sglang.multimodal_gen.runtime.managers.messages import WorkerFailure


class EngineUnavailable(RuntimeError):
    """The engine takes no request now: it is loading, restarting, draining or stopped."""

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail


class QueueFull(RuntimeError):
    """The queue holds as many requests as it may."""

    def __init__(self, waiting: int, retry_after_s: int) -> None:
        super().__init__(waiting, retry_after_s)
        self.waiting = waiting
        self.retry_after_s = retry_after_s  # about when the next place is free, at least 1

    def __str__(self) -> str:
        return f"{self.waiting} requests are waiting; try again in {self.retry_after_s} s"


class RequestCancelled(RuntimeError):
    """The request was cancelled; nothing of it is kept."""


class RequestTimedOut(RuntimeError):
    """The request's deadline passed, in the queue or at work."""


class WorkerDied(RuntimeError):
    """The worker process ended while the request was waiting or at work; it can be sent again."""


class EngineFailed(RuntimeError):
    """The engine could not make the picture.

    `kind` is "oom" when memory ran out, else the name of the worker's exception; the worker's
    traceback is a note of this exception.
    """

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message, kind)
        self.message = message
        self.kind = kind

    def __str__(self) -> str:
        return self.message


ENGINE_ERRORS = (
    EngineFailed,
    EngineUnavailable,
    QueueFull,
    RequestCancelled,
    RequestTimedOut,
    WorkerDied,
    InvalidParameter,
)


def exception_of(failure: WorkerFailure) -> Exception:
    """The exception that a caller of the engine gets for what the worker reported."""
    if failure.kind == "invalid":
        return InvalidParameter(failure.parameter, failure.message)
    if failure.kind == "cancelled":
        return RequestCancelled(failure.message)
    error = EngineFailed(failure.message, failure.kind)
    error.add_note(failure.traceback)
    return error
