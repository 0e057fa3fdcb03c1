"""`sglang serve --replicas 2` on the CPU: bytes, deaths under load, cancels, restarts, the end."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import process_tree
import pytest
from live_server import LiveServer, alive, wait_for

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=80, suite="base-a-test-cpu")

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None,
    reason="needs the extra ray, 112 MB, which the tests do not install",
)

REPLICAS, MAX_QUEUE = 2, 32
RESTART_S = 120  # of a replica, on a busy machine
SMALL = {"size": "64x64", "num_inference_steps": 2}
LONG = {"prompt": "a", "size": "64x64", "num_inference_steps": 200, "n": 10}


@pytest.fixture(scope="module")
def started():
    flags = ("--replicas", str(REPLICAS), "--max-queue", str(MAX_QUEUE))
    with LiveServer(*flags) as server:
        yield server.wait_ready()


@pytest.fixture
def server(started):
    wait_for(lambda: running(started) == REPLICAS, RESTART_S)
    return started


def post(server, body, **kwargs):
    return httpx.post(f"{server.url}/v1/images/generations", json=body, timeout=120, **kwargs)


def running(server):
    health = httpx.get(f"{server.url}/health", timeout=30)
    return health.json()["replicas"].get("running") if health.status_code == 200 else 0


def metric(server, name):
    lines = httpx.get(f"{server.url}/metrics", timeout=30).text.splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if line[:1] != "#")
    return float(values.get(name, 0))


def workers(server):
    """Worker process -> its actor."""
    return process_tree.children_of(server.process.pid, "ray::ServeReplica", "spawn_main")


def shas(answer):
    assert answer.status_code == 200, answer.text
    return [picture["report"]["sha256"] for picture in answer.json()["data"]]


def test_either_replica_makes_the_bytes_of_the_command_line(server, tmp_path):
    asked = {"prompt": "a red apple", "seed": 7, **SMALL}
    words = ["--prompt", "a red apple", "--seed", "7", "--num-inference-steps", "2"]
    words += ["--width", "64", "--height", "64", "--output-path", str(tmp_path)]
    command = [sys.executable, "-m", "sglang.cli", "generate", *words, "--output-file-name", "a"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*command, "--device", "cpu"], env=environment, check=True)
    before = {pid: process_tree.cpu_seconds(pid) for pid in workers(server)}
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: post(server, asked), range(12)))
    assert len(before) == REPLICAS
    assert all(process_tree.cpu_seconds(pid) > seconds for pid, seconds in before.items())
    made = (tmp_path / "a.png").read_bytes()
    assert {httpx.get(a.json()["data"][0]["url"]).content for a in answers} == {made}


MIXED = [
    {"prompt": "a red apple", "seed": 3, **SMALL},
    {"prompt": "a blue cube", "size": "128x64", "num_inference_steps": 3},
    {"prompt": "one", "n": 4, **SMALL, "num_inference_steps": 1},
    {"prompt": "streamed", "stream": True, "partial_images": 1, **SMALL},
    {"prompt": "refused", "size": "1x1"},
]


def outcome(server, body):
    """What a request gave: a status and the pictures' hashes."""
    answer = post(server, body)
    if body.get("stream"):
        assert "event: error" not in answer.text, answer.text
        last = answer.text.rpartition("event: image_generation.completed\ndata: ")[2]
        return answer.status_code, (json.loads(last)["b64_json"],)
    return answer.status_code, tuple(shas(answer)) if answer.status_code == 200 else ()


