"""An engine of many replicas, and its requests, over a cluster that a test plays."""

import asyncio
import socket
from types import SimpleNamespace

import pytest

from sglang.multimodal_gen import SamplingParams
from sglang.multimodal_gen.configs.model_specs import BUNDLED_MODEL, read_model_spec
from sglang.multimodal_gen.configs.server_args import ServerArgs
from sglang.multimodal_gen.runtime.managers import replicated_engine
from sglang.multimodal_gen.runtime.managers.engine_state import EngineState
from sglang.multimodal_gen.runtime.managers.errors import (
    EngineFailed,
    EngineUnavailable,
    QueueFull,
    RequestCancelled,
    RequestTimedOut,
    WorkerDied,
)
from sglang.multimodal_gen.runtime.managers.messages import GenerateReply, Progress
from sglang.multimodal_gen.runtime.managers.repeated_requests import MAX_DEATHS
from sglang.multimodal_gen.runtime.managers.replica import Replica, ReplicaInfo
from sglang.multimodal_gen.runtime.managers.replica_cluster import ClusterStatus, check_reachable
from sglang.multimodal_gen.runtime.managers.replicated_engine import ReplicatedEngine
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

SPEC = read_model_spec(BUNDLED_MODEL)
PARAMS = SamplingParams(prompt="a fox").fit(SPEC)
REPORT = {"stage_seconds": {"Stage": 1.0}, "sites": (), "peak_memory_mb": 1.0}
REPLY = GenerateReply((), (REPORT,), 1.0)
DIED = WorkerDied("the replica is gone")


class PlayedCluster:
    """`script`: what the replicas answer, one after another; None: nothing, for ever."""

    def __init__(self, *script):
        self.script, self.asked, self.called = list(script), [], []
        self.now = running(2)

    def connect(self):
        self.called.append("connect")

    def deploy(self):
        self.called.append("deploy")

    def close(self):
        self.called.append("close")

    def status(self):
        return self.now

    def about(self):
        count = self.now.states.get("running", 0)
        return [ReplicaInfo("here", pid, 100 + pid, "cpu", SPEC) for pid in range(count)]

    async def ask(self, request, tell):
        self.asked.append(request.request_id)
        outcome = self.script.pop(0) if self.script else REPLY
        tell(Progress("denoise", 1, 2))
        if outcome is None:
            await asyncio.Event().wait()
        return outcome


def running(count, *, settled=True, failed=False, message="", **others):
    states = {"running": count} if count else {}
    return ClusterStatus(states | others, settled, failed, message)


@pytest.fixture
def play(monkeypatch):
    """Run a coroutine function with (engine, cluster), the engine ready unless `ready` is false."""
    monkeypatch.setattr(replicated_engine, "POLL_S", 0.01)

    def play(work, *script, ready=True, max_queue=2, request_timeout=60.0, status=None):
        async def main():
            cluster = PlayedCluster(*script)
            cluster.now = status or cluster.now
            engine = ReplicatedEngine(
                ServerArgs(), cluster, max_queue=max_queue, request_timeout=request_timeout
            )
            await engine.start()
            if ready:
                await engine.wait_ready()
            try:
                return await work(engine, cluster)
            finally:
                await engine.close()
                assert cluster.called[-1] == "close"

        return asyncio.run(asyncio.wait_for(main(), 30))

    return play


async def until(condition):
    while not condition():
        await asyncio.sleep(0.005)


def submit(engine, name="a"):
    return engine.submit(PARAMS, request_id=name)


def test_a_request_is_answered_and_counted(play):
    async def work(engine, cluster):
        handle = submit(engine)
        assert await handle.result() is REPLY
        assert [event.done async for event in handle.events()] == [1]
        assert engine.worker_pid == 100 and engine.spec == SPEC
        return engine.snapshot()

    now = play(work)
    assert (now.requests, now.replicas, now.repeats) == ({"finished": 1}, {"running": 2}, 0)
    assert (now.device, now.running, now.queue_depth) == ("cpu", 0, 0)
    assert now.stage_seconds == {"Stage": 1.0}


def test_a_request_is_asked_again_when_its_replica_dies(play):
    async def work(engine, cluster):
        assert await submit(engine).result() is REPLY
        return cluster.asked, engine.snapshot()

    asked, now = play(work, DIED, EngineUnavailable("restarting"), DIED)
    assert asked == ["a"] * 4 and now.repeats == 2 and now.requests == {"finished": 1}


