"""The bundled model draws what was asked for, through the public API, at its defaults."""

import sys
from pathlib import Path

import numpy as np
import pytest

from sglang.multimodal_gen import DiffGenerator
from sglang.multimodal_gen.configs.model_specs import BUNDLED_MODEL
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=60, suite="base-a-test-cpu")

TOOLS = Path(__file__).resolve().parents[3] / "tools" / "bundled_model"
sys.path.insert(0, str(TOOLS))

from retrieval import Reference, load_list  # noqa: E402

EVERY = 20  # of the 200 captions and of the 400 phrasings
UNSEEN = {"a blue heart": (0, 90, 200), "a green circle": (0, 180, 60), "a red star": (240, 40, 40)}


@pytest.fixture(scope="module")
def generator():
    with DiffGenerator.from_pretrained(device="cpu") as generator:
        yield generator


@pytest.mark.parametrize(("name", "needed"), [("captions_200", 9), ("phrasings_20x20", 18)])
def test_nearest_training_picture_is_the_one_asked_for(generator, name, needed):
    rows = load_list(name)[::EVERY]
    results = generator.generate(prompt=[row["caption"] for row in rows], return_frames=True)
    pictures = np.stack([result.frames for result in results]).astype(np.float32) / 255
    found = Reference().nearest(pictures)
    right = sum(icon == row["icon"] for icon, row in zip(found, rows, strict=True))
    wrong = [(r["caption"], f) for r, f in zip(rows, found, strict=True) if f != r["icon"]]
    assert right >= needed, wrong


@pytest.mark.parametrize(("prompt", "colour"), UNSEEN.items())
def test_colours_compose_with_objects_never_seen_in_them(generator, prompt, colour):
    frames = generator.generate(prompt=prompt, seed=3, return_frames=True).frames
    centre = frames[56:72, 56:72].reshape(-1, 3).mean(axis=0)
    assert np.abs(centre - colour).max() < 70, centre


def test_defaults_come_from_the_checkpoint(generator):
    result = generator.generate(prompt="a fox")
    assert result.size == (128, 128)
    assert result.report["num_inference_steps"] == 20
    assert result.report["true_cfg_scale"] > 1


def test_the_seed_picks_the_picture(generator):
    first, second = (generator.generate(prompt="a car", seed=seed) for seed in (0, 1))
    assert first.report["sha256"] != second.report["sha256"]


def test_size_and_model_card():
    weights = sum(path.stat().st_size for path in BUNDLED_MODEL.rglob("*.safetensors"))
    assert weights <= 24_000_000
    card = (BUNDLED_MODEL / "README.md").read_text()
    for part in ("licence", "What it can do", "What it cannot do", "Measured", "parameters"):
        assert part in card
