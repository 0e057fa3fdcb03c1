"""The load on a server: its times, its figures, and what it calls lost, wrong and unexpected."""

import asyncio
import base64
import itertools
import json
import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import bench_serving
import pytest
import serving_load
import serving_process
from serving_load import Answer, Client, arrivals, error_code
from serving_rows import faults, load_row, percentile, print_row

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=60, suite="base-a-test-cpu")

ROOT = Path(__file__).resolve().parents[3]
BUSY = {"error": {"message": "", "type": "", "param": None, "code": "queue_full"}}
INFO = {
    "model": "stub",
    "defaults": {"width": 16, "height": 16, "num_inference_steps": 1},
    "engine": {"worker_pid": None, "state": "ready"},
}


class Stub(BaseHTTPRequestHandler):
    """Answers the next of the server's `script`: (status, object), or None to hang up."""

    def do_GET(self):
        self.say(200, INFO)

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        step = next(self.server.script)
        if step is None:
            self.close_connection = True
        else:
            self.say(*step)

    def say(self, status, content):
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Server-Timing", "engine;dur=2.5, queue;dur=0.5")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *words):
        """Nothing."""


def picture(data):
    return 200, {"data": [{"b64_json": base64.b64encode(data).decode()}]}


@contextmanager
def stub(script):
    with ThreadingHTTPServer(("127.0.0.1", 0), Stub) as server:
        server.script = iter(script)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def run(monkeypatch, capsys, script, *words):
    """(exit status, output) of the bench on a stub."""
    with stub(script) as url:
        arguments = ["bench_serving.py", "--base-url", url, "--distinct", "1", "--rate", "500"]
        monkeypatch.setattr(sys, "argv", [*arguments, *words])
        return bench_serving.main(), capsys.readouterr().out


def answer(index=0, picture="a", status=200, wall_s=1.0, code=""):
    return Answer(index, 0.0, 0.0, wall_s, status, code, picture, engine_s=0.5, queue_s=0.25)


