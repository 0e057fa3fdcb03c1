"""A server's worker process whose pictures are made by two ranks: cancels, deaths, nobody left."""

import os
import signal
from pathlib import Path

import pytest
from engine_harness import LONG, begun, serving

from sglang.multimodal_gen.runtime.managers.engine_state import EngineState
from sglang.multimodal_gen.runtime.managers.errors import RequestCancelled, WorkerDied
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=60, suite="base-a-test-cpu")


@pytest.fixture(scope="module")
def served(folder):
    with serving(folder, num_gpus=2) as served:
        served.run(served.engine.wait_ready())
        yield served


def rank_of(served):
    """The process id of rank 1: the only child of the worker."""
    worker = served.engine.worker_pid
    children = Path(f"/proc/{worker}/task/{worker}/children").read_text().split()
    (rank,) = [int(pid) for pid in children]
    return rank


def alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # a zombie has ended, and waits for a parent that is slow to look


async def long_request(served, act, error):
    """Begin a long request, do `act`, and expect it to end by `error`."""
    handle = served.engine.submit(served.params(**LONG), request_id="long")
    await begun(handle)
    act(handle)
    with pytest.raises(error) as caught:
        await handle.result()
    return caught.value


def test_a_cancelled_request_frees_all_ranks(served):
    report = served.run(served.ask()).reports[0]
    assert (report["layout"], report["num_gpus"]) == ("ulysses2", 2)
    served.run(long_request(served, lambda handle: handle.cancel(), RequestCancelled))
    assert served.sha() == report["sha256"]
    assert served.engine.snapshot().restarts == 0


def test_a_killed_rank_is_a_dead_worker_and_every_request_can_be_sent_again(served):
    sha, rank, before = served.sha(), rank_of(served), served.engine.snapshot().restarts
    waiting = []

    def kill(handle):
        waiting.append(served.engine.submit(served.params(), request_id="waits"))
        os.kill(rank, signal.SIGKILL)

    errors = [served.run(long_request(served, kill, WorkerDied))]
    with pytest.raises(WorkerDied) as caught:
        served.run(waiting[0].result())
    errors.append(caught.value)
    assert all(f"rank 1 (process {rank}) ended with SIGKILL" in str(error) for error in errors)
    served.until(lambda: served.engine.snapshot().restarts == before + 1)
    served.run(served.engine.wait_ready())
    assert served.sha() == sha


def test_when_rank_zero_is_killed_the_others_end_by_themselves(served):
    sha, rank = served.sha(), rank_of(served)
    worker = served.engine.worker_pid
    served.run(long_request(served, lambda handle: os.kill(worker, signal.SIGKILL), WorkerDied))
    served.until(lambda: not alive(rank), timeout=10)
    served.run(served.engine.wait_ready())
    assert served.engine.state is EngineState.READY and served.sha() == sha


def test_closing_the_engine_ends_the_ranks(served):
    rank = rank_of(served)
    assert alive(rank)
    served.run(served.engine.close())
    served.until(lambda: not alive(rank), timeout=10)
