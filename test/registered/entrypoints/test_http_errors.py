"""Every refusal of the server, with an engine that makes no pictures: statuses and one shape."""

import asyncio
import base64
import json
import logging
import sys
import threading
from types import SimpleNamespace

import pytest
from fake_engine import call, fake_server

from sglang.multimodal_gen.configs.condition_image import ConditionImage
from sglang.multimodal_gen.configs.sampling_params import SamplingParams
from sglang.multimodal_gen.runtime.entrypoints import http_images, request_body, server_context
from sglang.multimodal_gen.runtime.managers.engine_state import EngineState
from sglang.multimodal_gen.runtime.managers.errors import (
    EngineFailed,
    QueueFull,
    RequestCancelled,
    RequestTimedOut,
    WorkerDied,
)
from sglang.multimodal_gen.runtime.managers.messages import GenerateRequest
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

GENERATIONS, EDITS = "/v1/images/generations", "/v1/images/edits"


@pytest.fixture(scope="module")
def server():
    with fake_server() as served:
        yield served


@pytest.fixture
def client(server):
    client, engine = server
    engine.state, engine.outcome, engine.refusal, engine.held = EngineState.READY, None, None, False
    engine.asked.clear()
    return client


def error_of(response, status):
    """The error object of an answer, checked for the one shape."""
    assert response.status_code == status, response.text
    assert list(response.json()) == ["error"]
    error = response.json()["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert error["message"] and len(response.content) < 1000
    assert response.headers["x-request-id"]
    return error


def refused(client, status=400, **body):
    return error_of(client.post(GENERATIONS, json={"prompt": "a"} | body), status)


BAD_FIELDS = [
    ("prompt", {"prompt": None}),
    ("prompt", {"prompt": ""}),
    ("prompt", {"prompt": " \n\t"}),
    ("prompt", {"prompt": "\u3000\u200b\0"}),
    ("prompt", {"prompt": []}),
    ("prompt", {"prompt": ["a"]}),
    ("prompt", {"prompt": ["a", "b"]}),
    ("prompt", {"prompt": [["a"]]}),
    ("prompt", {"prompt": 3}),
    ("prompt", {"prompt": {"a": 1}}),
    ("prompt", {"prompt": "x" * 70_000}),
    ("prompt", {"prompt": "\ud800"}),
    ("n", {"n": 0}),
    ("n", {"n": -1}),
    ("n", {"n": 11}),
    ("n", {"n": 1000}),
    ("n", {"n": 1.5}),
    ("n", {"n": True}),
    ("n", {"n": 2, "num_outputs_per_prompt": 2}),
    ("num_outputs_per_prompt", {"num_outputs_per_prompt": 11}),
    ("size", {"size": "100000x100000"}),
    ("size", {"size": "8192x8192"}),
    ("size", {"size": "100x100"}),
    ("size", {"size": "0x64"}),
    ("size", {"size": "64"}),
    ("size", {"size": 64}),
    ("size", {"size": "64x64", "width": 64}),
    ("width", {"width": 4096, "height": 4096}),
    ("width", {"width": "64"}),
    ("height", {"height": 500}),
    ("num_inference_steps", {"num_inference_steps": 0}),
    ("num_inference_steps", {"num_inference_steps": -1}),
    ("num_inference_steps", {"num_inference_steps": 1e9}),
    ("num_inference_steps", {"num_inference_steps": 201}),
    ("num_inference_steps", {"num_inference_steps": "x"}),
    ("guidance_scale", {"guidance_scale": "1"}),
    ("guidance_scale", {"guidance_scale": -1}),
    ("seed", {"seed": -1}),
    ("seed", {"seed": 2**63}),
    ("seed", {"seed": [1, 2]}),
    ("quality", {"quality": "max"}),
    ("quality", {"quality": 1}),
    ("response_format", {"response_format": "png"}),
    ("output_format", {"output_format": "gif"}),
    ("output_compression", {"output_compression": 101}),
    ("stream", {"stream": "true"}),
    ("partial_images", {"partial_images": 4, "stream": True}),
    ("partial_images", {"partial_images": 1}),
    ("background", {"background": "transparent"}),
    ("max_sequence_length", {"max_sequence_length": 4096}),
    ("use_pe", {"use_pe": True}),
    ("model", {"model": 3}),
    ("image", {"image": "http://169.254.169.254/latest"}),
    ("output_path", {"output_path": "/etc"}),
    ("output_file_name", {"output_file_name": "../x"}),
    ("save_output", {"save_output": True}),
    ("profile", {"profile": True}),
    ("stpes", {"stpes": 3}),
    ("\ud800", {"\ud800": 3}),
]


@pytest.mark.parametrize("param,body", BAD_FIELDS, ids=lambda value: ascii(value)[:50])
def test_a_bad_field_is_a_400_that_names_it_before_any_work(client, server, param, body):
    content = json.dumps({"prompt": "a"} | body)
    headers = {"Content-Type": "application/json"}
    error = error_of(client.post(GENERATIONS, content=content, headers=headers), 400)
    assert error["param"] == param and error["type"] == "invalid_request_error"
    assert server[1].asked == []


def test_advice_names_the_nearest_field_and_the_multiple(client):
    assert "did you mean 'num_inference_steps'?" in refused(client, num_inference_step=3)["message"]
    assert "use 96 or 112" in refused(client, size="128x100")["message"]


def test_another_model_is_not_found(client):
    error = refused(client, 404, model="gpt-image-1")
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "bundled" in error["message"]
    assert len(refused(client, 404, model="x" * 200)["message"]) < 200
    error_of(client.get("/v1/models/gpt-image-1"), 404)
    assert client.get("/v1/models/bundled").json()["id"] == "bundled"


BAD_BODIES = {
    "empty": b"",
    "cut": b'{"prompt": "a"',
    "list": b'["a"]',
    "text": b'"a"',
    "duplicate": b'{"prompt": "a", "prompt": "b"}',
    "deep": b'{"prompt": ' + b"[" * 20 + b"]" * 20 + b"}",
    "bottomless": b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "not utf-8": b'{"prompt": "\xff"}',
    "utf-16": '{"prompt": "a"}'.encode("utf-16"),
    "byte order mark": b'\xef\xbb\xbf{"prompt": "a"}',
}


@pytest.mark.parametrize("content", BAD_BODIES.values(), ids=BAD_BODIES)
def test_json_has_one_meaning_or_none(client, content):
    headers = {"Content-Type": "application/json"}
    error_of(client.post(GENERATIONS, content=content, headers=headers), 400)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "9" * 5000])
