"""The worker killed, hung, out of memory or unable to load; the parent killed or careless."""

import os
import resource
import signal
import time
from pathlib import Path

import pytest
from engine_harness import LONG, begun, serving

from sglang.multimodal_gen.runtime.managers import request_queue
from sglang.multimodal_gen.runtime.managers.engine_state import EngineState
from sglang.multimodal_gen.runtime.managers.errors import (
    EngineFailed,
    EngineUnavailable,
    RequestTimedOut,
    WorkerDied,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=120, suite="base-a-test-cpu")

TIMEOUT_S = 3.0


@pytest.fixture(scope="module")
def served(folder):
    """A ready engine with a short deadline, whose first worker was killed while it loaded."""
    with serving(folder, request_timeout=TIMEOUT_S) as served:
        served.until(lambda: served.engine.worker_pid is not None)
        assert served.engine.state is EngineState.LOADING
        with pytest.raises(EngineUnavailable, match="load"):
            served.engine.submit(served.params(), request_id="early")
        os.kill(served.engine.worker_pid, signal.SIGKILL)
        served.until(lambda: served.engine.state is EngineState.RESTARTING)
        served.run(served.engine.wait_ready())
        yield served


def test_a_killed_worker_is_reported_at_once_and_replaced(served):
    sha, before = served.sha(), served.engine.snapshot()

    async def work():
        running = served.engine.submit(served.params(**LONG), request_id="running")
        waiting = served.engine.submit(served.params(), request_id="waiting")
        await begun(running)
        os.kill(served.engine.worker_pid, signal.SIGKILL)
        begin = time.perf_counter()
        for handle in (running, waiting):
            with pytest.raises(WorkerDied, match="SIGKILL"):
                await handle.result()
        seconds = time.perf_counter() - begin
        assert served.engine.state is EngineState.RESTARTING
        with pytest.raises(EngineUnavailable, match="SIGKILL.*started again"):
            served.engine.submit(served.params(), request_id="between")
        await served.engine.wait_ready()
        return seconds

    assert served.run(work()) < 5
    assert served.engine.state is EngineState.READY
    assert served.sha() == sha
    after = served.engine.snapshot()
    assert after.restarts == before.restarts + 1
    assert after.requests["worker_died"] == before.requests.get("worker_died", 0) + 2


def test_the_deadline_covers_queue_and_work(served):
    async def work():
        running = served.engine.submit(served.params(**LONG), request_id="running")
        waiting = served.engine.submit(served.params(**LONG), request_id="waiting")
        begin = time.perf_counter()
        for handle in (running, waiting):
            with pytest.raises(RequestTimedOut, match="3 s"):
                await handle.result()
        return time.perf_counter() - begin

    assert served.run(work()) == pytest.approx(TIMEOUT_S, abs=1)
    assert served.until(lambda: not served.engine.snapshot().running) < 1
    assert served.sha() and served.engine.snapshot().requests["timed_out"] == 2


def test_a_hung_worker_is_replaced_after_a_cancel_that_it_ignores(served, monkeypatch):
    monkeypatch.setattr(request_queue, "CANCEL_TIMEOUT_S", 0.3)
    pid, restarts = served.engine.worker_pid, served.engine.snapshot().restarts

    async def work():
        handle = served.engine.submit(served.params(**LONG), request_id="x")
        await begun(handle)
        os.kill(pid, signal.SIGSTOP)
        handle.cancel()

    served.run(work())
    served.until(lambda: served.engine.state is EngineState.RESTARTING, timeout=5)
    served.run(served.engine.wait_ready())
    assert served.engine.worker_pid != pid and served.engine.snapshot().restarts == restarts + 1
    assert served.sha()


def test_out_of_memory_is_an_error_with_a_hint_and_the_worker_goes_on(served):
    sha, pid = served.sha(), served.engine.worker_pid
    used = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
    hard = resource.prlimit(pid, resource.RLIMIT_AS)[1]
    resource.prlimit(pid, resource.RLIMIT_AS, (used + 2**27, hard))
    with pytest.raises(EngineFailed, match="out of memory.*smaller picture") as failed:
        served.sha(width=4096, height=4096, num_inference_steps=1)
    assert failed.value.kind == "oom" and "Traceback" in failed.value.__notes__[0]
    assert served.sha() == sha
    resource.prlimit(pid, resource.RLIMIT_AS, (hard, hard))
    assert served.engine.worker_pid == pid and served.engine.state is EngineState.READY