@pytest.mark.parametrize("victim", ["the worker", "the replica"])
def test_40_mixed_requests_outlive_a_kill(server, victim):
    expected = [outcome(server, body) for body in MIXED]
    assert [status for status, _ in expected] == [200, 200, 200, 200, 400]
    restarts = metric(server, "sglang_worker_restarts_total")
    repeats = metric(server, "sglang_repeats_total")
    with ThreadPoolExecutor(10) as pool:
        answers = [pool.submit(outcome, server, body) for body in MIXED * 8]
        wait_for(lambda: sum(answer.done() for answer in answers) >= 5, 60)
        worker, actor = next(iter(workers(server).items()))
        os.kill(worker if victim == "the worker" else actor, signal.SIGKILL)
        wait_for(lambda: running(server) != REPLICAS, 30)  # health tells
        assert server.status("/health") == 200  # and the other one goes on
        assert [answer.result() for answer in answers] == expected * 8
    wait_for(lambda: not alive(worker), 10)
    wait_for(lambda: running(server) == REPLICAS, RESTART_S)
    assert metric(server, "sglang_worker_restarts_total") == restarts + 1
    assert metric(server, "sglang_repeats_total") > repeats


def test_a_full_queue_is_a_429_and_cancelling_frees_every_replica(server):
    ids = [f"long-{i}" for i in range(REPLICAS + MAX_QUEUE)]
    with ThreadPoolExecutor(len(ids)) as pool:
        answers = [pool.submit(post, server, LONG, headers={"X-Request-Id": id}) for id in ids]
        wait_for(lambda: metric(server, "sglang_queue_depth") == MAX_QUEUE, 30)
        refused = post(server, LONG)
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        for name in ids:
            cancelled = httpx.post(f"{server.url}/v1/images/{name}/cancel", timeout=30)
            assert cancelled.status_code == 200, cancelled.text
        assert {answer.result().status_code for answer in answers} == {499}
    begin = time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(lambda _: shas(post(server, {"prompt": "a", **SMALL})), range(4)))
    assert time.monotonic() - begin < 20  # one LONG takes minutes


def test_a_client_that_hangs_up_frees_its_replica(server):
    before = metric(server, 'sglang_requests_total{status="cancelled"}')
    url = f"{server.url}/v1/images/generations"
    with httpx.stream("POST", url, json=LONG | {"stream": True}, timeout=60) as stream:
        next(text for text in stream.iter_text() if '"step"' in text)
    status = 'sglang_requests_total{status="cancelled"}'
    wait_for(lambda: metric(server, status) == before + 1, 10)
    wait_for(lambda: idle(server), 20)


def idle(server):
    """Whether no worker computes."""
    before = [process_tree.cpu_seconds(pid) for pid in workers(server)]
    time.sleep(0.5)
    return [process_tree.cpu_seconds(pid) for pid in workers(server)] == before


def test_a_rolling_restart_keeps_answering(server):
    before, asked = set(workers(server)), {"prompt": "a red apple", "seed": 3, **SMALL}
    expected, statuses, end = shas(post(server, asked)), set(), time.monotonic() + 2 * RESTART_S
    server.process.send_signal(signal.SIGHUP)
    while before & set(workers(server)) or running(server) != REPLICAS:
        assert shas(post(server, asked)) == expected
        statuses.add(server.status("/health"))
        assert time.monotonic() < end
        time.sleep(0.2)
    assert statuses == {200}


def test_sigterm_finishes_what_was_accepted_and_leaves_no_process(server):
    processes = process_tree.descendants(server.process.pid)
    assert len(processes) > 2 * REPLICAS
    body = {"prompt": "a", "size": "64x64", "num_inference_steps": 30}
    printed = len(server.lines)
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(post, server, body) for _ in range(4)]
        wait_for(lambda: metric(server, "sglang_requests_running") == REPLICAS, 20)
        server.terminate()
        assert [answer.result().status_code for answer in answers] == [200] * 4
    status, _ = server.ended(60)
    assert status == 0 and "Traceback" not in "".join(server.lines[printed:])
    wait_for(lambda: not any(alive(pid) for pid in processes), 10)


def test_a_killed_server_leaves_no_replica():
    with LiveServer("--replicas", "1") as server:
        wait_for(lambda: workers(server), RESTART_S)
        ((worker, actor),) = workers(server).items()
        server.process.kill()
        wait_for(lambda: not alive(worker) and not alive(actor), 30)
