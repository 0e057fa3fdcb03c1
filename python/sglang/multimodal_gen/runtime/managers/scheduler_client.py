"""The caller's side of the scheduler: sends a request, returns its images or raises its error."""

import itertools
import threading
from collections.abc import Callable
from typing import TypeVar

from sglang.multimodal_gen.configs.sampling_params import SamplingParams
from sglang.multimodal_gen.runtime.managers.messages import (
    EmitProgress,
    GenerateRequest,
    GenerateResponse,
)
from sglang.multimodal_gen.runtime.managers.scheduler import Scheduler

T = TypeVar("T")
# One for the process: numeric switches, gates and their counters are the process's.
_TURN = threading.Lock()


class SchedulerClient:
    """In-process client. Threads take turns, also those of other models in this process."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._ids = itertools.count()

    def generate(self, params: SamplingParams, emit: EmitProgress) -> GenerateResponse:
        """Block until the request is done. Re-raises the worker's exception."""
        request = GenerateRequest(str(next(self._ids)), params)
        with _TURN:
            self._scheduler.submit(request, emit)
            response = self._scheduler.step()
        if response.error is not None:
            raise response.error
        return response

    def between_requests(self, change: Callable[[], T]) -> T:
        """What `change()` returns, called while no request runs."""
        with _TURN:
            return change()
