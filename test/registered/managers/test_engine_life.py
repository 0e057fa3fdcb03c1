"""The engine's life with a worker that is only pretended: back-off, deadlines, giving up."""

import asyncio
import itertools

import pytest

from sglang.multimodal_gen import SamplingParams
from sglang.multimodal_gen.configs.server_args import ServerArgs
from sglang.multimodal_gen.configs.validation import InvalidParameter
from sglang.multimodal_gen.runtime.managers import engine_client
from sglang.multimodal_gen.runtime.managers.engine_client import EngineClient
from sglang.multimodal_gen.runtime.managers.engine_state import EngineState
from sglang.multimodal_gen.runtime.managers.errors import (
    EngineFailed,
    EngineUnavailable,
    QueueFull,
    RequestTimedOut,
    WorkerDied,
)
from sglang.multimodal_gen.runtime.managers.messages import (
    CancelRequest,
    GenerateReply,
    Progress,
    RequestEnded,
    WorkerFailure,
    WorkerReady,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

REPORT = {"stage_seconds": {"DenoisingStage": 0.5}, "sites": [], "peak_memory_mb": 1.0}
REPLY = GenerateReply(images=(), reports=(REPORT,), seconds=4.0)


class PretendedLink:
    """A worker that does what `plan` says when it is started; the test does the rest."""

    started = []
    plan = staticmethod(lambda link: None)

    def __init__(self, args, warmup, on_message):
        self.tell, self.sent = on_message, []
        self.ended = asyncio.get_running_loop().create_future()
        self.pid = 1000 + len(self.started)
        self.started.append(self)
        self.plan(self)

    def send(self, message):
        self.sent.append(message)

    def die(self, text="the worker process was ended by SIGKILL"):
        if not self.ended.done():
            self.ended.set_result(text)

    kill = die

    def ready(self, spec):
        self.tell(WorkerReady(spec, "cpu", sites=(), peak_memory_mb=0.0))

    async def close(self):
        self.die()


@pytest.fixture
def link(monkeypatch):
    """The class in place of the real link, with its own list and plan."""
    fresh = type("Link", (PretendedLink,), {"started": []})
    monkeypatch.setattr(engine_client, "WorkerLink", fresh)
    monkeypatch.setattr(engine_client, "FIRST_BACK_OFF_S", 0.001)
    return fresh


@pytest.fixture
def run(link):
    """Run a test's coroutine with a started engine of the bundled model."""

    def run(work, **settings):
        async def main():
            settings.setdefault("request_timeout", 30)
            engine = EngineClient(ServerArgs(device="cpu"), max_queue=2, **settings)
            await engine.start()
            while not link.started:
                await asyncio.sleep(0)
            try:
                return await asyncio.wait_for(work(engine), 20)
            finally:
                await engine.close()

        return asyncio.run(main())

    return run


def submit(engine, name):
    return engine.submit(SamplingParams(prompt="a").fit(engine.spec), request_id=name)


def test_a_request_waits_for_the_one_before(run, link):
    async def work(engine):
        worker = link.started[0]
        assert engine.state is EngineState.LOADING
        worker.tell(Progress("vae", 3, 4))
        assert engine.detail == "loading: vae (3 of 4)"
        with pytest.raises(EngineUnavailable, match="vae"):
            submit(engine, "early")
        worker.ready(engine.spec)
        await engine.wait_ready()
        handles = [submit(engine, name) for name in "abc"]
        with pytest.raises(QueueFull, match="2 requests are waiting; try again in 1 s"):
            submit(engine, "d")
        for name, handle in zip("abc", handles, strict=True):
            assert worker.sent[-1].request_id == name
            worker.tell(RequestEnded(name, REPLY))
            assert await handle.result() is REPLY
        assert engine.snapshot().requests == {"refused": 1, "finished": 3}
        assert engine.snapshot().stage_seconds == {"DenoisingStage": 1.5}
        handles = [submit(engine, name) for name in "efg"]
        with pytest.raises(QueueFull) as refused:
            submit(engine, "h")
        return refused.value.retry_after_s

    assert run(work) == 3  # the first guess of 1 s, drawn towards 4 s three times, rounded up


def test_failures_reach_the_caller_as_what_they_are(run, link):
    async def work(engine):
        worker = link.started[0]
        worker.ready(engine.spec)
        failures = {
            EngineFailed: WorkerFailure("NonFiniteError", "latents hold NaN", "Traceback ..."),
            InvalidParameter: WorkerFailure("invalid", "got 1, expected 2", "", parameter="width"),
        }
        for expected, failure in failures.items():
            handle = submit(engine, "a")
            worker.tell(RequestEnded("a", failure=failure))
            with pytest.raises(expected, match="got 1|NaN") as raised:
                await handle.result()
            assert getattr(raised.value, "kind", "NonFiniteError") == "NonFiniteError"
        assert engine.snapshot().requests == {"failed": 1, "invalid": 1}

    run(work)


def test_the_deadline_counts_in_the_queue_and_stops_the_worker(run, link):
    async def work(engine):
        worker = link.started[0]
        worker.ready(engine.spec)
        for handle in [submit(engine, "a"), submit(engine, "b")]:
            with pytest.raises(RequestTimedOut, match=r"0\.05 s"):
                await handle.result()
        assert [type(m) for m in worker.sent[1:]] == [CancelRequest]  # "b" was never sent
        assert (engine.snapshot().running, engine.snapshot().queue_depth) == (1, 0)
        failure = WorkerFailure("cancelled", "", "")
        worker.tell(RequestEnded("a", failure=failure))
        assert engine.snapshot().running == 0
        assert engine.snapshot().requests == {"timed_out": 2}

    run(work, request_timeout=0.05)


def test_the_back_off_doubles_until_a_request_was_served(run, link, monkeypatch):
    waits, sleep = [], asyncio.sleep

    async def note(seconds):
        waits.append(seconds)
        await sleep(0)

    async def work(engine):
        link.started[0].ready(engine.spec)
        monkeypatch.setattr(engine_client.asyncio, "sleep", note)
        monkeypatch.setattr(engine_client, "FIRST_BACK_OFF_S", 1.0)
        for count in itertools.count(1):
            worker = link.started[-1]
            if count == 8:
                worker.ready(engine.spec)
                handle = submit(engine, "a")
                worker.tell(RequestEnded("a", REPLY))
                await handle.result()
            worker.die()
            while link.started[-1] is worker:
                await sleep(0)
            if count == 9:
                return engine.state

    assert run(work) is EngineState.RESTARTING
    assert waits == [1, 2, 4, 8, 16, 30, 30, 1, 2]


def test_a_failed_first_load_is_final_and_says_why(run, link):
    async def work(engine):
        failure = WorkerFailure("invalid", "no such model", "", parameter="model_path")
        link.started[0].tell(failure)
        link.started[0].die("the worker process ended with status 1")
        with pytest.raises(EngineUnavailable, match="model_path: no such model") as refused:
            await engine.wait_ready()
        assert isinstance(refused.value.__cause__, InvalidParameter)
        return engine.state, len(link.started)

    assert run(work) == (EngineState.STOPPED, 1)


def test_a_worker_that_never_comes_up_is_given_up(run, link):
    link.plan = staticmethod(lambda link: link.die())

    async def work(engine):
        with pytest.raises(EngineUnavailable, match="SIGKILL"):
            await engine.wait_ready()
        return engine.state, len(link.started)

    assert run(work) == (EngineState.STOPPED, engine_client.MAX_FIRST_STARTS)


def test_a_failed_load_after_a_good_one_is_tried_again(run, link):
    async def work(engine):
        link.started[0].ready(engine.spec)
        link.plan = staticmethod(lambda link: link.die() if len(link.started) < 6 else None)
        link.started[0].die()
        while len(link.started) < 6:
            await asyncio.sleep(0.001)
        assert engine.state is EngineState.RESTARTING
        link.started[-1].ready(engine.spec)
        await engine.wait_ready()
        return engine.snapshot().restarts

    assert run(work) == 5


def test_a_start_has_a_deadline(run, link, monkeypatch):
    monkeypatch.setattr(engine_client, "START_TIMEOUT_S", 0.01)

    async def work(engine):
        with pytest.raises(EngineUnavailable):
            await engine.wait_ready()
        return len(link.started)

    assert run(work) == engine_client.MAX_FIRST_STARTS


def test_draining_ends_at_its_deadline(run, link):
    async def work(engine):
        link.started[0].ready(engine.spec)
        handle = submit(engine, "a")
        await engine.drain(0.05)
        with pytest.raises(WorkerDied, match="closed before the request ended"):
            await handle.result()
        return engine.state, engine.snapshot().running

    assert run(work) == (EngineState.STOPPED, 0)


def test_a_worker_that_dies_while_draining_is_not_replaced(run, link):
    async def work(engine):
        link.started[0].ready(engine.spec)
        handle = submit(engine, "a")
        draining = asyncio.create_task(engine.drain(10))
        await asyncio.sleep(0)
        link.started[0].die()
        with pytest.raises(WorkerDied, match="SIGKILL"):
            await handle.result()
        await draining
        return engine.state, len(link.started)

    assert run(work) == (EngineState.STOPPED, 1)


def test_events_that_nobody_reads_are_bounded(run, link):
    async def work(engine):
        worker = link.started[0]
        worker.ready(engine.spec)
        handle = submit(engine, "a")
        for done in range(10_000):
            worker.tell(Progress("denoise 1/1", done, 10_000))
        worker.tell(RequestEnded("a", REPLY))
        events = [event async for event in handle.events()]
        assert [event async for event in handle.events()] == []  # ended, so no hang
        return len(events), events[-1].done

    assert run(work) == (4095, 9999)


def test_a_hub_id_has_no_spec_before_it_is_loaded():
    args = ServerArgs(model_path="owner/name", device="cpu")

    async def main():
        engine = EngineClient(args, max_queue=1, request_timeout=1)
        with pytest.raises(EngineUnavailable, match="not loaded"):
            _ = engine.spec

    asyncio.run(main())


def test_a_folder_that_does_not_exist_is_refused_at_once():
    with pytest.raises(InvalidParameter, match="model_path"):
        EngineClient(ServerArgs(model_path="/nowhere/x"), max_queue=1, request_timeout=1)
