"""The parts of the server that need no engine: settings, store, streams, forms, metrics, PNG."""

import asyncio
import base64
import contextlib
import dataclasses
import errno
import io
import json
import logging
import os
import socket
import subprocess
import sys

import numpy as np
import pytest
import uvicorn
from fake_engine import FakeEngine, call, fake_server
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from uvicorn.server import ServerState

from sglang.multimodal_gen.configs.http_args import HttpArgs
from sglang.multimodal_gen.configs.sampling_params import SamplingParams
from sglang.multimodal_gen.configs.server_args import ServerArgs
from sglang.multimodal_gen.runtime.entrypoints import (
    generate_command,
    http_protocol,
    serve_command,
    server_context,
)
from sglang.multimodal_gen.runtime.entrypoints.cli_flags import values_of
from sglang.multimodal_gen.runtime.entrypoints.http_protocol import HttpProtocol
from sglang.multimodal_gen.runtime.entrypoints.image_files import OutputError, encode_image
from sglang.multimodal_gen.runtime.entrypoints.image_store import ImageStore
from sglang.multimodal_gen.runtime.entrypoints.openai_protocol import Served, read_job
from sglang.multimodal_gen.runtime.entrypoints.png_file import ROWS_A_STRIP, encode_png
from sglang.multimodal_gen.runtime.entrypoints.serve_command import _listen
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

GENERATIONS = "/v1/images/generations"
SPEC = FakeEngine().spec
SERVED = Served(SPEC, "bundled")


def job(**body):
    return read_job({"prompt": "a"} | body, SERVED, HttpArgs())


# settings


def test_defaults_are_those_of_python_and_the_command_line():
    in_python = SamplingParams(prompt="a").fit(SPEC)
    words = generate_command.build_parser().parse(["--prompt", "a"])
    on_the_line = SamplingParams(**values_of(words, SamplingParams)).fit(SPEC)
    assert job().params == in_python == on_the_line
    with fake_server() as (client, _):
        told = client.get("/v1/models").json()["data"][0]["defaults"]
    assert told == {name: getattr(in_python, name) for name in told} and len(told) > 10


def test_openais_names_become_sampling_fields():
    asked = job(n=2, size="64x96", quality="hd", seed=0, guidance_scale=0, negative_prompt="")
    params = asked.params
    assert (params.num_outputs_per_prompt, params.width, params.height) == (2, 64, 96)
    assert (params.quality, params.seed, params.guidance_scale) == ("lossless", 0, 0.0)
    assert job(quality="high").params.quality == "high"
    assert job(size="auto", n=None, model=None, user="me", moderation="low").params == job().params


def test_what_cannot_act_is_said():
    warnings = job(style="vivid", guidance_scale=3, output_compression=5).warnings
    assert [w.split()[0] for w in warnings] == [
        "guidance_scale=3.0",
        "output_compression",
        "style",
    ]


def test_the_flags_of_serve_reach_their_fields(capsys):
    words = (
        "--host ::1 --port 0 --api-key k --served-model-name m --max-queue 1 --request-timeout 2 "
        "--drain-timeout 3 --max-images 4 --max-pixels 4096 --max-steps 5 --retention 6 "
        "--image-folder f --allowed-origins https://a.b --allowed-origins * --log-requests"
    ).split()
    given = values_of(serve_command.build_parser().parse(words), HttpArgs)
    assert set(given) == set(HttpArgs.__dataclass_fields__)
    assert HttpArgs(**given).allowed_origins == ("https://a.b", "*")
    with pytest.raises(SystemExit):
        serve_command.build_parser().parse(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 100 and max(map(len, lines)) <= 100


def test_no_field_is_in_two_classes():
    names = [
        field.name
        for settings_class in (HttpArgs, ServerArgs, SamplingParams)
        for field in dataclasses.fields(settings_class)
    ]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name,value", [
    ("port", 65536),
    ("max_queue", 0),
    ("request_timeout", 0),
    ("api_key", "two words"),
    ("api_key", ""),
    ("api_key", "é"),
    ("served_model_name", "a b"),
    ("host", ""),
    ("allowed_origins", ["example.org"]),
    ("retention", 5),
])  # fmt: skip
def test_a_bad_setting_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"^{name}: got .*expected") as caught:
        HttpArgs(**{name: value})
    assert name != "api_key" or not value or value not in str(caught.value)