def test_a_request_that_kills_replicas_is_given_up(play):
    async def work(engine, cluster):
        with pytest.raises(WorkerDied):
            await submit(engine).result()
        return len(cluster.asked)

    assert play(work, *[DIED] * 9) == MAX_DEATHS


@pytest.mark.parametrize("error", [EngineFailed("no memory", "oom"), RequestTimedOut("late")])
def test_other_errors_are_answers(play, error):
    async def work(engine, cluster):
        with pytest.raises(type(error)):
            await submit(engine).result()
        return cluster.asked

    assert play(work, error) == ["a"]


def test_the_queue_is_bounded_and_a_cancel_makes_room(play):
    async def work(engine, cluster):
        handles = [submit(engine, f"r{i}") for i in range(4)]  # two at work, two wait
        now = engine.snapshot()
        assert (now.running, now.queue_depth) == (2, 2)
        with pytest.raises(QueueFull) as refused:
            submit(engine)
        assert refused.value.waiting == 2 and refused.value.retry_after_s >= 1
        handles[0].cancel()
        with pytest.raises(RequestCancelled):
            await handles[0].result()
        submit(engine)
        return engine.snapshot().requests

    assert play(work, *[None] * 9) == {"refused": 1, "cancelled": 1}


def test_the_deadline_holds_over_repeats(play):
    async def work(engine, cluster):
        with pytest.raises(RequestTimedOut):
            await submit(engine).result()
        return engine.snapshot()

    now = play(work, *[EngineUnavailable("restarting")] * 99, request_timeout=0.5)
    assert now.requests == {"timed_out": 1} and now.running == 0


def test_states_follow_the_replicas(play):
    async def work(engine, cluster):
        assert engine.state is EngineState.LOADING
        with pytest.raises(EngineUnavailable):
            submit(engine)
        cluster.now = running(2)
        await engine.wait_ready()
        cluster.now = running(1, settled=False, starting=1)
        await until(lambda: "1 starting" in engine.detail)
        assert engine.state is EngineState.READY
        cluster.now = running(0, settled=False, starting=2)
        await until(lambda: engine.state is EngineState.RESTARTING)
        cluster.now = running(2)
        await until(lambda: engine.state is EngineState.READY)
        return engine.snapshot().restarts

    assert play(work, ready=False, status=running(1, settled=False, starting=1)) == 2


def test_a_start_that_fails_is_told(play):
    async def work(engine, cluster):
        with pytest.raises(EngineUnavailable, match="a corrupt file"):
            await engine.wait_ready()
        return engine.state

    failed = running(0, settled=False, failed=True, message="a corrupt file")
    assert play(work, ready=False, status=failed) is EngineState.STOPPED


def test_a_failed_restart_leaves_the_old_replicas(play, caplog):
    async def work(engine, cluster):
        engine.restart()
        await until(lambda: cluster.called.count("deploy") == 2)
        cluster.now = running(2, settled=False, failed=True, message="a corrupt file")
        await until(lambda: "the restart failed" in caplog.text)
        return await submit(engine).result()

    assert play(work) is REPLY


def test_draining_finishes_what_was_accepted(play):
    async def work(engine, cluster):
        handle = submit(engine)
        await engine.drain(10)
        with pytest.raises(EngineUnavailable):
            submit(engine)
        return await handle.result(), engine.state

    assert play(work) == (REPLY, EngineState.STOPPED)


def test_closing_ends_every_request(play):
    async def work(engine, cluster):
        handle = submit(engine)
        await engine.drain(0.05)
        with pytest.raises(WorkerDied):
            await handle.result()

    play(work, None)


def test_an_address_where_no_cluster_is_ends_the_start_at_once():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(EngineUnavailable, match=f"the Ray cluster at {address}: .*its head"):
            check_reachable(address)
        free.listen()
        check_reachable(address)


class LostEngine:
    """An engine whose worker is gone; closed, it says so instead."""

    state, detail = EngineState.RESTARTING, "the worker ended with SIGKILL"

    async def close(self):
        self.detail = "the engine was closed"


def test_a_replica_keeps_saying_why_its_worker_is_gone():
    replica = SimpleNamespace(_engine=LostEngine(), _lost=None)
    for _ in range(2):
        with pytest.raises(EngineUnavailable, match="ended with SIGKILL"):
            asyncio.run(Replica.check_health(replica))
