"""`sglang verify` and `sglang bench` on a machine without a GPU."""

import json
from pathlib import Path

import pytest

from sglang.cli import main
from sglang.kernels.ops.diffusion.bitexact_gate import BitExactFusionGate
from sglang.multimodal_gen.runtime.entrypoints import verify_command
from sglang.multimodal_gen.runtime.layers import fused_site
from sglang.multimodal_gen.runtime.models.dits import flux
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.tiny_checkpoints import write_tiny_flux

register_cpu_ci(est_time=25, suite="base-a-test-cpu")

SMALL = ["--width", "64", "--height", "64", "--device", "cpu"]
EXACT_SITES = {value.name for value in vars(flux).values() if isinstance(value, BitExactFusionGate)}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny flux")
    write_tiny_flux(folder, guidance_embeds=True)
    return str(folder)


def test_without_a_gpu_every_site_is_eager_and_that_is_no_failure(checkpoint, tmp_path, capsys):
    table = tmp_path / "sites.json"
    assert main(["verify", "--model-path", checkpoint, "--json", str(table), *SMALL]) == 0
    assert "No CUDA GPU here" in capsys.readouterr().out
    rows = json.loads(table.read_text())
    assert len(EXACT_SITES) >= 6
    assert {row["op"] for row in rows} == EXACT_SITES | {"fused_linear_gelu", "fused_ln_modulate"}
    assert {row["status"] for row in rows} == {"eager"}
    assert all(row["reason"] and not row["failed"] for row in rows)


@pytest.mark.parametrize("command", [["verify"], ["bench", "--runs", "2"]])
@pytest.mark.parametrize("flag", [["--json"], ["--json", "-"]])
def test_json_without_a_file_is_all_that_is_printed(
    checkpoint, tmp_path, monkeypatch, capsys, command, flag
):
    monkeypatch.chdir(tmp_path)
    words = ["--model-path", checkpoint, "--num-inference-steps", "1", *SMALL]
    assert main([*command, *words, *flag]) == 0
    assert json.loads(capsys.readouterr().out)
    assert list(tmp_path.iterdir()) == []


def test_sites_are_counted_for_one_step(checkpoint, tmp_path):
    table = tmp_path / "sites.json"
    main(["verify", "--model-path", checkpoint, "--json", str(table), *SMALL])
    sites = {}
    for row in json.loads(table.read_text()):
        sites[row["op"]] = sites.get(row["op"], 0) + row["sites"]
    config = json.loads((Path(checkpoint) / "transformer" / "config.json").read_text())
    dual, single = config["num_layers"], config["num_single_layers"]
    assert sites["flux.residual_gate_add"] == 4 * dual + single
    assert sites["flux.layernorm_modulate"] == 4 * dual + single + 1
    assert sites["flux.qk_rmsnorm_rope"] == sites["flux.gelu_tanh_concat"] == single
    assert sites["flux.joint_qk_rmsnorm_rope"] == dual


def test_a_site_that_its_kernel_takes_but_does_not_run_is_a_failure(
    checkpoint, tmp_path, monkeypatch
):
    def broken(*args):
        raise RuntimeError("no such kernel here")

    monkeypatch.setattr(
        "sglang.multimodal_gen.runtime.models.dits.flux_sites.can_use_gelu_tanh_concat_cuda",
        lambda *args: True,
    )
    monkeypatch.setattr(
        "sglang.multimodal_gen.runtime.models.dits.flux_sites.gelu_tanh_concat_cuda", broken
    )
    table = tmp_path / "sites.json"
    assert main(["verify", "--model-path", checkpoint, "--json", str(table), *SMALL]) == 1
    failed = [row for row in json.loads(table.read_text()) if row["failed"]]
    assert {row["op"] for row in failed} == {"flux.gelu_tanh_concat"}
    assert "no such kernel here" in failed[0]["reason"]


def test_observation_ends_with_its_block():
    with fused_site.observe_sites() as observed:
        assert observed == {}
    assert fused_site._observed is None


def test_bad_flags_are_refused_by_name(capsys):
    with pytest.raises(SystemExit) as exit_info:
        verify_command.run(["--widht", "64"])
    assert exit_info.value.code == 2
    assert "--width" in capsys.readouterr().err


def test_a_compiled_model_has_no_sites_to_judge(capsys):
    with pytest.raises(SystemExit) as exit_info:
        verify_command.run(["--enable-torch-compile"])
    assert exit_info.value.code == 2
    assert "enable_torch_compile: got True, expected False" in capsys.readouterr().err


def test_a_missing_folder_is_bad_input(tmp_path):
    assert main(["verify", "--model-path", str(tmp_path / "nowhere")]) == 2


def test_bench_prints_medians_and_writes_them(checkpoint, tmp_path, capsys):
    target = tmp_path / "bench.json"
    words = ["bench", "--model-path", checkpoint, "--runs", "2", "--json", str(target), *SMALL]
    assert main([*words, "--num-inference-steps", "2"]) == 0
    summary = json.loads(target.read_text())
    assert summary["distinct_sha256"] == 1 and summary["wall_s"] > 0
    assert "DenoisingStage" in summary["stages_s"]
    assert "median of 1" in capsys.readouterr().out


def test_bench_needs_two_runs(checkpoint, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["bench", "--model-path", checkpoint, "--runs", "1"])
    assert exit_info.value.code == 2
    assert "runs: got 1" in capsys.readouterr().err
