"""bench_denoise.py without a GPU: its flags, its arms on tiny models, what it writes."""

import json

import bench_denoise
import pytest
import torch
from bench_denoise import ARMS, latents_md5, make_rows, parse_args, psnr_db, run_arms
from denoise_arms import sites_off
from drift import drift_by_step, latents_by_step, relative_distance
from op_counts import Attention, Gemm, per_step
from tables import drift_table

from sglang.kernels.ops.diffusion.bitexact_gate import BitExactFusionGate, all_gates
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=40, suite="base-a-test-cpu")

MODELS = ("flux1-dev", "ernie-image", "glm-image")


def test_all_arms_and_several_models():
    args = parse_args(["--model", "flux1-dev,glm-image", "--arms", "all"])
    assert args.models == ["flux1-dev", "glm-image"]
    assert tuple(args.arms) == ARMS
    assert args.steps is None  # each model's own


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "flux"], "flux1-dev"),
        (["--arms", "eager,fast"], "lossless"),
        (["--runs", "1"], "at least 2"),
        (["--warm-steps", "0"], "at least 1"),
        (["--without", "flux.modulation_rows", "--json", "x.json"], "without --json"),
    ],
)
def test_a_bad_flag_is_refused_with_what_is_expected(words, said, capsys):
    with pytest.raises(SystemExit):
        parse_args(words)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("model", MODELS)
def test_the_arms_denoise_alike_and_near_diffusers(cases, model):
    case, failed = cases[model], []
    logs = run_arms(case, ["eager", "lossless", "diffusers"], 2, model, failed)
    rows = {row.arm: row for row in make_rows(model, case, logs, None)}
    assert failed == []
    assert len({md5 for arm in ("eager", "lossless") for md5 in rows[arm].md5}) == 1
    for arm in ("eager", "lossless"):
        psnr = rows[arm].psnr_vs_diffusers_db
        assert rows[arm].equal_to_diffusers or psnr > 100  # float32 of the same chain
    assert (rows["eager"].width, rows["eager"].height, rows["eager"].steps) == (96, 64, 3)
    assert rows["eager"].ratio_to_eager == 1.0 and rows["eager"].ratio_to_floor is None


def test_an_arm_without_some_sites_leaves_their_gates_as_they_were(cases):
    args = parse_args(["--arms", "lossless", "--without", "flux.residual_gate_add"])
    assert args.arms == ["lossless", "without"]
    with sites_off(args.without):
        assert {g.name for g in all_gates() if g.disabled} == {"flux.residual_gate_add"}
    assert not [g.name for g in all_gates() if g.disabled]


def test_a_site_that_is_verified_already_is_left_out_too():
    gate = BitExactFusionGate("test.left_out", per_signature=True)
    ran = []

    def op(name):
        ran.append(name)
        return torch.ones(2)

    def run():
        ran.clear()
        gate.run(lambda: op("fused"), lambda: op("eager"), sig=2)
        return list(ran)

    assert sorted(run()) == ["eager", "fused"] and run() == ["fused"]
    with sites_off([gate.name]):
        assert run() == ["eager"]
    assert run() == ["fused"]


def test_an_unknown_site_is_refused_before_a_model_is_made(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["bench_denoise.py", "--without", "flux.nothing"])
    assert bench_denoise.main() == 1
    said = capsys.readouterr().out
    assert "got flux.nothing, expected some of" in said and "flux.linear_gelu" in said