def test_the_key_may_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("SGLANG_DIFFUSION_API_KEY", "hidden")
    assert HttpArgs().api_key == "hidden" and HttpArgs(api_key="shown").api_key == "shown"


# store


def test_the_store_keeps_the_newest(tmp_path):
    store = ImageStore(str(tmp_path / "new" / "folder"), 2)
    ids = [store.keep(b"%d" % i, "png") for i in range(3)]
    assert store.get(ids[0]) is None and store.get(ids[2]).data == b"2"
    assert len(store) == len(list(store.folder.iterdir())) == 2
    again = ImageStore(str(store.folder), 1)  # a later server goes on with what it finds
    assert again.get(ids[1]) is None and again.get(ids[2]).media_type == "image/png"


def test_ids_are_secret_and_files_are_private():
    store = ImageStore(None, 100)
    ids = {store.keep(b"x", "webp") for _ in range(50)}
    assert len(ids) == 50 and all(len(i) == 32 for i in ids)
    assert os.stat(store.folder).st_mode & 0o077 == 0
    (store.folder / "secret.txt").write_text("x")
    assert store.get("secret.txt") is None and store.get("../" + next(iter(ids))) is None
    store.close()
    assert not store.folder.exists()


def test_a_full_or_lost_folder_costs_the_urls_alone(tmp_path):
    with fake_server(image_folder=str(tmp_path / "kept")) as (client, engine):
        kept = client.post(GENERATIONS, json={"prompt": "a"}).json()["data"][0]["url"]
        for file in (tmp_path / "kept").iterdir():
            file.unlink()
        (tmp_path / "kept").rmdir()
        (tmp_path / "kept").write_text("no folder any more")
        engine.asked.clear()
        refused = client.post(GENERATIONS, json={"prompt": "a"})
        assert refused.status_code == 507 and engine.asked == []  # before any work
        error = refused.json()["error"]
        assert error["code"] == "image_store_unavailable" and "b64_json" in error["message"]
        body = {"prompt": "a", "response_format": "b64_json"}
        assert client.post(GENERATIONS, json=body).status_code == 200
        assert client.get(kept).status_code == 404


def test_a_folder_that_fills_up_while_a_picture_is_made_loses_none(monkeypatch):
    kept = ImageStore.keep

    def full(store, data, output_format):
        if len(store):
            raise OutputError("pictures cannot be kept: No space left on device")
        return kept(store, data, output_format)

    monkeypatch.setattr(ImageStore, "keep", full)
    monkeypatch.setattr(server_context, "PICTURE_THREADS", 1)  # one after another
    with fake_server() as (client, _):
        answer = client.post(GENERATIONS, json={"prompt": "a", "n": 3, "size": "64x32"})
    first, *others = answer.json()["data"]
    assert answer.status_code == 200 and "url" in first and len(others) == 2
    assert ["url" in item for item in others] == [False, False]
    for item in others:
        image = Image.open(io.BytesIO(base64.b64decode(item["b64_json"])))
        assert (np.asarray(image) == item["seed"]).all()
    assert any("b64_json" in warning for warning in answer.json()["warnings"])


def test_a_picture_that_cannot_be_read_is_no_fault_of_the_server():
    with fake_server() as (client, _):
        url = client.post(GENERATIONS, json={"prompt": "a"}).json()["data"][0]["url"]
        [file] = client.app.state.context.store.folder.glob("*.png")
        file.unlink()
        file.mkdir()
        assert client.get(url).json()["error"]["code"] == "image_store_unavailable"


@pytest.mark.parametrize("call_name", ["pathlib.Path.write_bytes", "os.replace"])
def test_every_failure_to_keep_is_the_same_error(tmp_path, monkeypatch, call_name):
    store = ImageStore(str(tmp_path), 10)

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(call_name, full)
    with pytest.raises(OutputError, match="cannot be kept: No space left on device"):
        store.keep(b"x", "png")
    assert list(tmp_path.iterdir()) == [] and len(store) == 0


def test_no_room_is_seen_before_work(tmp_path, monkeypatch):
    def full(path, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    store = ImageStore(str(tmp_path), 10)
    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    with pytest.raises(OutputError, match="cannot be kept: No space left on device"):
        store.check_writable()
    assert list(tmp_path.iterdir()) == []


def test_an_unusable_folder_is_refused_at_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="image_folder: got .*expected a folder"):
        ImageStore(str(tmp_path / "file"), 10)


