"""bench_denoise.py on several ranks, here processes on the CPU: rows, comparison, failures."""

import pytest
import torch
from bench_denoise import parse_args, run_arms
from denoise_arms import CaseSetup
from long_runs import attempt

from sglang.multimodal_gen.configs.parallel_layout import ParallelLayout
from sglang.multimodal_gen.runtime.distributed.launch import RankLost
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=40, suite="base-a-test-cpu")


@pytest.fixture(scope="module")
def setup(write_configs, tmp_path_factory):
    """A tiny ERNIE-Image, float32 on the CPU."""
    from sglang.test.tiny_ernie import ernie_transformer_config

    folder = tmp_path_factory.mktemp("parallel")
    config = ernie_transformer_config()
    write_configs(folder, "ErnieImagePipeline", config, {"shift": 3.0})
    return CaseSetup(folder, 96, 64, 3, torch.device("cpu"), torch.float32, "flash")


@pytest.fixture(scope="module")
def one(setup):
    from bench_denoise import build_case

    return build_case("ernie-image", setup)


@pytest.fixture
def one_thread():
    """The ranks have as many threads as rank 0, which on two busy cores would be too many."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_a_layout_is_measured_beside_one_rank(setup, one, one_thread, monkeypatch):
    import parallel_arms

    monkeypatch.setattr(parallel_arms, "case_setup", lambda model, args: setup)
    monkeypatch.setattr(parallel_arms, "free_memory", lambda: None)
    args = parse_args(["--model", "ernie-image", "--num-gpus", "2", "--runs", "2"])
    failed = []
    rows = parallel_arms.bench_layouts("ernie-image", one, args, failed)
    assert failed == []
    assert [(row.arm, row.num_gpus, row.layout) for row in rows] == [
        ("eager", 1, "single"),
        ("lossless", 1, "single"),
        ("eager", 2, "cfg2"),
        ("lossless", 2, "cfg2"),
    ]
    assert [row.equal_to_one_gpu for row in rows] == [None, None, True, True]
    for alone, shared in zip(rows[:2], rows[2:], strict=True):
        assert shared.speedup_vs_one_gpu == alone.ms_per_step / shared.ms_per_step
    assert len({md5 for row in rows for md5 in row.md5}) == 1


def test_a_layout_that_breaks_is_reported_and_one_rank_goes_on(setup, one, one_thread):
    from parallel_arms import InTurns, LayoutArms

    failed = []
    with LayoutArms("ernie-image", setup, ParallelLayout(ulysses=2)) as several:
        several._case.stage.denoise = None  # rank 0 alone fails, and leaves rank 1 waiting
        turns = InTurns(one, several)
        logs = run_arms(turns, ["eager@ulysses2", "eager@single"], 2, "ernie-image", failed)
        assert failed == ["ernie-image eager@ulysses2"] and list(logs) == ["eager@single"]
        with pytest.raises(RankLost, match="rank 0 failed in arm eager"):
            several.run("eager", None)


def test_what_runs_on_one_gpu_only_is_refused(capsys):
    for words in (["--arms", "eager,diffusers"], ["--profile"], ["--drift"]):
        with pytest.raises(SystemExit):
            parse_args(["--num-gpus", "2", *words])
        assert "run on one GPU only" in capsys.readouterr().err


def test_attempts_name_the_layout():
    failed = []
    attempt("flux1-dev ulysses2", failed, lambda: 1 / 0)
    assert failed == ["flux1-dev ulysses2"]