def test_arrivals_are_poisson_and_the_same_each_time():
    times = arrivals(4000, 8.0, seed=3)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert times == arrivals(4000, 8.0, seed=3) != arrivals(4000, 8.0, seed=4)
    assert mean == pytest.approx(1 / 8, rel=0.05)
    # of an exponential distribution: the deviation is the mean
    assert (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 == pytest.approx(
        mean, rel=0.1
    )


@pytest.mark.parametrize("percent, expected", [(50, 5), (90, 9), (99, 10), (1, 1)])
def test_a_percentile_is_one_of_the_values(percent, expected):
    assert percentile(list(range(10, 0, -1)), percent) == expected
    assert percentile([], percent) is None and percentile([7], percent) == 7


def test_a_row_counts_each_answer_once():
    answers = [
        answer(),
        answer(1, "b", wall_s=3.0),
        answer(1, "a"),
        answer(status=0, picture="", code="ReadTimeout"),
        answer(status=429, picture="", code="queue_full"),
        answer(status=500, picture="", code="internal_error"),
    ]
    row = load_row(answers, ["a", "b"], seconds=4.0, slo_s=2.0)
    counts = [row[name] for name in ("right", "wrong", "lost", "unexpected")]
    assert counts == [2, 1, 1, 1]
    assert row["errors"] == {"429 queue_full": 1, "500 internal_error": 1}
    assert (row["throughput"], row["goodput"]) == (0.5, 0.25)
    assert row["latency_s"] == {"p50": 1.0, "p90": 3.0, "p99": 3.0}
    assert row["overhead_s"]["p50"] == 0.25
    assert faults(row | {"wrong_alone": 0}) == ["1 wrong", "1 lost", "1 unexpected"]


def test_a_good_row_has_no_fault_and_an_empty_one_has(capsys):
    good = load_row([answer()], ["a"], 1.0, None) | {"wrong_alone": 0, "recovery_s": 1.5}
    assert faults(good) == [] and faults(good | {"wrong_alone": 2}) == ["2 wrong_alone"]
    assert faults(load_row([], ["a"], 1.0, None) | {"wrong_alone": 0}) == ["no right answer"]
    print_row(good)
    said = capsys.readouterr().out
    assert "| latency | 1000.0 | 1000.0 | 1000.0 |" in said and "1.5 s from the worker" in said


def test_a_server_that_answers_rightly_passes(monkeypatch, capsys, tmp_path):
    file = tmp_path / "serving.json"
    words = ("--requests", "20", "--json", str(file))
    status, said = run(monkeypatch, capsys, itertools.repeat(picture(b"same")), *words)
    assert status == 0 and "20 right, 0 wrong, 0 lost" in said
    content = json.loads(file.read_text())
    (row,) = content["rows"]
    assert content["header"]["package_commit"] and row["model"] == "stub"
    assert row["engine_s"]["p50"] == 0.0025 and row["queue_s"]["p50"] == 0.0005
    assert row["right"] == 20 and row["rate"] == 500 and row["size"] == "16x16"


@pytest.mark.parametrize("bad, fault", [
    (picture(b"other"), "1 wrong"),
    ((200, {"data": []}), "1 wrong"),
    ((200, {"nothing": 1}), "1 wrong"),
    (None, "1 lost"),
    ((500, {"detail": "no shape"}), "1 unexpected"),
    ((400, BUSY), "1 unexpected"),
])  # fmt: skip
def test_one_bad_answer_fails_the_run(monkeypatch, capsys, bad, fault):
    good = itertools.repeat(picture(b"same"))
    script = itertools.chain(itertools.islice(good, 5), [bad], good)
    status, said = run(monkeypatch, capsys, script, "--requests", "9")
    assert status == 1 and f"failed: {fault}" in said and "8 right" in said


def test_a_busy_server_is_no_fault(monkeypatch, capsys):
    good = itertools.repeat(picture(b"same"))
    script = itertools.chain(itertools.islice(good, 5), [(429, BUSY)] * 3, good)
    status, said = run(monkeypatch, capsys, script, "--requests", "9")
    assert status == 0 and "3 answers 429 queue_full" in said and "6 right" in said


def test_unequal_answers_before_the_load_fail_the_run(monkeypatch, capsys):
    script = itertools.chain([picture(b"first")], itertools.repeat(picture(b"same")))
    status, said = run(monkeypatch, capsys, script, "--requests", "3")
    assert status == 1 and "failed: 1 wrong_alone" in said


def test_the_load_is_open_loop():
    """A slow answer holds no request back."""

    async def load():
        async with Client(url, None, 30) as client:
            held = asyncio.Event()
            ask = client.ask

            async def slow(body, index, sent_s, late_s):
                order.append(len(order))
                await (held.wait() if len(order) < 4 else asyncio.sleep(0))
                held.set() if len(order) == 4 else None
                return await ask(body, index, sent_s, late_s)

            client.ask = slow
            return await client.load([{}], [0.0, 0.01, 0.02, 0.03], seed=0)

    order = []
    with stub(itertools.repeat(picture(b"x"))) as url:
        answers, seconds = asyncio.run(asyncio.wait_for(load(), 20))
    assert len(answers) == 4 and seconds >= 0.03
    assert [round(a.sent_s - a.late_s, 4) for a in answers] == [0.0, 0.01, 0.02, 0.03]


def test_the_error_shape_is_read():
    assert error_code(json.dumps(BUSY).encode()) == "queue_full"
    for text in (b"", b"[]", b'{"error": "x"}', b'{"error": {"code": "x"}}', b"<html>"):
        assert error_code(text) == "no_error_shape"
    assert serving_load._timed("engine;dur=1500.00", "queue") is None


@pytest.mark.parametrize("words", [
    ["--requests", "0"], ["--rate", "0"], ["--distinct", "0"],
    ["--kill-one", "--base-url", "http://example.org"],
])  # fmt: skip
def test_what_cannot_be_measured_is_refused(words, capsys):
    with pytest.raises(SystemExit):
        bench_serving.parse_args(words)
    assert "expected" in capsys.readouterr().err


def test_a_server_that_does_not_start_is_told():
    with pytest.raises(RuntimeError, match="ended with 2 before it was ready(.|\n)*port"):
        with serving_process.own_server(["--port", "99999999"], 60):
            pass


def test_a_killed_worker_loses_no_answer(tmp_path):
    """The whole bench: a server of its own, a kill in mid-load, the recovery, equal bytes."""
    file = tmp_path / "serving.json"
    script = [sys.executable, str(ROOT / "benchmark" / "bench_serving.py"), "--kill-one"]
    words = ["--requests", "8", "--distinct", "2", "--steps", "1", "--size", "64x64"]
    done = subprocess.run(
        [*script, *words, "--rate", "1", "--serve", "--device cpu", "--json", str(file)],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SIGKILL to the worker" in done.stdout
    (row,) = json.loads(file.read_text())["rows"]
    assert (row["wrong"], row["lost"], row["unexpected"], row["wrong_alone"]) == (0, 0, 0, 0)
    assert row["right"] + sum(row["errors"].values()) == 8 and row["right"]
    assert set(row["errors"]) <= {"503 worker_died", "503 restarting"} and row["recovery_s"] > 0
