"""A live server with the bundled model, used as its users do: the openai client, many at once."""

import base64
import contextlib
import hashlib
import http.client
import io
import json
import random
import re
import socket
import time
import urllib.parse
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import openai
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from live_server import LiveServer, wait_for
from PIL import Image
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from sglang.multimodal_gen import DiffGenerator
from sglang.multimodal_gen.runtime.entrypoints.image_files import encode_image
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=90, suite="base-a-test-cpu")

CHECKS = [content_type_conformance, response_schema_conformance, status_code_conformance]
GENERATIONS = "/v1/images/generations"
KEY = "a-key"
STEPS = {"num_inference_steps": 2}
PROMPTS = ["a red apple", "a blue fish", "a green tree"]


@pytest.fixture(scope="module")
def started():
    """Not awaited: the reference pictures are made while it loads."""
    server = LiveServer("--api-key", KEY, "--max-queue", "64")
    yield server
    server.end()


@pytest.fixture(scope="module")
def server(started, pictures):
    return started.wait_ready()


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)


@pytest.fixture(scope="module")
def pictures(started):
    """(prompt, seed) -> file bytes of the picture as Python makes it, in another process."""
    with DiffGenerator.from_pretrained(device="cpu", log_level="warning") as generator:
        return {
            (prompt, seed): encode_image(
                generator.generate(prompt=prompt, seed=seed, **STEPS).image, "png", None
            )
            for prompt in PROMPTS
            for seed in (42, 43, 44)
        }


def post(server, body, **kwargs):
    headers = {"Authorization": f"Bearer {KEY}"} | kwargs.pop("headers", {})
    return httpx.post(server.url + GENERATIONS, json=body, headers=headers, timeout=60, **kwargs)


def metric(server, name):
    headers = {"Authorization": f"Bearer {KEY}"}
    text = httpx.get(f"{server.url}/metrics", headers=headers).text
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[:1] != "#")
    return float(lines.get(name, 0))


def cancelled_count(server):
    return metric(server, 'sglang_requests_total{status="cancelled"}')


def test_the_first_line_is_the_url_and_it_is_warm(server):
    assert [line for line in server.lines if line.startswith("ready: bundled at http://")]
    assert server.status("/health") == 200
    answer = post(server, {"prompt": "a red apple"} | STEPS)
    assert answer.status_code == 200 and answer.elapsed.total_seconds() < 10


def test_generate_with_the_default_format_can_be_downloaded(server, client, pictures):
    answer = client.images.generate(
        model="bundled", prompt="a red apple", n=3, size="128x128", extra_body=STEPS
    )
    files = [httpx.get(item.url).content for item in answer.data]
    assert files == [pictures["a red apple", seed] for seed in (42, 43, 44)]
    assert answer.size == "128x128" and answer.output_format == "png"
    assert answer.usage.total_tokens == 0  # nothing is counted, but clients read it
    for file, item in zip(files, answer.data, strict=True):
        pixels = np.asarray(Image.open(io.BytesIO(file)))
        assert item.report["sha256"] == hashlib.sha256(pixels.tobytes()).hexdigest()


def test_head_is_get_without_the_body(server, client):
    url = client.images.generate(prompt="a", extra_body=STEPS).data[0].url
    told, whole = httpx.head(url), httpx.get(url)
    assert told.status_code == 200 and told.content == b""
    for name in ("content-type", "content-length"):
        assert told.headers[name] == whole.headers[name]
    assert httpx.head(f"{server.url}/health").status_code == 200
    assert httpx.head(server.url + GENERATIONS).status_code == 405


def test_base64_is_the_same_picture(client, pictures):
    answer = client.images.generate(
        prompt="a blue fish", response_format="b64_json", quality="standard", extra_body=STEPS
    )
    assert base64.b64decode(answer.data[0].b64_json) == pictures["a blue fish", 42]


