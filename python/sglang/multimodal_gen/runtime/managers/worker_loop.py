"""Inside the worker process: one request after another, each answered exactly once."""

import contextlib
import gc
import logging
import time
import traceback
from multiprocessing.connection import Connection
from typing import NoReturn

import torch

from sglang.multimodal_gen.configs.sampling_params import SamplingParams
from sglang.multimodal_gen.configs.server_args import ServerArgs
from sglang.multimodal_gen.configs.validation import InvalidParameter
from sglang.multimodal_gen.report import build_report
from sglang.multimodal_gen.runtime.distributed.launch import RankLost
from sglang.multimodal_gen.runtime.managers import channel
from sglang.multimodal_gen.runtime.managers.errors import RequestCancelled
from sglang.multimodal_gen.runtime.managers.messages import (
    EmitProgress,
    GenerateReply,
    GenerateRequest,
    GenerateResponse,
    Preview,
    Progress,
    RequestEnded,
    WorkerFailure,
    WorkerReady,
)
from sglang.multimodal_gen.runtime.managers.scheduler import Scheduler
from sglang.multimodal_gen.runtime.managers.warm_up import canary, warm_up_requests
from sglang.multimodal_gen.runtime.managers.worker import Worker
from sglang.multimodal_gen.runtime.managers.worker_process import Mailbox
from sglang.multimodal_gen.runtime.pipelines.forward_graphs import drop_all_graphs

logger = logging.getLogger(__name__)

OOM_HINT = (
    "ask for a smaller picture, or start the engine with performance_mode='memory' or on a device"
    " with more memory"
)
# Failures that say nothing about the state of the device.
HARMLESS = ("invalid", "cancelled", "NonFiniteError", "PriorTokensError")


def serve(args: ServerArgs, warmup: bool, mailbox: Mailbox, outbox: Connection) -> None:
    """Load, warm up, say so, and answer requests until the parent closes the mailbox.

    A failed load, or the loss of a rank, is told to the parent and ends the process with status 1.
    """
    try:
        worker = Worker(args, lambda progress: channel.send(outbox, progress))
        loop = WorkerLoop(worker, mailbox, outbox)
        last = loop.generate_all(warm_up_requests(worker.spec, worker.device) if warmup else [])
    except Exception as error:  # not swallowed: the parent raises it
        _end(outbox, error)
    # What is loaded stays: later collections, after failures, need not look at a million objects.
    gc.collect()
    gc.freeze()
    sites, peak = (last.sites, last.peak_memory_mb) if last else ((), 0.0)
    channel.send(outbox, WorkerReady(worker.spec, str(worker.device), sites, peak))
    with contextlib.closing(worker):
        try:
            loop.run()
        except RankLost as error:  # no fault of the request, which can be sent again
            _end(outbox, error)


def _end(outbox: Connection, error: Exception) -> NoReturn:
    """End the process, with `error` as the reason that the parent gives to all its requests."""
    channel.send(outbox, failure_of(error))
    raise SystemExit(1) from error


class WorkerLoop:
    """Answers the mailbox's requests, through the same scheduler as in one process."""

    def __init__(self, worker: Worker, mailbox: Mailbox, outbox: Connection) -> None:
        self._worker, self._mailbox, self._outbox = worker, mailbox, outbox
        self._scheduler = Scheduler(worker)

    def run(self) -> None:
        """Until the parent closes the mailbox. Raises when the engine cannot go on."""
        while (request := self._mailbox.next()) is not None:
            ended = self._answer(request)
            channel.send(self._outbox, ended)
            if ended.failure is not None:
                self._recover(ended.failure)

    def generate_all(self, several: list[SamplingParams]) -> GenerateResponse | None:
        """Run requests of the engine's own; returns the last response and raises their errors."""
        response = None
        for params in several:
            self._scheduler.submit(GenerateRequest("", params), lambda event: None)
            response = self._scheduler.step()
            if response.error is not None:
                raise response.error
        return response

    def _answer(self, request: GenerateRequest) -> RequestEnded:
        start = time.perf_counter()
        self._scheduler.submit(request, self._emitter())
        response = self._scheduler.step()
        if isinstance(response.error, RankLost):
            raise response.error
        if response.error is not None:
            return RequestEnded(request.request_id, failure=failure_of(response.error))
        reports = tuple(
            build_report(image, response, request.params, self._worker.pipeline)
            for image in response.images
        )
        reply = GenerateReply(response.images, reports, time.perf_counter() - start)
        return RequestEnded(request.request_id, reply)

    def _emitter(self) -> EmitProgress:
        pacer = StepPacer(self._worker.device)

        def emit(event: Progress | Preview) -> None:
            pacer.wait()
            if self._mailbox.wants_stop:
                raise RequestCancelled("the request was cancelled")
            channel.send(self._outbox, event)

        return emit

    def _recover(self, failure: WorkerFailure) -> None:
        """Free what the failed request held. After a failure that may have left the device in a
        bad state a canary picture is made; if that fails too, the process ends and is replaced."""
        gc.collect()
        if self._worker.device.type == "cuda" and failure.kind != "cancelled":
            drop_all_graphs()
            torch.cuda.empty_cache()
        if failure.kind not in HARMLESS:
            logger.error("%s\n%s", failure.message, failure.traceback)
            self.generate_all([canary(self._worker.spec)])


class StepPacer:
    """Keeps the host at most one step ahead of the GPU, so that a cancel acts within a step and
    progress tells of steps that have begun. The GPU never waits: the next step is queued by then.
    """

    def __init__(self, device: torch.device) -> None:
        self._paced = device.type == "cuda"
        self._previous: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Called after each step is queued: wait for the end of the step before it."""
        if not self._paced:
            return
        event = torch.cuda.Event(blocking=True)
        event.record()
        if self._previous is not None:
            self._previous.synchronize()
        self._previous = event


def failure_of(error: Exception) -> WorkerFailure:
    """An exception in words that the parent, who has no torch, can read."""
    trace = "".join(traceback.format_exception(error))
    if isinstance(error, InvalidParameter):
        name, reason = error.args
        return WorkerFailure("invalid", reason, trace, parameter=name)
    if isinstance(error, RequestCancelled):
        return WorkerFailure("cancelled", str(error), trace)
    if is_out_of_memory(error):
        first_line = str(error).partition("\n")[0]
        return WorkerFailure("oom", f"out of memory ({first_line}); {OOM_HINT}", trace)
    return WorkerFailure(type(error).__name__, str(error) or type(error).__name__, trace)


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory of the GPU or the host ran out. The host's is a plain RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )
