"""How a request to the engine can end, as HTTP statuses."""

from sglang.multimodal_gen.configs.validation import InvalidParameter
from sglang.multimodal_gen.runtime.entrypoints.http_errors import ApiError, bad_request
from sglang.multimodal_gen.runtime.managers.errors import (
    EngineFailed,
    EngineUnavailable,
    QueueFull,
    RequestCancelled,
    RequestTimedOut,
    WorkerDied,
)

RESTART_S = 5  # Retry-After where nobody can know: about a load of the bundled model
CLIENT_CLOSED_REQUEST = 499  # as nginx has it: nobody may wait for this answer


def api_error(error: Exception, state: str = "unavailable") -> ApiError:
    """The answer to one of ENGINE_ERRORS; `state` is the engine's, the code of a 503."""
    match error:
        case InvalidParameter():
            return bad_request(error)
        case QueueFull():
            return ApiError(429, str(error), "queue_full", retry_after=error.retry_after_s)
        case EngineUnavailable():
            return ApiError(503, error.detail, state, retry_after=RESTART_S)
        case WorkerDied():
            return ApiError(503, str(error), "worker_died", retry_after=RESTART_S)
        case RequestCancelled():
            text = "the request was cancelled"
            return ApiError(CLIENT_CLOSED_REQUEST, text, "request_cancelled", retry=False)
        case RequestTimedOut():
            return ApiError(504, str(error), "deadline_exceeded", retry=False)
        case EngineFailed():
            code = "out_of_memory" if error.kind == "oom" else "engine_error"
            return ApiError(500, str(error), code, retry=False)
    raise error