# pictures


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 3 * ROWS_A_STRIP), st.integers(1, 40), st.integers(0, 2**32), st.booleans())
def test_png_files_decode_to_the_pixels(height, width, seed, flat):
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (height, width, 3), np.uint8)
    pixels = np.broadcast_to(pixels[:1], pixels.shape) if flat else pixels
    image = Image.open(io.BytesIO(encode_png(pixels)))
    image.load()
    assert image.mode == "RGB" and np.array_equal(np.asarray(image), pixels)


def test_png_files_do_not_depend_on_threads_and_stay_small():
    ramp = np.arange(256, dtype=np.uint8)
    pixels = np.broadcast_to(ramp[:, None, None], (256, 256, 3)).copy()
    assert encode_png(pixels) == encode_png(pixels.copy()) and len(encode_png(pixels)) < 5000
    assert encode_image(Image.fromarray(pixels), "png", None) == encode_png(pixels)


# answers


def test_an_answer_holds_what_openais_clients_read():
    with fake_server() as (client, _):
        body = {"prompt": "a", "n": 4, "seed": 7, "size": "64x32"}
        answer = client.post(GENERATIONS, json=body)
        told = answer.json()
        pictures = [client.get(item["url"]) for item in told["data"]]
    assert [item["seed"] for item in told["data"]] == [7, 8, 9, 10]
    assert told["size"] == "64x32" and told["output_format"] == "png"
    for seed, picture in zip((7, 8, 9, 10), pictures, strict=True):
        assert picture.headers["content-type"] == "image/png"
        pixels = np.asarray(Image.open(io.BytesIO(picture.content)))
        assert pixels.shape == (32, 64, 3) and (pixels == seed).all()


@pytest.mark.parametrize("output_format", ["png", "jpeg", "webp"])
def test_formats(output_format):
    with fake_server() as (client, _):
        body = {"prompt": "a", "response_format": "b64_json", "output_format": output_format}
        item = client.post(GENERATIONS, json=body | {"output_compression": 50}).json()["data"][0]
    image = Image.open(io.BytesIO(base64.b64decode(item["b64_json"])))
    assert image.format.lower() == output_format and image.size == (128, 128)


def test_metrics_have_their_names_and_labels_once():
    with fake_server() as (client, _):
        client.post(GENERATIONS, json={"prompt": "a"})
        client.post(GENERATIONS, json={})
        client.get("/" + "x" * 50)
        text = client.get("/metrics").text
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert len({line.rpartition(" ")[0] for line in lines}) == len(lines)
    values = dict(line.rsplit(" ", 1) for line in lines)
    expected = {
        "sglang_queue_depth": 1,
        "sglang_requests_running": 0,
        "sglang_worker_restarts_total": 2,
        'sglang_requests_total{status="finished"}': 3,
        'sglang_stage_seconds_total{stage="Stage"}': 0.5,
        'sglang_engine_state{state="ready"}': 1,
        'sglang_engine_peak_memory_bytes{device="cpu"}': 64 * 2**20,
        'sglang_fused_site{op="a.site",status="eager"}': 1,
        'sglang_fused_site_calls{op="a.site",path="eager"}': 3,
        'sglang_images_total{format="png"}': 1,
        'sglang_http_requests_total{method="GET",route="other",status="404"}': 1,
        f'sglang_request_seconds_count{{route="{GENERATIONS}",status="200"}}': 1,
        f'sglang_request_seconds_count{{route="{GENERATIONS}",status="400"}}': 1,
    }
    assert {name: float(values[name]) for name in expected} == expected


# connections


@contextlib.asynccontextmanager
async def connections(app, listener):
    """(host, port) of `app` behind this server's protocol and sockets."""
    config = uvicorn.Config(app, http=HttpProtocol, log_config=None, lifespan="off")
    state = ServerState()
    server = await asyncio.get_running_loop().create_server(
        lambda: HttpProtocol(config, state, {}), sock=listener
    )
    try:
        yield listener.getsockname()[:2]
    finally:
        server.close()
        for connection in list(state.connections):
            connection.transport.abort()


async def small_answers(scope, receive, send):
    """Answers at once, or to /slow after longer than a client may be silent. Reads no body."""
    await asyncio.sleep(0.6 if scope["path"] == "/slow" else 0)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"ok"})