def test_a_tier_that_is_not_mounted_is_said(client):
    answer = client.images.generate(prompt="a", quality="high", extra_body=STEPS)
    assert answer.data[0].report["quality"] == "lossless" and answer.quality is None
    assert answer.warnings == [
        "quality=high was asked for, but the picture is lossless; see report"
    ]


def test_a_list_of_seeds_keeps_its_order(server, pictures):
    answer = post(server, {"prompt": PROMPTS[0], "n": 2, "seed": [43, 42]} | STEPS).json()
    files = [httpx.get(item["url"]).content for item in answer["data"]]
    assert files == [pictures[PROMPTS[0], 43], pictures[PROMPTS[0], 42]]


def test_a_stream_ends_with_the_picture(client, pictures):
    events = list(
        client.images.generate(
            prompt="a green tree", stream=True, partial_images=2, extra_body=STEPS
        )
    )
    partial, final = events[:-1], events[-1]
    assert [event.type for event in partial] == ["image_generation.partial_image"] * len(partial)
    assert [event.partial_image_index for event in partial] == list(range(len(partial)))
    assert 1 <= len(partial) <= 2
    for event in partial:
        assert Image.open(io.BytesIO(base64.b64decode(event.b64_json))).size == (128, 128)
    assert final.type == "image_generation.completed" and final.usage.total_tokens == 0
    assert (final.size, final.output_format, final.background) == ("128x128", "png", "opaque")
    assert base64.b64decode(final.b64_json) == pictures["a green tree", 42]


def test_a_stream_tells_each_step_in_comments(server):
    body = {"prompt": "a", "stream": True, "num_inference_steps": 3}
    text = post(server, body).text
    told = [json.loads(line[2:]) for line in text.splitlines() if line.startswith(": ")]
    steps = [t["step"] for t in told if t["type"].endswith("progress") and t["total_steps"] == 3]
    assert steps == [1, 2, 3] and text.count("event: ") == 1


def test_an_edit_starts_from_the_picture(client, pictures):
    file = ("apple.png", pictures["a red apple", 42], "image/png")
    asked = {"prompt": "a red apple", "extra_body": {"num_inference_steps": 4, "strength": 0.5}}
    answer = client.images.edit(image=file, **asked)
    assert answer.data[0].report["strength"] == 0.5
    assert httpx.get(answer.data[0].url).headers["content-type"] == "image/png"
    events = list(client.images.edit(image=[file], stream=True, partial_images=1, **asked))
    assert events[-1].type == "image_edit.completed"
    assert events[-1].report["sha256"] == answer.data[0].report["sha256"]