@pytest.mark.parametrize("model", MODELS)
def test_schedule_is_the_reference_s(cases, model):
    """The diffusers arm is handed our tables: they must be what its scheduler would make."""
    import numpy as np
    from diffusers import FlowMatchEulerDiscreteScheduler

    case = cases[model]
    image = case._batch(None, None).images[0]
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(case.scheduler_config)
    steps = 3
    if model == "glm-image":
        tokens = image.prior_ids.shape[1]
        times = np.linspace(1000, 1.0, steps + 1)[:-1].astype(np.int64).astype(np.float32)
        mu = (tokens / 256) ** 0.5 * 0.75 + 0.25
        scheduler.set_timesteps(timesteps=times, sigmas=times / 1000, mu=mu, device="cpu")
    elif model == "ernie-image":
        scheduler.set_timesteps(sigmas=torch.linspace(1.0, 0.0, steps + 1)[:-1], device="cpu")
    else:
        tokens = image.latents.shape[1]
        mu = (tokens - 256) * (1.15 - 0.5) / (4096 - 256) + 0.5
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu, device="cpu")
    torch.testing.assert_close(image.sigmas, scheduler.sigmas, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(image.timesteps, scheduler.timesteps, rtol=1e-6, atol=1e-4)


def test_a_step_s_ops_are_counted_by_shape(cases):
    counts = per_step(cases["ernie-image"], "eager")
    image, prompts, heads, layers = 24, (120, 1), 2, 2
    assert counts.attentions == {
        Attention(1, heads, image + text, image + text, 32): layers for text in prompts
    }
    width = cases["ernie-image"].config["hidden_size"]
    for text in prompts:  # q, k, v, out
        assert counts.gemms[Gemm(image + text, width, width, False)] == 4 * layers
    assert counts.gemm_flops == sum(
        n * 2 * g.rows * g.inner * g.out for g, n in counts.gemms.items()
    )
    assert counts.family_bytes["copy and cat"] > 0


def test_work_done_once_an_image_is_not_counted(cases):
    case = cases["glm-image"]
    glyphs, prior = (getattr(case.transformer, f"{n}_projector") for n in ("glyph", "prior"))
    once = {
        m.weight.shape for p in (glyphs, prior) for m in p.modules() if hasattr(m, "in_features")
    }
    gemms = per_step(case, "eager").gemms
    first = {shape for shape in once if shape[1] == case.config["text_embed_dim"]}
    assert first and not any((g.out, g.inner) in {tuple(s) for s in first} for g in gemms)


def test_a_failing_arm_is_left_out_and_the_others_go_on(cases, monkeypatch, capsys):
    case, failed = cases["flux1-dev"], []
    monkeypatch.setattr(case, "_make_reference", _raise)
    logs = run_arms(case, ["diffusers-compile", "eager"], 2, "flux1-dev", failed)
    assert failed == ["flux1-dev diffusers-compile"]
    assert list(logs) == ["eager"] and len(logs["eager"].md5) == 2
    assert "no compiler here" in capsys.readouterr().err


def test_a_short_first_run_only_warms_up(cases):
    logs = run_arms(cases["flux1-dev"], ["eager"], 2, "flux1-dev", [], warm_steps=1)
    full = run_arms(cases["flux1-dev"], ["eager"], 2, "flux1-dev", [])
    assert logs["eager"].md5 == full["eager"].md5[:1]
    assert len(logs["eager"].step_seconds) == len(full["eager"].step_seconds) == 3


def _raise(compiled):
    raise RuntimeError("no compiler here")


def test_rows_of_each_model_are_written_before_the_next_runs(cases, monkeypatch, tmp_path):
    path = tmp_path / "denoise.json"
    args = parse_args(["--arms", "eager", "--runs", "2", "--warm-steps", "1"])
    written = []
    monkeypatch.setattr("results.write_result_file", _write_plain)
    for model in ("flux1-dev", "glm-image"):
        monkeypatch.setattr(bench_denoise, "make_case", lambda name, _: cases[name])
        bench_denoise.report(bench_denoise.bench_model(model, args, []), path)
        written.append([row["model"] for row in json.loads(path.read_text())["rows"]])
    assert written == [["flux1-dev"], ["flux1-dev", "glm-image"]]


def _write_plain(path, body, num_gpus):
    path.write_text(json.dumps(body))


@pytest.mark.parametrize("model", MODELS)
def test_drift_has_one_distance_a_step(cases, model):
    """On the CPU no fusion of the high tier is mounted, so nothing drifts."""
    assert drift_by_step(cases[model]) == [0.0, 0.0, 0.0]
    steps = latents_by_step(cases[model], "lossless")
    assert torch.equal(steps[-1], cases[model].run("eager").latents)
    assert not torch.equal(steps[0], steps[1])


def test_relative_distance():
    reference = torch.tensor([3.0, 4.0])
    assert relative_distance(reference * 1.1, reference) == pytest.approx(0.1, rel=1e-6)


def test_drift_table_shows_every_tenth_step_and_the_last():
    rows = [{"model": "a", "drift": [0.001] * 12}, {"model": "b", "drift": [0.1, 0.2, 0.3, 0.4]}]
    assert drift_table(rows).splitlines() == [
        "| after step | 1 | 4 | 10 | 12 |",
        "| --- | --- | --- | --- | --- |",
        "| a | 1.0e-03 | 1.0e-03 | 1.0e-03 | 1.0e-03 |",
        "| b | 1.0e-01 | 4.0e-01 |  |  |",
    ]


def test_psnr_of_latents():
    reference = torch.tensor([0.0, 2.0])
    assert psnr_db(reference, reference) is None
    assert psnr_db(reference + 0.2, reference) == pytest.approx(20.0)


def test_md5_is_of_the_bytes():
    assert latents_md5(torch.zeros(4)) == latents_md5(torch.zeros(2, 2))
    assert latents_md5(torch.zeros(4)) != latents_md5(-torch.zeros(4))