@pytest.mark.parametrize("field", [
    "guidance_scale", "seed", "n", "size", "prompt", "use_pe", "quality", "stpes",
])  # fmt: skip
def test_a_number_without_bounds_is_refused_by_the_name_of_its_field(client, field, number):
    content = b'{"prompt": "a", "%s": %s}' % (field.encode(), number.encode())
    content = content.replace(b'"prompt": "a", "prompt"', b'"prompt"')
    headers = {"Content-Type": "application/json"}
    error = error_of(client.post(GENERATIONS, content=content, headers=headers), 400)
    assert error["param"] == field


@pytest.mark.parametrize("content", [
    b"{" + b",".join(b'"k%d":1' % (i // 2) for i in range(100_000, 0, -1)) + b"}",
    b'{"prompt": "a", "seed": [' + b"1," * 900_000 + b"1]}",
    b'{"prompt": [' + b"[]," * 600_000 + b"[]]}",
    b'{"prompt": [' + b"{}," * 600_000 + b"{}]}",
], ids=["keys", "numbers", "lists", "objects"])  # fmt: skip
def test_more_values_than_a_request_can_use_are_refused_unread(client, content):
    """Two megabytes of them: reading each, or comparing keys in pairs, would stop all others."""
    headers = {"Content-Type": "application/json"}
    error = error_of(client.post(GENERATIONS, content=content, headers=headers), 400)
    assert error["param"] == "body" and "too many values" in error["message"]


def test_other_content_types_are_refused(client):
    assert "application/json" in error_of(client.post(GENERATIONS, content=b"{}"), 415)["message"]
    error_of(client.post(GENERATIONS, data={"prompt": "a"}), 415)
    error_of(client.post(EDITS, json={"prompt": "a"}), 415)


def test_a_huge_body_is_refused_declared_or_not(client, monkeypatch):
    monkeypatch.setattr(request_body, "DISCARD_TIMEOUT_S", 0.1)
    headers = {"Content-Type": "application/json"}
    big = b" " * (request_body.MAX_JSON_BYTES + 1)
    error = error_of(client.post(GENERATIONS, content=big, headers=headers), 413)
    assert error["code"] == "body_too_large"
    pieces = (b" " * 2**16 for _ in range(64))  # sent in chunks, without a length
    error_of(client.post(GENERATIONS, content=pieces, headers=headers), 413)


def test_a_body_that_does_not_come_is_given_up(client, monkeypatch):
    monkeypatch.setattr(request_body, "BODY_TIMEOUT_S", 0.05)
    begun = {"type": "http.request", "body": b'{"prompt":', "more_body": True}
    start, body = asyncio.run(call(client.app, GENERATIONS, [begun]))
    assert start["status"] == 408
    assert json.loads(body["body"])["error"]["code"] == "body_timeout"


def test_a_client_who_leaves_before_all_is_said_gets_no_answer(client):
    assert asyncio.run(call(client.app, GENERATIONS, [{"type": "http.disconnect"}])) == []


@pytest.mark.parametrize("method,path,status", [
    ("GET", "/v1/images/nothing", 404),
    ("GET", "/nothing/" + "x" * 3000, 404),
    ("GET", "/v1/models/", 404),
    ("GET", GENERATIONS, 405),
    ("DELETE", "/health", 405),
    ("POST", "/metrics", 405),
    ("POST", "/v1/images/nobody/cancel", 404),
])  # fmt: skip
def test_unknown_paths_and_methods_have_the_shape_too(client, method, path, status):
    response = client.request(method, path)
    error_of(response, status)
    assert status != 405 or response.headers["allow"]


IDS = [
    "0" * 32,
    "../../../etc/passwd",
    "..%2f..%2f..%2fetc%2fpasswd",
    "%2e%2e%2f%2e%2e%2fetc%2fpasswd",
    "....//....//etc/passwd",
    "%00",
    "x" * 5000,
    "%ff%fe",
    "..\\..\\windows",
]


@pytest.mark.parametrize("image_id", IDS, ids=range(len(IDS)))
def test_no_id_leads_out_of_the_store(client, image_id):
    error_of(client.get(f"/v1/images/{image_id}/content"), 404)


OUTCOMES = {
    "queue_full": (QueueFull(32, 7), 429, "7"),
    "worker_died": (WorkerDied("the worker was killed"), 503, "5"),
    "request_cancelled": (RequestCancelled("cancelled"), 499, None),
    "deadline_exceeded": (RequestTimedOut("600 s have passed"), 504, None),
    "out_of_memory": (EngineFailed("make the picture smaller", "oom"), 500, None),
    "engine_error": (EngineFailed("the latents are not finite", "ValueError"), 500, None),
}


@pytest.mark.parametrize("code", OUTCOMES)
def test_each_end_of_a_request_has_its_status(client, server, code):
    raised, status, retry_after = OUTCOMES[code]
    if isinstance(raised, QueueFull):
        server[1].refusal = raised
    server[1].outcome = raised
    for path in (GENERATIONS, "/health_generate"):
        method = "POST" if path == GENERATIONS else "GET"
        response = client.request(method, path, json={"prompt": "a"})
        assert error_of(response, status)["code"] == code
        assert response.headers.get("retry-after") == retry_after
        # OpenAI's client repeats what may be repeated, and nothing else.
        assert (response.headers.get("x-should-retry") == "false") == (retry_after is None)


def test_a_failure_in_mid_stream_is_an_error_event(client, server):
    server[1].outcome = EngineFailed("too large; make the picture smaller", "oom")
    text = client.post(GENERATIONS, json={"prompt": "a", "stream": True}).text
    last = text.strip().split("\n\n")[-1]
    assert last.startswith("event: error\ndata: ")
    assert json.loads(last.split("data: ")[1])["error"]["code"] == "out_of_memory"


@pytest.mark.parametrize("state", [s for s in EngineState if s is not EngineState.READY])
def test_without_an_engine_nothing_is_promised(client, server, state):
    server[1].state, server[1].detail = state, "the worker is being started again"
    for response in (
        client.get("/health"),
        client.get("/health_generate"),
        client.post(GENERATIONS, json={"prompt": "a"}),
    ):
        error = error_of(response, 503)
        assert error["code"] == state.value and error["message"] == server[1].detail
        assert int(response.headers["retry-after"]) >= 1
    refused(client, 400, n=0)  # what is wrong is said at once
    assert client.get("/server_info").json()["engine"]["state"] == state.value


def test_a_fault_of_the_server_is_logged_and_told_without_details(client, monkeypatch, caplog):
    def broken(*args):
        raise ZeroDivisionError("a secret")

    monkeypatch.setattr(http_images, "read_job", broken)
    with caplog.at_level(logging.ERROR):
        error = refused(client, 500)
    assert error["code"] == "internal_error" and "secret" not in error["message"]
    assert "a secret" in caplog.text


PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="
)


def bomb(side):
    """A PNG of one pixel that claims to have `side` x `side`."""
    import struct
    import zlib

    head = PNG[12:16] + struct.pack(">II", side, side) + PNG[24:29]
    return PNG[:12] + head + struct.pack(">I", zlib.crc32(head)) + PNG[33:]


BAD_FORMS = [
    ("image", {"prompt": "a"}, {}),
    ("prompt", {}, {"image": PNG}),
    ("image", {"prompt": "a", "image": "http://127.0.0.1/x.png"}, {"other": PNG}),
    ("image", {"prompt": "a"}, {"image": b"no picture"}),
    ("image", {"prompt": "a"}, {"image": b""}),
    ("image", {"prompt": "a"}, {"image": bomb(65535)}),
    ("mask", {"prompt": "a"}, {"image": PNG, "mask": PNG}),
    ("prompt", {}, {"image": PNG, "prompt": b"a"}),
    ("n", {"prompt": "a", "n": "x"}, {"image": PNG}),
    ("n", {"prompt": "a", "n": ["1", "2"]}, {"image": PNG}),
    ("n", {"prompt": "a", "n": "1_0"}, {"image": PNG}),
    ("n", {"prompt": "a", "n": "\u0662"}, {"image": PNG}),
    ("strength", {"prompt": "a", "strength": "2"}, {"image": PNG}),
    ("strength", {"prompt": "a", "strength": "nan"}, {"image": PNG}),
    ("stream", {"prompt": "a", "stream": "perhaps"}, {"image": PNG}),
    ("promt", {"prompt": "a", "promt": "b"}, {"image": PNG}),
]


@pytest.mark.parametrize("param,fields,files", BAD_FORMS, ids=range(len(BAD_FORMS)))
def test_a_bad_form_is_a_400_that_names_the_field(client, server, param, fields, files):
    files = {name: ("a.png", data, "image/png") for name, data in files.items()}
    response = client.post(EDITS, data=fields, files=files or {"": ("", b"")})
    error = error_of(response, 400)
    assert error["param"] in (param, "body" if not files else param)
    assert server[1].asked == []


def test_a_malformed_form_is_a_400(client):
    for boundary, body in (("b", b"--c\r\n"), ("", b"x"), ("b", b"--b\r\nX\r\n\r\n--b--")):
        headers = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
        error_of(client.post(EDITS, content=body, headers=headers), 400)


def test_too_many_pictures_are_refused_before_one_is_decoded(client):
    files = [("image[]", ("a.png", bomb(65535), "image/png"))] * 2
    error = error_of(client.post(EDITS, data={"prompt": "a"}, files=files), 400)
    assert "got 2 files, expected 1 to 1" in error["message"]


def test_pictures_that_wait_are_bounded(client, monkeypatch):
    waiting = SamplingParams(prompt="a", image=ConditionImage(2, 2, bytes(12)))
    handle = SimpleNamespace(request=GenerateRequest("x", waiting))
    monkeypatch.setitem(client.app.state.context.active, "x", [handle])
    files = {"image": ("a.png", PNG, "image/png")}  # three bytes more
    for room, status in ((15, 200), (14, 429)):
        monkeypatch.setattr(server_context, "MAX_PICTURE_BYTES", room)
        answer = client.post(EDITS, data={"prompt": "a"}, files=files)
        assert answer.status_code == status
    assert error_of(answer, 429)["code"] == "queue_full" and answer.headers["retry-after"] == "5"
    monkeypatch.setattr(server_context, "MAX_PICTURE_BYTES", 0)
    assert client.post(GENERATIONS, json={"prompt": "a"}).status_code == 200


def test_uploads_that_are_decoded_delay_nothing_else(client):
    context, gate = client.app.state.context, threading.Event()
    busy = [context._upload_threads.submit(gate.wait, 30) for _ in range(20)]
    answer = client.post(GENERATIONS, json={"prompt": "a"})
    waited = [one.done() for one in busy]
    gate.set()
    assert answer.status_code == 200 and not any(waited)


def test_a_model_that_cannot_edit_says_so_by_name(client, server, monkeypatch):
    from dataclasses import replace

    monkeypatch.setattr(server[1], "spec", replace(server[1].spec, edits=None))
    files = {"image": ("a.png", PNG, "image/png")}
    error = error_of(client.post(EDITS, data={"prompt": "a"}, files=files), 400)
    assert error["param"] == "image" and "bundled" in error["message"]
    assert "cannot edit" in error["message"]


@pytest.mark.parametrize("request_id", ["", "a b", "x" * 129, "a/b", "a\tb", "é"])
def test_a_bad_request_id_is_refused(client, request_id):
    headers = {"X-Request-Id": request_id.encode()}
    assert error_of(client.get("/health", headers=headers), 400)["code"] == "invalid_request_id"


def test_a_good_request_id_comes_back(client, server):
    headers = {"X-Request-Id": "my.own-id:1"}
    response = client.post(GENERATIONS, json={"prompt": "a"}, headers=headers)
    assert response.headers["x-request-id"] == "my.own-id:1" == response.json()["id"]
    assert server[1].asked[0].request_id == "my.own-id:1"


def test_pages_of_other_origins_are_kept_out_unless_named(client):
    page = {"Origin": "https://evil.example"}
    error = error_of(client.post(GENERATIONS, json={"prompt": "a"}, headers=page), 403)
    assert error["code"] == "origin_not_allowed"
    error_of(client.get("/health", headers={"Origin": "null"}), 403)
    own = {"Origin": "http://testserver"}
    assert client.get("/health", headers=own).status_code == 200


def test_named_origins_are_let_in():
    with fake_server(allowed_origins=["https://good.example"]) as (client, _):
        page = {"Origin": "https://good.example"}
        # As OpenAI's client asks in a browser.
        asked = {"Access-Control-Request-Headers": "authorization,x-stainless-lang,content-type"}
        for method in ("POST", "DELETE"):
            asked["Access-Control-Request-Method"] = method
            assert client.options(GENERATIONS, headers=page | asked).status_code == 200
        answer = client.post(GENERATIONS, json={"prompt": "a"}, headers=page)
        assert answer.headers["access-control-allow-origin"] == "https://good.example"
        assert refused(client, n=0)
        error_of(client.get("/health", headers={"Origin": "https://evil.example"}), 403)


def test_the_key_guards_all_but_health_page_and_pictures():
    with fake_server(api_key="s3cret") as (client, _):
        for wrong in ({}, {"Authorization": "Bearer no"}, {"Authorization": "s3cret"}):
            for method, path in (
                ("POST", GENERATIONS),
                ("POST", EDITS),
                ("POST", "/v1/images/x/cancel"),
                ("GET", "/v1/models"),
                ("GET", "/v1/models/bundled"),
                ("GET", "/health_generate"),
                ("GET", "/server_info"),
                ("GET", "/metrics"),
            ):
                response = client.request(method, path, headers=wrong)
                assert error_of(response, 401)["code"] == "invalid_api_key"
                assert response.headers["www-authenticate"] == "Bearer"
        assert client.get("/health").status_code == 200
        right = {"Authorization": "Bearer s3cret"}
        answer = client.post(GENERATIONS, json={"prompt": "a"}, headers=right)
        assert client.get(answer.json()["data"][0]["url"]).status_code == 200
        assert "s3cret" not in client.get("/server_info", headers=right).text


def test_a_page_that_is_not_installed_is_a_404(client, monkeypatch, tmp_path):
    from sglang.multimodal_gen.runtime.entrypoints import http_playground

    monkeypatch.setattr(http_playground, "FOLDER", tmp_path / "none")
    error_of(client.get("/"), 404)
    monkeypatch.setattr(http_playground, "FOLDER", tmp_path)
    error_of(client.get("/"), 404)
    (tmp_path / "index.html").write_text("<p>hello</p>")
    assert client.get("/").text == "<p>hello</p>"


def test_the_access_log_is_json_without_what_was_asked(client, caplog):
    with caplog.at_level(logging.INFO, logger="sglang.access"):
        client.post(GENERATIONS, json={"prompt": "a secret wish"})
        refused(client, n=0)
    good, bad = (json.loads(r.message) for r in caplog.records if r.name == "sglang.access")
    assert (good["status"], good["method"], good["path"]) == (200, "POST", GENERATIONS)
    assert good["request_id"] and good["seconds"] >= 0 and "secret" not in json.dumps(good)
    assert (bad["status"], bad["error"]) == (400, "invalid_parameter")


def test_log_requests_adds_what_was_asked(caplog):
    with fake_server(log_requests=True) as (client, _), caplog.at_level(logging.INFO):
        client.post(GENERATIONS, json={"prompt": "a wish" + "x" * 9000, "seed": 3})
    lines = [json.loads(r.message) for r in caplog.records if r.name == "sglang.access"]
    assert lines[0]["asked"]["prompt"].startswith("a wish") and lines[0]["asked"]["seed"] == 3
    assert len(json.dumps(lines[0])) < 2000


def test_the_parent_never_imports_torch():
    import subprocess

    code = (
        "import sys, sglang.multimodal_gen.runtime.entrypoints.server_loop\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
