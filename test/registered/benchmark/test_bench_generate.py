"""bench_generate.py without a GPU: its flags, its arms on a tiny model, its rows and tables."""

import json

import bench_generate
import numpy as np
import pytest
from bench_generate import parse_args
from generate_rows import make_rows, print_quality, prior_tokens
from image_quality import similarity

from sglang.multimodal_gen import DiffGenerator
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.tiny_checkpoints import write_tiny_flux
from sglang.test.tiny_glm import write_tiny_glm

register_cpu_ci(est_time=40, suite="base-a-test-cpu")

SMALL = ["--width", "64", "--height", "64", "--steps", "2", "--runs", "2"]


@pytest.fixture(scope="module")
def generator(tmp_path_factory):
    folder = write_tiny_flux(tmp_path_factory.mktemp("flux"), guidance_embeds=True)
    with DiffGenerator.from_pretrained(folder, device="cpu") as generator:
        yield generator


def test_models_and_load_format():
    args = parse_args(["--model", "flux1-dev,glm-image", "--load-format", "dummy"])
    assert args.models == ["flux1-dev", "glm-image"]
    assert args.arms == ["eager", "lossless", "high"]
    assert (args.runs, args.eager_runs) == (10, 10)
    assert parse_args(["--eager-runs", "2"]).eager_runs == 2


def test_captions_follow_the_prompts(tmp_path):
    file = tmp_path / "captions.json"
    file.write_text(json.dumps([{"caption": "b"}, {"caption": "c"}]))
    assert parse_args(["--prompt", "a", "--captions", str(file)]).prompts == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "flux"], "bundled"),
        (["--arms", "eager,fast"], "lossless"),
        (["--runs", "1"], "--runs: got 1"),
        (["--eager-runs", "1"], "--eager-runs: got 1"),
        (["--model", "bundled", "--load-format", "dummy"], "auto for bundled"),
        (["--model", "glm-image", "--load-format", "auto"], "dummy for glm-image"),
    ],
)
def test_a_bad_flag_is_refused_with_what_is_expected(words, said, capsys):
    with pytest.raises(SystemExit):
        parse_args(words)
    assert said in capsys.readouterr().err


def _bench(monkeypatch, generator, words, tmp_path):
    """Run bench_generate on a tiny model in place of FLUX.1-dev; returns (failed, its rows)."""
    path = tmp_path / "generate.json"
    monkeypatch.setattr(bench_generate, "load", lambda model: _Unclosed(generator))
    monkeypatch.setattr("results.write_result_file", _write_plain)
    failed = []
    args = parse_args([*SMALL, "--json", str(path), *words])
    bench_generate.bench_model("flux1-dev", args, failed)
    return failed, json.loads(path.read_text())["rows"]


class _Unclosed:
    """A generator that outlives the `with` block of one test."""

    def __init__(self, generator):
        self.generate, self.device = generator.generate, generator.device

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


def _write_plain(path, body, num_gpus):
    path.write_text(json.dumps(body))


def test_all_arms_give_rows_and_tables(monkeypatch, generator, tmp_path, capsys):
    failed, rows = _bench(monkeypatch, generator, [], tmp_path)
    out = capsys.readouterr().out
    assert failed == []
    assert [row["arm"] for row in rows] == ["eager", "lossless", "high"]
    assert all(row["equal_to_lossless"] for row in rows)  # a CPU mounts nothing
    assert all(len(set(row["md5"])) == 1 and row["runs"] == 2 for row in rows)
    assert rows[0]["drift_pct"] is not None and rows[1]["drift_pct"] is None
    assert rows[0]["load_s"] >= 0 and rows[0]["first_request_s"] > 0
    assert rows[0]["ar_s"] is None
    assert "| DenoisingStage |" in out and "A/B/A" in out and "no attribution" in out


def test_a_failing_arm_leaves_the_rows_of_the_others(monkeypatch, generator, tmp_path, capsys):
    generate = bench_generate.PromptBench.generate

    def fail_high(self, quality, steps):
        if quality == "high":
            raise RuntimeError("no such tier")
        return generate(self, quality, steps)

    monkeypatch.setattr(bench_generate.PromptBench, "generate", fail_high)
    failed, rows = _bench(monkeypatch, generator, ["--arms", "lossless,high"], tmp_path)
    assert failed == ["flux1-dev high"]
    assert [row["arm"] for row in rows] == ["lossless"]
    assert "no such tier" in capsys.readouterr().err


def test_an_arm_stops_when_its_time_is_up(monkeypatch, generator, tmp_path):
    words = ["--arms", "lossless", "--runs", "50", "--arm-seconds", "0"]
    _, rows = _bench(monkeypatch, generator, words, tmp_path)
    assert rows[0]["runs"] == 2


def test_the_prior_stands_apart(tmp_path):
    folder = write_tiny_glm(tmp_path / "glm")
    with DiffGenerator.from_pretrained(folder, device="cpu") as generator:
        asked = dict(prompt="x", width=64, height=64, num_inference_steps=1, return_frames=True)
        results = [generator.generate(**asked) for _ in range(2)]
    (row,) = make_rows("glm-image", "x", 1.0, {"lossless": results}, None)
    assert row.ar_s == row.stages["GlmImageAR"] > 0
    assert row.ar_tokens_per_s == pytest.approx(prior_tokens(64, 64) / row.ar_s)


def test_the_prior_names_preview_and_picture():
    assert prior_tokens(1024, 1024) == 16 * 16 + 32 * 32
    assert prior_tokens(1024, 512) == 11 * 22 + 16 * 32


def test_similarity():
    image = np.full((16, 16, 3), 100, np.uint8)
    assert similarity(image, image) == (None, pytest.approx(1.0))
    psnr, ssim = similarity(image + 5, image)
    assert psnr == pytest.approx(34.15, abs=0.01) and ssim < 1


def test_quality_table(capsys, generator):
    asked = dict(prompt="x", width=64, height=64, num_inference_steps=1, return_frames=True)
    lossless = [generator.generate(**asked) for _ in range(2)]
    high = [generator.generate(**asked, seed=7) for _ in range(2)]
    print_quality(make_rows("m", "x", 0.0, {"lossless": lossless, "high": high}, None)[1:])
    out = capsys.readouterr().out
    assert "| x | " in out and "mean PSNR" in out
