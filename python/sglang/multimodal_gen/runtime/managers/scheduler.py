"""Queue to worker: requests run one after another, in the order they came."""

from collections import deque

from sglang.multimodal_gen.runtime.managers.messages import (
    EmitProgress,
    GenerateRequest,
    GenerateResponse,
)
from sglang.multimodal_gen.runtime.managers.worker import Worker


class Scheduler:
    """Owns the queue. `step` runs one request; an error becomes that request's response."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._waiting: deque[tuple[GenerateRequest, EmitProgress]] = deque()

    def submit(self, request: GenerateRequest, emit: EmitProgress) -> None:
        """Append a request; `emit` hears of its progress."""
        self._waiting.append((request, emit))

    def step(self) -> GenerateResponse:
        """Run the oldest waiting request to its end."""
        request, emit = self._waiting.popleft()
        try:
            return self._worker.execute(request, emit)
        except Exception as error:  # not swallowed: the client raises it with its traceback
            return GenerateResponse(request.request_id, error=error)
