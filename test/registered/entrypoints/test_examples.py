"""Every example runs as it stands and says what it promises."""

import subprocess
import sys
from pathlib import Path

from live_server import LiveServer
from PIL import Image

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=90, suite="base-a-test-cpu")

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def run(name, *words):
    command = [sys.executable, str(EXAMPLES / name), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def test_text_to_image(tmp_path):
    path, sha256 = run("text_to_image.py", "a red apple", str(tmp_path)).split()
    assert Path(path).parent == tmp_path and Path(path).read_bytes().startswith(b"\x89PNG")
    assert len(sha256) == 64


def test_image_to_image(tmp_path):
    picture, out = tmp_path / "in.png", tmp_path / "out"
    Image.new("RGB", (128, 128), "green").save(picture)
    lines = run("image_to_image.py", str(picture), "a red apple", str(out)).splitlines()
    assert [line.split()[:2] for line in lines] == [["0.3", "6"], ["0.6", "12"], ["0.9", "18"]]
    assert len(list(out.glob("*.png"))) == 3


def test_seeds_and_batches():
    assert run("seeds_and_batches.py").splitlines() == ["[7, 8, 9]", "equal"]


def test_what_really_ran():
    output = run("what_really_ran.py")
    assert "asked for high and got" in output and "flux.residual_gate_add" in output


def test_openai_client(tmp_path):
    with LiveServer() as server:
        lines = run("openai_client.py", server.wait_ready().url, str(tmp_path)).splitlines()
    said = [line.removeprefix(f"{tmp_path}/").split()[:2] for line in lines]
    assert said[:2] == [["apple_0.png", "seed"], ["apple_1.png", "seed"]]
    assert ["tree_preview.png", "image_generation.partial_image"] in said
    assert said[-2:] == [["tree.png", "image_generation.completed"], ["yellow.png", "edited"]]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.iterdir())


def test_every_example_is_tested_here():
    source = Path(__file__).read_text()
    assert all(f'"{path.name}"' in source for path in EXAMPLES.glob("*.py"))