def test_errors_are_the_clients_own(server, client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.images.generate(model="gpt-image-1", prompt="a")
    assert caught.value.code == "model_not_found" and caught.value.param == "model"
    with pytest.raises(openai.BadRequestError, match="size: height got 100, expected a multiple"):
        client.images.generate(prompt="a", size="128x100")
    stranger = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    assert [model.id for model in client.models.list()] == ["bundled"]


@pytest.mark.filterwarnings("ignore")
def test_the_schema_holds_under_fire(server):
    """Any request that the schema allows, and many that it does not: no 5xx, one error shape."""
    headers = {"Authorization": f"Bearer {KEY}"}
    schema = schemathesis.openapi.from_dict(httpx.get(f"{server.url}/openapi.json").json())
    deadline = time.monotonic() + 40
    seen = set()

    def fire(case):
        if time.monotonic() > deadline:
            return
        answer = case.call(base_url=server.url, headers=headers, timeout=30)
        seen.add(answer.status_code)
        assert answer.status_code < 500, answer.text
        case.validate_response(answer, checks=CHECKS, headers=headers)
        if answer.status_code >= 400 and case.method != "HEAD":
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
            assert len(answer.text) < 1500

    few = settings(
        max_examples=12,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    for operation in schema.get_all_operations():
        for mode in schemathesis.GenerationMode:
            strategy = operation.ok().as_strategy(generation_mode=mode)
            with contextlib.suppress(Unsatisfiable):  # nothing can be wrong without parameters
                few(given(case=strategy)(fire))()
    assert {200, 400, 404} <= seen


def test_huge_and_hostile_bodies(server):
    host = urllib.parse.urlsplit(server.url).netloc
    connection = http.client.HTTPConnection(host, timeout=30)
    connection.putrequest("POST", GENERATIONS)
    connection.putheader("Authorization", f"Bearer {KEY}")
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Content-Length", str(2**40))
    connection.endheaders()
    begin = time.monotonic()
    answer = connection.getresponse()
    assert answer.status == 413 and time.monotonic() - begin < 10
    assert json.loads(answer.read())["error"]["code"] == "body_too_large"
    begin = time.monotonic()
    assert post(server, {"prompt": "a", "size": "100000x100000"}).status_code == 400
    assert time.monotonic() - begin < 1


@pytest.mark.parametrize("data", [
    b"\x16\x03\x01\x02\x00 no TLS here\r\n\r\n",
    b"POST /v1/images/generations HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n",
])  # fmt: skip
def test_what_is_no_http_gets_the_shape_too(server, data):
    parts = urllib.parse.urlsplit(server.url)
    with socket.create_connection((parts.hostname, parts.port), timeout=10) as connection:
        connection.sendall(data)
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert json.loads(answer.split(b"\r\n\r\n")[1])["error"]["code"] == "invalid_http"


@pytest.mark.parametrize("path", [
    "/v1/images/../../../../etc/passwd/content",
    "/v1/images/..%2f..%2f..%2fetc%2fpasswd/content",
    "/v1/images/%2e%2e/content",
    "//etc/passwd",
    "/static/../../etc/passwd",
])  # fmt: skip
def test_no_path_leads_to_a_file(server, path):
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(server.url).netloc)
    connection.request("GET", path)  # as it stands: other clients clean paths
    answer = connection.getresponse()
    assert answer.status == 404 and b"root:" not in answer.read()


def test_a_client_that_hangs_up_frees_the_engine(server):
    before = cancelled_count(server)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            server.url + GENERATIONS,
            json={"prompt": "a", "num_inference_steps": 200, "n": 10},
            headers={"Authorization": f"Bearer {KEY}"},
            timeout=0.5,
        )
    wait_for(lambda: cancelled_count(server) == before + 1, 5)
    begin = time.monotonic()
    assert post(server, {"prompt": "a", "num_inference_steps": 1}).status_code == 200
    assert time.monotonic() - begin < 10


def test_cancel_by_request_id(server, pictures):
    name = {"X-Request-Id": "to-be-cancelled"}
    key = {"Authorization": f"Bearer {KEY}"}
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(
            post, server, {"prompt": "a", "num_inference_steps": 200, "n": 10}, headers=name
        )
        url = f"{server.url}/v1/images/to-be-cancelled/cancel"
        wait_for(lambda: httpx.post(url, headers=key).status_code == 200, 10)
        answer = slow.result(timeout=10)
    assert answer.status_code == 499 and answer.json()["error"]["code"] == "request_cancelled"
    after = post(server, {"prompt": PROMPTS[0], "response_format": "b64_json"} | STEPS).json()
    assert base64.b64decode(after["data"][0]["b64_json"]) == pictures[PROMPTS[0], 42]


