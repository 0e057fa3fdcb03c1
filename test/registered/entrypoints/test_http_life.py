"""The life of `sglang serve`: start, the worker's death, drain, the parent's death."""

import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from live_server import LiveServer, alive, wait_for

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.tiny_checkpoints import write_tiny_flux

register_cpu_ci(est_time=60, suite="base-a-test-cpu")

LAUNCH = {"module": "sglang.multimodal_gen.runtime.launch_server", "words": ()}
LONG = {"prompt": "a", "num_inference_steps": 200, "n": 10}
SHORT = {"prompt": "a red apple", "num_inference_steps": 1}


@pytest.fixture(scope="module")
def server():
    with LiveServer("--request-timeout", "60", **LAUNCH) as started:
        yield started.wait_ready()


def post(server, body, **kwargs):
    return httpx.post(f"{server.url}/v1/images/generations", json=body, timeout=60, **kwargs)


def running(server):
    return "sglang_requests_running 1.0" in httpx.get(f"{server.url}/metrics").text


def taken(server):
    """Requests that were accepted since the server started: ended, running or waiting."""
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    counted = ("sglang_requests_running", "sglang_queue_depth", "sglang_requests_total")
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(counted))


def test_a_killed_worker_is_told_within_5_s_and_started_again(server):
    before = taken(server)
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(post, server, LONG) for _ in range(2)]  # one runs, one waits
        wait_for(lambda: running(server) and taken(server) >= before + 2, 20)
        worker = server.worker_pid()
        begin = time.monotonic()
        os.kill(worker, signal.SIGKILL)
        for answer in answers:
            told = answer.result(timeout=5)
            assert told.status_code == 503 and told.json()["error"]["code"] == "worker_died"
            assert int(told.headers["retry-after"]) >= 1
        assert time.monotonic() - begin < 5
    assert server.status("/health") == 503
    refused = post(server, SHORT)
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "restarting"
    wait_for(lambda: server.status("/health") == 200, 60)
    assert server.worker_pid() != worker and post(server, SHORT).status_code == 200
    assert "sglang_worker_restarts_total 1.0" in httpx.get(f"{server.url}/metrics").text


def test_health_generate_really_makes_a_picture(server):
    before = finished(server)
    answer = httpx.get(f"{server.url}/health_generate", timeout=60)
    assert answer.status_code == 200 and answer.json()["seconds"] > 0
    assert finished(server) == before + 1


def test_sigterm_finishes_what_was_accepted_and_leaves_nothing(server):
    worker = server.worker_pid()
    url = post(server, SHORT).json()["data"][0]["url"]
    before = taken(server)
    with ThreadPoolExecutor(2) as pool:
        body = {"prompt": "a", "num_inference_steps": 30}
        answers = [pool.submit(post, server, body) for _ in range(2)]
        wait_for(lambda: taken(server) >= before + 2, 20)
        server.terminate()
        assert [answer.result(timeout=60).status_code for answer in answers] == [200, 200]
    status, output = server.ended(20)
    assert status == 0 and "Traceback" not in output
    wait_for(lambda: not alive(worker), 5)
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)


def test_a_killed_parent_leaves_no_worker():
    with LiveServer() as server:
        wait_for(lambda: server.worker_pid() is not None, 30)
        worker = server.worker_pid()
        server.process.kill()
        wait_for(lambda: not alive(worker), 10)


def test_a_port_in_use_is_said():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with LiveServer("--port", port) as server:
            status, output = server.ended(60)
    assert status == 1 and f"cannot listen on 127.0.0.1:{port}: Address already in use" in output
    assert "choose another --host or --port" in output and "Traceback" not in output


def test_a_model_that_does_not_load_ends_the_server(tmp_path):
    folder = write_tiny_flux(tmp_path / "tiny", guidance_embeds=True)
    (folder / "text_encoder" / "model.safetensors").write_bytes(b"nothing")
    with LiveServer("--model-path", str(folder)) as server:
        status, output = server.ended(120)
    assert status == 1 and "sglang serve: error: " in output and "safetensors" in output


def finished(server):
    text = httpx.get(f"{server.url}/metrics").text
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[:1] != "#")
    return float(lines['sglang_requests_total{status="finished"}'])
