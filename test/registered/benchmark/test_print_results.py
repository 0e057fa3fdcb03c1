"""print_results.py: blocks between markers, and the tables of hand-made result files."""

import json

import environment
import print_results
import pytest
from print_results import filled
from result_tables import drift, families, quality, results
from results import merge_rows

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

HEADER = {"gpu": "GPU X", "torch": "2.11.0", "date": "2026-11-30T10:00:00+00:00"}
SIZE = {"width": 1024, "height": 1024}


def write(folder, name, rows):
    (folder / f"{name}.json").write_text(json.dumps({"header": HEADER, "rows": rows}))


def denoise_row(model, arm, **changes):
    row = {"model": model, "arm": arm, **SIZE, "steps": 20, "ms_per_step": 10.0}
    row |= {"md5": ["a", "a"]}
    row |= {"ratio_to_floor": 1.25, "ratio_to_eager": None, "peak_memory_mb": 2048.0}
    row |= {"equal_to_diffusers": None, "psnr_vs_diffusers_db": None}
    return row | {"families": None, "family_rates": None} | changes


def generate_row(model, arm, prompt="p", **changes):
    row = {"model": model, "arm": arm, "prompt": prompt, **SIZE, "runs": 10, "wall_s": 2.0}
    row |= {"denoise_s": 1.0, "md5": ["a"], "peak_memory_mb": 1024.0, "load_s": 3.0}
    row |= {"first_request_s": 4.0, "ar_s": None, "ar_tokens_per_s": None}
    return row | {"equal_to_lossless": True, "psnr_db": None, "ssim": 1.0} | changes


def test_each_block_is_replaced_and_the_rest_stays():
    text = "a\n<!-- x:begin -->\nold\n<!-- x:end -->\nb\n<!-- y:begin --><!-- y:end -->"
    out = filled(text, {"x": "new", "y": "other", "z": "absent"})
    assert out == (
        "a\n<!-- x:begin -->\nnew\n<!-- x:end -->\nb\n<!-- y:begin -->\nother\n<!-- y:end -->"
    )
    assert filled(out, {"x": "new", "y": "other"}) == out


@pytest.mark.parametrize(
    "text",
    [
        "no markers",
        "<!-- x:begin -->",
        "<!-- x:end --><!-- x:begin -->",
        "<!-- x:begin --><!-- x:begin --><!-- x:end -->",
    ],
)
def test_markers_that_are_missing_or_out_of_order_are_refused(text):
    with pytest.raises(ValueError, match="expected"):
        filled(text, {"x": "new"})


def test_a_document_without_markers_is_refused_by_name(tmp_path, capsys):
    document = tmp_path / "document.md"
    document.write_text("text")
    with pytest.raises(SystemExit):
        print_results.main(["--write", str(document)])
    assert str(document) in capsys.readouterr().err
    assert document.read_text() == "text"


def test_the_documents_have_their_markers():
    for name, block in (("README.md", "results"), ("docs/performance.md", "families")):
        text = (print_results.ROOT / name).read_text()
        assert f"<!-- {block}:begin -->" in text
        filled(text, dict.fromkeys(print_results.BLOCKS, ""))


def test_denoising_names_its_command_and_the_nearness_to_diffusers(tmp_path):
    rows = [
        denoise_row("glm-image", "lossless", equal_to_diffusers=True, ratio_to_eager=0.8, steps=10),
        denoise_row("ernie-image", "eager", equal_to_diffusers=False, psnr_vs_diffusers_db=45.25),
    ]
    write(tmp_path, "denoise", rows)
    (text,) = results(tmp_path)
    lines = text.splitlines()
    assert lines[0] == (
        "**Denoising** (GPU X, torch 2.11.0, 2026-11-30; `python benchmark/bench_denoise.py"
        " --model ernie-image,glm-image --arms eager,lossless`)"
    )
    assert lines[4:] == [
        "| ernie-image | eager | 1024x1024 | 20 | 10.0 | 1.250 |  | 45.2 dB | 2.0 | 1 |",
        "| glm-image | lossless | 1024x1024 | 10 | 10.0 | 1.250 | 0.800 | equal | 2.0 | 1 |",
    ]