SILENT = {
    "nothing": (b"", b""),
    "unfinished headers": (b"GET / HTTP/1.1\r\nHost: a\r\nX: ", b"y"),
    "a second request unfinished": (b"GET / HTTP/1.1\r\nHost: a\r\n\r\nGET", b"x"),
    "a body after its answer": (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 999\r\n\r\n", b"z"),
}


@pytest.mark.parametrize("begin,drop", SILENT.values(), ids=SILENT)
def test_a_connection_that_asks_for_nothing_ends(monkeypatch, begin, drop):
    monkeypatch.setattr(http_protocol, "REQUEST_WAIT_S", 0.3)

    async def scenario():
        async with connections(small_answers, _listen("127.0.0.1", 0)) as address:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(begin)
            while not reader.at_eof():
                writer.write(drop)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(reader.read(4096), 0.05)
            writer.close()

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_an_answer_may_take_longer_than_a_client_may_be_silent(monkeypatch):
    monkeypatch.setattr(http_protocol, "REQUEST_WAIT_S", 0.3)

    async def scenario():
        async with connections(small_answers, _listen("127.0.0.1", 0)) as address:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(b"GET /slow HTTP/1.1\r\nHost: a\r\n\r\n" * 2)
            data = await reader.read(-1)
            writer.close()
            return data

    assert asyncio.run(asyncio.wait_for(scenario(), 20)).count(b"200 OK") == 2


def test_bytes_that_are_no_body_after_the_answer_end_the_connection(caplog):
    async def scenario():
        async with connections(small_answers, _listen("127.0.0.1", 0)) as address:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
            await reader.readuntil(b"ok")
            writer.write(b"no chunk\r\n")
            await reader.read(-1)
            writer.close()

    asyncio.run(asyncio.wait_for(scenario(), 20))
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux has it")
def test_a_client_that_never_reads_its_answer_is_cut_off(monkeypatch):
    monkeypatch.setattr(serve_command, "UNREAD_MS", 300)
    cut = asyncio.Event()

    async def large_answer(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(2**25), "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass
        cut.set()

    async def scenario():
        async with connections(large_answer, _listen("127.0.0.1", 0)) as address:
            with socket.create_connection(address) as client:
                client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
                await cut.wait()

    asyncio.run(asyncio.wait_for(scenario(), 20))


# the ends of requests


ASK = {"type": "http.request", "body": json.dumps({"prompt": "a"}).encode()}
STREAM = {"type": "http.request", "body": json.dumps({"prompt": "a", "stream": True}).encode()}


@pytest.mark.parametrize("message", [ASK, STREAM], ids=["whole", "stream"])
def test_a_client_that_leaves_cancels_its_request(message):
    with fake_server() as (client, engine):
        engine.held = True
        asyncio.run(call(client.app, GENERATIONS, [message, {"type": "http.disconnect"}]))
        assert len(engine.asked) == len(engine.cancelled) == 1
        assert client.app.state.context.active == {}


@pytest.mark.parametrize("message", [ASK, STREAM], ids=["whole", "stream"])
def test_cancel_by_id_ends_all_requests_of_that_id(message):
    header = [(b"x-request-id", b"mine")]

    async def scenario(client):
        asks = [call(client.app, GENERATIONS, [message], header) for _ in range(2)]
        running = [asyncio.create_task(ask) for ask in asks]
        while len(client.app.state.context.active.get("mine", [])) < 2:
            await asyncio.sleep(0.001)
        start, body = await call(client.app, "/v1/images/mine/cancel", [])
        assert start["status"] == 200 and json.loads(body["body"])["status"] == "cancelled"
        return await asyncio.gather(*running)

    with fake_server() as (client, engine):
        engine.held = True
        for sent in asyncio.run(scenario(client)):
            whole = b"".join(part.get("body", b"") for part in sent)
            assert b'"code":"request_cancelled"' in whole
        assert len({request.request_id for request in engine.asked}) == 2


def test_serve_refuses_before_the_engine_is_imported():
    code = "import sys; from sglang.cli import main; sys.exit(main(sys.argv[1:]))"
    for words, message in (
        (["--prot", "1"], "did you mean '--port'?"),
        (["--port", "x"], "port: got 'x', expected an integer from 0 to 65535"),
        (["--model-path", "/does/not/exist"], "model_path: got '/does/not/exist'"),
        (["--host", "256.0.0.1"], "cannot listen on 256.0.0.1:30000"),
    ):
        command = [sys.executable, "-c", code, "serve", *words]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert answer.returncode in (1, 2) and message in answer.stderr, answer.stderr
        assert "Traceback" not in answer.stderr
