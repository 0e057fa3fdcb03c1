"""The server with other models than the bundled one: GLM-Image's edits, a pipeline of diffusers."""

import base64
import hashlib
import io

import httpx
import numpy as np
import openai
import pytest
from live_server import LiveServer
from PIL import Image

from sglang.multimodal_gen import DiffGenerator
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.tiny_diffusers import write_tiny_z_image
from sglang.test.tiny_glm import write_tiny_glm

register_cpu_ci(est_time=50, suite="base-a-test-cpu")

SMALL = {"num_inference_steps": 2, "seed": 3}


def served(folder):
    """(live server, client, the same model in this process)"""
    with LiveServer("--model-path", str(folder)) as server:
        with DiffGenerator.from_pretrained(folder, device="cpu", log_level="error") as generator:
            server.wait_ready()
            client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0)
            yield server, client, generator


@pytest.fixture(scope="module")
def glm(tmp_path_factory):
    yield from served(write_tiny_glm(tmp_path_factory.mktemp("tiny") / "glm"))


@pytest.fixture(scope="module")
def z_image(tmp_path_factory):
    yield from served(write_tiny_z_image(tmp_path_factory.mktemp("tiny") / "z-image"))


def png(seed):
    noise = np.random.default_rng(seed).integers(0, 256, (64, 96, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, "PNG")
    return buffer.getvalue()


def sha256(item):
    """Of the pixels of a base64 answer."""
    image = Image.open(io.BytesIO(base64.b64decode(item.b64_json)))
    return hashlib.sha256(np.asarray(image).tobytes()).hexdigest()


def test_an_edit_reads_several_pictures(glm):
    _, client, generator = glm
    files = [("a.png", png(1), "image/png"), ("b.png", png(2), "image/png")]
    asked = {"prompt": "both of them", "size": "64x32", "response_format": "b64_json"}
    answer = client.images.edit(image=files, n=2, extra_body=SMALL, **asked)
    request = {"prompt": "both of them", "width": 64, "height": 32, **SMALL}
    made = generator.generate(image=[png(1), png(2)], num_outputs_per_prompt=2, **request)
    expected = [result.report["sha256"] for result in made]
    assert list(map(sha256, answer.data)) == expected and len(set(expected)) == 2


def test_an_edit_that_the_model_cannot_make_is_named(glm, z_image):
    cases = (
        (glm, [png(seed) for seed in range(5)], "got 5 files, expected 1 to 4"),
        (glm, [png(1)[:200]], "corrupt or cut short"),
        (z_image, [png(1)], "makes pictures from text alone"),
    )
    for (_, client, _), files, words in cases:
        with pytest.raises(openai.BadRequestError, match=words) as caught:
            client.images.edit(image=files, prompt="a", size="64x32")
        assert caught.value.param.startswith("image")


def test_a_pipeline_of_diffusers_answers_with_the_same_bytes(z_image):
    server, client, generator = z_image
    asked = {"prompt": "a cat", "size": "64x32", "response_format": "b64_json"}
    answer = client.images.generate(n=2, extra_body=SMALL, **asked)
    made = generator.generate("a cat", width=64, height=32, num_outputs_per_prompt=2, **SMALL)
    assert list(map(sha256, answer.data)) == [result.report["sha256"] for result in made]
    (model,) = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert (model["id"], model["defaults"]["num_inference_steps"]) == ("z-image", 50)


def test_a_pipeline_of_diffusers_streams_and_refuses(z_image):
    _, client, generator = z_image
    asked = {"prompt": "a cat", "size": "64x32", "extra_body": SMALL}
    *_, last = client.images.generate(stream=True, partial_images=2, **asked)
    made = generator.generate("a cat", width=64, height=32, **SMALL)
    assert last.type == "image_generation.completed" and sha256(last) == made.report["sha256"]
    with pytest.raises(openai.BadRequestError, match="a multiple of 16"):
        client.images.generate(prompt="a cat", size="72x32")
