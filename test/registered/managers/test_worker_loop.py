"""The worker's own parts, in this process: previews, messages over a pipe, what a failure does."""

import multiprocessing
import queue
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sglang.multimodal_gen import SamplingParams
from sglang.multimodal_gen.configs.validation import rejected
from sglang.multimodal_gen.runtime.managers import channel
from sglang.multimodal_gen.runtime.managers.errors import RequestCancelled
from sglang.multimodal_gen.runtime.managers.messages import (
    GenerateRequest,
    GenerateResponse,
    Preview,
    RequestEnded,
)
from sglang.multimodal_gen.runtime.managers.previews import PreviewMaker, preview_steps
from sglang.multimodal_gen.runtime.managers.warm_up import STEPS, canary, warm_up_requests
from sglang.multimodal_gen.runtime.managers.worker_loop import WorkerLoop, failure_of
from sglang.multimodal_gen.runtime.models.schedulers.flow_match_euler import euler_step
from sglang.multimodal_gen.runtime.pipelines.stages.checks import NonFiniteError
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

SPEC_OF_TINY = dict(width=64, height=64, num_inference_steps=4)


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 20, 50, 1000])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 7])
def test_previews_are_evenly_spaced_before_the_last_step(count, steps):
    due = preview_steps(count, steps)
    assert len(due) == min(count, steps - 1) and due == sorted(set(due))
    gaps = np.diff([0, *due, steps])
    assert min(gaps) >= 1 and max(gaps) - min(gaps) <= 1


def preview_of(local, index, latents, velocity):
    pipeline = local._worker.pipeline
    params = SamplingParams(prompt="a", **SPEC_OF_TINY).fit(pipeline.spec)
    sigmas = torch.tensor([1.0, 0.75, 0.5, 0.25, 0.0])
    image = SimpleNamespace(sigmas=sigmas, timesteps=1000 * sigmas[:-1], request=params.expand()[0])
    sent = []
    maker = PreviewMaker(GenerateRequest("r", params, previews=3), pipeline, sent.append)
    with torch.inference_mode():
        maker(image, index, latents, velocity)
    return sent, lambda x: pipeline.decode(x, params), sigmas


def test_a_preview_is_the_step_to_the_end_decoded(local):
    generator = torch.Generator().manual_seed(0)
    latents, velocity = torch.randn(2, 1, 16, 16, generator=generator)
    for index in (0, 1, 2):
        sent, decode, sigmas = preview_of(local, index, latents, velocity)
        to_the_end = euler_step(latents, velocity, sigmas[index], sigmas[4])
        with torch.inference_mode():
            expected = decode(to_the_end)
        assert [(p.request_id, p.image_index, p.step, p.total) for p in sent] == [
            ("r", 0, index + 1, 4)
        ]
        assert np.array_equal(sent[0].pixels, expected)
    assert preview_of(local, 3, latents, velocity)[0] == []  # the picture itself comes next


def test_an_estimate_that_cannot_be_decoded_costs_only_its_preview(local, caplog):
    latents = torch.full([1, 16, 16], float("nan"))
    sent, decode, _ = preview_of(local, 0, latents, latents)
    assert sent == [] and "no preview after step 1" in caplog.text
    with pytest.raises(NonFiniteError):
        decode(latents)


def test_messages_cross_a_pipe_with_their_arrays():
    reader, writer = multiprocessing.Pipe(duplex=False)
    pixels = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    sent = [Preview("a", 0, 1, 2, pixels), Preview("b", 1, 1, 2, pixels[::2]), "text"]
    for message in sent:
        channel.send(writer, message)
    writer.close()
    for message in sent[:2]:
        got = channel.receive(reader)
        assert got.request_id == message.request_id and np.array_equal(got.pixels, message.pixels)
    assert channel.receive(reader) == "text"
    with pytest.raises(EOFError):
        channel.receive(reader)
    reader.close()


def test_arrays_are_not_pickled():
    frames = channel.pack(Preview("a", 0, 1, 2, np.zeros([1024, 1024, 3], np.uint8)))
    assert len(frames) == 3 and len(frames[1]) < 1000 and len(frames[2]) == 3 * 2**20


def test_the_warm_up_fits_every_model(local):
    spec = local._worker.spec
    (small,) = warm_up_requests(spec, torch.device("cpu"))
    assert small == canary(spec) and small.num_inference_steps == STEPS == 4
    large = warm_up_requests(spec, torch.device("cuda", 0))
    assert [params.quality for params in large] == ["high", "lossless"]
    assert {(params.width, params.height) for params in large} == {(spec.width, spec.height)}


class FailingWorker:
    """A worker whose requests end as `outcomes` say: with an exception, or well for None."""

    device = torch.device("cpu")
    pipeline = None

    def __init__(self, spec, outcomes):
        self.spec, self.outcomes, self.asked = spec, list(outcomes), []

    def execute(self, request, emit):
        self.asked.append(request)
        error = self.outcomes.pop(0)
        if error is not None:
            raise error
        return GenerateResponse(request.request_id)


@pytest.fixture
def serve(local):
    """Serve one request for each outcome that is asked for; returns (worker, answers)."""

    def serve(*outcomes, requests=1):
        worker = FailingWorker(local._worker.spec, outcomes)
        inbox = queue.SimpleQueue()
        for number in range(requests):
            params = SamplingParams(prompt="a").fit(worker.spec)
            inbox.put(GenerateRequest(str(number), params))
        inbox.put(None)
        mailbox = SimpleNamespace(next=inbox.get, wants_stop=False)
        reader, writer = multiprocessing.Pipe(duplex=False)
        with reader, writer:
            WorkerLoop(worker, mailbox, writer).run()
            answers = []
            while reader.poll():
                answers.append(channel.receive(reader))
        return worker, answers

    return serve


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB"),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
)
def test_memory_that_ran_out_is_named_and_followed_by_a_canary(serve, error):
    worker, answers = serve(error, None, None, requests=2)
    assert answers[0].failure.kind == "oom"
    assert "out of memory" in answers[0].failure.message
    assert "ask for a smaller picture" in answers[0].failure.message
    assert [request.request_id for request in worker.asked] == ["0", "", "1"]
    assert worker.asked[1].params == canary(worker.spec)
    assert answers[1] == RequestEnded("1", reply=answers[1].reply)


def test_a_failed_canary_ends_the_worker(serve):
    with pytest.raises(RuntimeError, match="illegal memory access"):
        serve(RuntimeError("CUDA error"), RuntimeError("CUDA error: an illegal memory access"))


@pytest.mark.parametrize(
    "error, kind",
    [
        (rejected("width", 3, "more"), "invalid"),
        (RequestCancelled("x"), "cancelled"),
        (NonFiniteError("latents hold NaN"), "NonFiniteError"),
    ],
)
def test_a_fault_of_the_request_needs_no_canary(serve, error, kind):
    worker, answers = serve(error)
    assert answers[0].failure.kind == kind and len(worker.asked) == 1


def test_a_failure_carries_its_traceback():
    try:
        raise KeyError("weights")
    except KeyError as error:
        failure = failure_of(error)
    assert (failure.kind, failure.message) == ("KeyError", "'weights'")
    assert "test_a_failure_carries_its_traceback" in failure.traceback
    assert failure_of(RuntimeError()).message == "RuntimeError"
