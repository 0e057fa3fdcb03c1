"""What rank 0 notices of its ranks: answers, deaths, failures, silence; and that none is left."""

import os
import time

import pytest

from sglang.multimodal_gen.runtime.distributed import launch
from sglang.multimodal_gen.runtime.distributed.launch import RankLost, RankProcesses
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=12, suite="base-a-test-cpu")

MODULE = "sglang.test.rank_stub"


@pytest.fixture
def ranks():
    processes = RankProcesses(MODULE, 2, 20.0)
    yield processes
    processes.close()


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def texts(ranks):
    return [answer.text for answer in ranks.answers()]


def test_every_rank_gets_its_message_and_answers_in_order(ranks):
    assert texts(ranks) == ["ready", "ready"]
    ranks.send(["a", "b"])
    assert texts(ranks) == ["a", "b"]
    ranks.send_all("c")
    assert texts(ranks) == ["c", "c"]


def test_close_leaves_no_process_and_no_folder(ranks):
    assert texts(ranks) == ["ready", "ready"]
    folder = os.path.dirname(ranks.store_file)
    assert os.path.isdir(folder) and all(map(alive, ranks.pids))
    ranks.close()
    assert not any(map(alive, ranks.pids)) and not os.path.exists(folder)
    ranks.close()


def test_a_rank_that_does_not_leave_is_killed(ranks, monkeypatch):
    monkeypatch.setattr(launch, "EXIT_TIMEOUT_S", 0.3)
    ranks.send_all("stay")
    assert texts(ranks) == ["ready", "ready"] and texts(ranks) == ["stay", "stay"]
    ranks.close()
    assert not any(map(alive, ranks.pids))


def test_a_rank_that_is_killed_ends_all_with_one_error(ranks):
    assert texts(ranks) == ["ready", "ready"]
    start = time.monotonic()
    ranks.send(["hang", "die"])
    with pytest.raises(RankLost, match=r"^rank 2 \(process \d+\) ended with SIGKILL; load the"):
        ranks.answers()
    assert time.monotonic() - start < 5
    for call in (ranks.check, ranks.answers, lambda: ranks.send_all("x"), ranks.wait_for_loss):
        with pytest.raises(RankLost, match="^rank 2 .* SIGKILL; load the model again"):
            call()
    ranks.close()
    assert not any(map(alive, ranks.pids))


def test_a_death_is_noticed_while_nobody_asks(ranks):
    assert texts(ranks) == ["ready", "ready"]
    ranks.send(["die", "x"])
    with pytest.raises(RankLost, match="^rank 1 .* SIGKILL"):
        ranks.wait_for_loss()
        ranks.wait_for_loss()


def test_the_error_of_a_rank_that_fails_carries_its_words(ranks):
    assert texts(ranks) == ["ready", "ready"]
    ranks.send(["x", "fail"])
    with pytest.raises(RankLost) as caught:
        ranks.wait_for_loss()
        ranks.wait_for_loss()
    assert "rank 2" in str(caught.value) and "status 1" in str(caught.value)
    assert "ValueError: a weight is missing" in str(caught.value)


def test_a_rank_that_does_not_start_ends_all_after_the_time_out():
    ranks = RankProcesses("http.server", 1, 1.0)  # a module without a `main`: it ends
    with pytest.raises(RankLost, match="rank 1 .* ended with status 1"):
        ranks.answers()
    ranks.close()
    ranks = RankProcesses(MODULE, 1, 0.0)
    with pytest.raises(RankLost, match="took longer than 0 s"):
        ranks.wait_for_loss()
    ranks.close()


def test_silence_ends_all_after_the_time_out():
    ranks = RankProcesses(MODULE, 1, 2.0)
    try:
        assert texts(ranks) == ["ready"]
        ranks.send_all("hang")
        start = time.monotonic()
        with pytest.raises(RankLost, match=r"than 2 s \(SGLANG_DIFFUSION_COLLECTIVE_TIMEOUT\)"):
            ranks.answers()
        assert 1.5 < time.monotonic() - start < 10
    finally:
        ranks.close()
    assert not any(map(alive, ranks.pids))