def test_whole_images_group_prompts_and_show_the_prior(tmp_path):
    rows = [
        generate_row("bundled", "high", "p", psnr_db=40.0, ssim=0.99, equal_to_lossless=False),
        generate_row("bundled", "high", "q", wall_s=4.0, md5=["a", "b"]),
        generate_row("glm-image", "lossless", ar_s=6.4, ar_tokens_per_s=200.0),
    ]
    write(tmp_path, "generate", rows)
    (text,) = results(tmp_path)
    size = "1024x1024"
    assert text.splitlines()[4:] == [
        f"| glm-image | lossless | {size} | 1 | 10 | 2.000 | 1.000 | 6.40 (200) | 4.0 | 3.0 | 1.0"
        " | 1 | equal |",
        f"| bundled | high | {size} | 2 | 10 | 3.000 | 1.000 |  | 4.0 | 3.0 | 1.0 | 2"
        " | 40.0 / 0.9950 |",
    ]


def test_an_arm_that_was_not_compared_is_not_called_equal(tmp_path):
    row = generate_row("glm-image", "eager", equal_to_lossless=None, ssim=None)
    write(tmp_path, "generate", [row])
    assert next(results(tmp_path)).splitlines()[-1].endswith("| 1 |  |")


def test_families_of_each_model_that_was_profiled(tmp_path):
    rate = {"value": 600.0, "unit": "TFLOP/s", "pct_of_ceiling": 85.0}
    profile = {"families": {"gemm": 8.0, "gaps": 0.1}, "family_rates": {"gemm": rate}}
    rows = [denoise_row("glm-image", "eager"), denoise_row("flux1-dev", "lossless", **profile)]
    write(tmp_path, "denoise", rows)
    (text,) = families(tmp_path)
    assert text.startswith("**flux1-dev, 1024x1024** (") and "--steps 20 --profile`)" in text
    assert "| gemm | 8.00 (600 TFLOP/s, 85 %) |" in text


def test_quality_is_the_bundled_model_s_prompt_by_prompt(tmp_path):
    changed = {"psnr_db": 40.0, "ssim": 0.99, "equal_to_lossless": False}
    rows = [
        generate_row("bundled", "high", "a", **changed),
        generate_row("bundled", "high", "b"),
        generate_row("flux1-dev", "high", "c", **changed),
    ]
    write(tmp_path, "generate", rows)
    (text,) = quality(tmp_path)
    assert text.splitlines()[4:] == [
        "| a | 40.0 | 0.9900 |",
        "| b | equal | 1.0000 |",
        "| **mean** | **40.0** | **0.9950** |",
    ]


def test_drift_of_each_high_arm(tmp_path):
    rows = [denoise_row("flux1-dev", "high", drift=[0.01, 0.02]), denoise_row("flux1-dev", "eager")]
    write(tmp_path, "denoise", rows)
    (text,) = drift(tmp_path)
    assert "--arms high --steps 20 --drift`)" in text
    assert text.splitlines()[-1] == "| flux1-dev | 1.0e-02 | 2.0e-02 |"


def test_no_results_no_tables(tmp_path):
    assert [list(block(tmp_path)) for block in (results, families, quality, drift)] == [[]] * 4


def test_the_shipped_results_can_be_printed(capsys):
    assert print_results.main([]) == 0
    assert "**Denoising**" in capsys.readouterr().out


def test_rows_that_stay_in_a_merged_file_keep_the_day_of_their_run(tmp_path, monkeypatch):
    header = {**HEADER, "package_commit": "a" * 40}
    later = {**header, "date": "2026-12-02T10:00:00+00:00", "package_commit": "b" * 40}
    file = tmp_path / "denoise.json"
    old = [denoise_row("flux1-dev", arm) for arm in ("eager", "lossless")]
    file.write_text(json.dumps({"header": header, "rows": old}))
    monkeypatch.setattr(environment, "header", lambda num_gpus: later)
    for _ in range(2):
        merge_rows(file, [denoise_row("flux1-dev", "lossless")], key=("model", "arm"))
    kept, new = json.loads(file.read_text())["rows"]
    assert (kept["date"], kept["package_commit"]) == (header["date"], "a" * 40)
    assert "date" not in new
    (table,) = results(tmp_path)
    assert "2026-11-30 and 2026-12-02" in table