def test_sixteen_clients_at_once_all_get_their_own_answer(server, pictures):
    """Valid, invalid, cancelling and disconnecting ones."""
    chance = random.Random(0)
    jobs = [*["valid"] * 8, *["invalid"] * 4, *["leaving"] * 2, *["cancelling"] * 2]
    chance.shuffle(jobs)

    def one(job, number):
        prompt, seed = PROMPTS[number % 3], 42 + number % 2
        body = {"prompt": prompt, "seed": seed, "response_format": "b64_json"} | STEPS
        if job == "valid":
            data = post(server, body).json()["data"]
            return base64.b64decode(data[0]["b64_json"]) == pictures[prompt, seed]
        if job == "invalid":
            return post(server, body | {"num_inference_steps": -number}).status_code == 400
        if job == "leaving":
            with pytest.raises(httpx.ReadTimeout):
                long = body | {"num_inference_steps": 200}
                httpx.post(
                    server.url + GENERATIONS,
                    json=long,
                    headers={"Authorization": f"Bearer {KEY}"},
                    timeout=httpx.Timeout(30, read=0.3),
                )
            return True
        return cancelled_in_mid_stream(number)

    def cancelled_in_mid_stream(number):
        headers = {"Authorization": f"Bearer {KEY}", "X-Request-Id": f"cancel-{number}"}
        body = {"prompt": "a", "stream": True, "num_inference_steps": 200}
        with httpx.stream(
            "POST", server.url + GENERATIONS, json=body, headers=headers, timeout=60
        ) as answer:
            lines = answer.iter_lines()
            next(lines)
            url = f"{server.url}/v1/images/cancel-{number}/cancel"
            assert httpx.post(url, headers=headers).status_code == 200
            return any("request_cancelled" in line for line in lines)

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(one, jobs, range(16), timeout=60)) == [True] * 16


def test_health_answers_while_a_picture_is_made(server):
    samples = []
    body = {"prompt": "a", "num_inference_steps": 50}
    with ThreadPoolExecutor(1) as pool, httpx.Client() as probe:
        busy = pool.submit(post, server, body)
        while not busy.done():
            begin = time.perf_counter()
            assert probe.get(f"{server.url}/health").status_code == 200
            samples.append(time.perf_counter() - begin)
            time.sleep(0.01)
        assert busy.result().status_code == 200
    assert len(samples) > 50
    assert sorted(samples)[int(0.99 * len(samples))] < 0.1


def test_the_server_adds_little_to_the_engine(server):
    """The third fastest of 20, so that a busy machine cannot fail it; p50 is below 15 ms on an
    idle one. Waiting for a delayed acknowledgement, for one, would add 40 ms to each."""
    body = {"prompt": "a", "response_format": "b64_json", "num_inference_steps": 1}
    overheads = []
    with httpx.Client(headers={"Authorization": f"Bearer {KEY}"}, timeout=60) as client:
        for _ in range(20):
            begin = time.perf_counter()
            answer = client.post(server.url + GENERATIONS, json=body)
            wall_ms = 1e3 * (time.perf_counter() - begin)
            timing = answer.headers["server-timing"]
            engine, queue = re.fullmatch(
                r"engine;dur=([\d.]+), queue;dur=([\d.]+)", timing
            ).groups()
            assert float(queue) < wall_ms - float(engine)
            overheads.append(wall_ms - float(engine))
    assert sorted(overheads)[2] < 15, overheads


def test_memory_stays_where_it_is(server):
    name = "sglang_process_resident_memory_bytes"
    good = {"prompt": "a", "size": "64x64", "num_inference_steps": 1}
    bodies = [good, {"prompt": "x" * 60_000, "n": 0}, good | {"stream": True}, good | {"seed": -1}]
    seen = []
    for _ in range(3):
        with ThreadPoolExecutor(4) as pool:
            statuses = pool.map(lambda i: post(server, bodies[i % 4]).status_code, range(24))
            assert list(statuses) == [200, 400] * 12
        seen.append(metric(server, name))
    assert seen[2] - seen[0] < 8 * 2**20, seen


def test_every_answer_so_far_is_in_the_log(server):
    lines = [json.loads(line) for line in server.lines if line.startswith('{"time"')]
    assert len(lines) > 50 and all(len(line["request_id"]) >= 1 for line in lines)
    assert not any("red apple" in line for line in server.lines)
    assert {line["status"] for line in lines} >= {200, 400, 401, 404, 413}
