"""A generator of two ranks from the outside: pictures, seeds, cancelling, the loss of a rank."""

import gc
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import fields

import numpy as np
import pytest
import torch

from sglang.multimodal_gen import DiffGenerator
from sglang.multimodal_gen.configs.sampling_params import SamplingParams
from sglang.multimodal_gen.runtime.distributed import parallel_state
from sglang.multimodal_gen.runtime.distributed.launch import RankLost
from sglang.multimodal_gen.runtime.pipelines import parallel_denoising
from sglang.multimodal_gen.runtime.pipelines.parallel_denoising import LeadingDenoisingStage
from sglang.multimodal_gen.runtime.pipelines.rank_messages import (
    CONDITION_TENSORS,
    PARTS,
    TENSORS,
    TEXTS,
    image_of,
    tensors_of,
)
from sglang.multimodal_gen.runtime.pipelines.stages.checks import NonFiniteError
from sglang.multimodal_gen.runtime.pipelines.stages.state import (
    ConditionState,
    ImageState,
    TextEmbeds,
)
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.tiny_ernie import write_tiny_ernie

register_cpu_ci(est_time=60, suite="base-a-test-cpu")

SMALL = {"width": 80, "height": 48, "num_inference_steps": 3, "save_output": False}
TORCHRUN_PORT = 29500  # what torch.distributed takes unless told otherwise


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_ernie(tmp_path_factory.mktemp("ranks") / "ernie", with_pe=False)


@pytest.fixture(scope="module")
def one(folder):
    with DiffGenerator.from_pretrained(folder, device="cpu", log_level="warning") as generator:
        yield generator


@pytest.fixture(scope="module")
def two(folder):
    """Started while the port is taken that other programs of torch.distributed meet at."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", TORCHRUN_PORT))
        taken.listen()
        generator = load_two(folder)
    with generator:
        yield generator


def load_two(folder):
    return DiffGenerator.from_pretrained(folder, num_gpus=2, device="cpu", log_level="warning")


def ranks_of(generator):
    return generator._worker._ranks


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def generate(generator, on_progress, **asked):
    """As `DiffGenerator.generate`, with a progress callback that may raise."""
    params = SamplingParams(**{"prompt": "a", "seed": 1} | SMALL | asked)
    return generator._client.generate(params.resolve(generator._worker.spec), on_progress)


@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_pictures_are_those_of_one_rank(one, two, guidance):
    asked = {"prompt": ["a red apple", "an owl"], "seed": [3, 9], "guidance_scale": guidance}
    pairs = zip(one.generate(**asked, **SMALL), two.generate(**asked, **SMALL), strict=True)
    for expected, got in pairs:
        assert got.report["sha256"] == expected.report["sha256"]
        assert len(got.report["step_seconds"]) == 3


def test_without_a_seed_all_ranks_have_rank_zeros_noise(one, two):
    expected = one.generate("a red apple", **SMALL).report
    for _ in range(2):
        got = two.generate("a red apple", **SMALL).report
        assert (got["seed"], got["sha256"]) == (expected["seed"], expected["sha256"])


def test_the_report_names_layout_and_scope(one, two):
    reports = [g.generate("a", seed=1, **SMALL).report for g in (one, two)]
    assert [(r["layout"], r["num_gpus"]) for r in reports] == [("single", 1), ("cfg2", 2)]
    assert {r["exactness"] for r in reports} == {"byte-equal to one rank"}
    assert type(one.transformer) is type(two.transformer)


def test_the_high_tier_is_mounted_and_unmounted_on_every_rank(one, two):
    asked = {"prompt": "a", "seed": 4, **SMALL}
    high, lossless = (two.generate(quality=q, **asked) for q in ("high", "lossless"))
    expected = one.generate(**asked).report["sha256"]
    assert {high.report["sha256"], lossless.report["sha256"]} == {expected}


def test_a_cancelled_request_leaves_the_ranks_in_step(one, two):
    class Cancelled(Exception):
        pass

    def cancel(progress):
        if (progress.label, progress.done) == ("denoise 1/1", 2):
            raise Cancelled

    for _ in range(2):
        with pytest.raises(Cancelled):
            generate(two, cancel)
    expected = one.generate("a red apple", seed=5, **SMALL)
    assert (
        two.generate("a red apple", seed=5, **SMALL).report["sha256"] == (expected.report["sha256"])
    )


def test_a_picture_of_nan_is_an_error_and_the_ranks_live_on(one, two, monkeypatch):
    """Rank 0's latents become NaN before they are sent: every rank finds the same."""
    send = LeadingDenoisingStage.__call__

    def spoilt(stage, batch):
        batch.images[0].latents = batch.images[0].latents * float("nan")
        send(stage, batch)

    monkeypatch.setattr(LeadingDenoisingStage, "__call__", spoilt)
    with pytest.raises(NonFiniteError, match="DenoisingStage: latents"):
        two.generate("a", seed=1, **SMALL)
    monkeypatch.undo()
    hashes = [g.generate("a", seed=1, **SMALL).report["sha256"] for g in (one, two)]
    assert hashes[0] == hashes[1]


def test_a_site_that_ran_eager_on_another_rank_alone_is_told(two, caplog, monkeypatch):
    """Rank 0 counts no eager call, while rank 1 does, as there is no fused op on a CPU."""
    monkeypatch.setattr(parallel_denoising, "all_gates", lambda: ())
    with caplog.at_level("WARNING", logger="sglang"):
        two.generate("a", seed=1, **SMALL)
    told = [r.getMessage() for r in caplog.records if "rank 1 ran" in r.getMessage()]
    assert any("rank 1 ran ernie.norm_scale_shift eagerly: the kernel does" in t for t in told)


def test_the_callers_tracebacks_stay_as_they_are(two):
    assert "distributed" not in getattr(sys.excepthook, "__module__", "")


def test_one_process_has_one_group_of_ranks(two, folder):
    """The second generator is refused, and neither is harmed."""
    assert parallel_state.world_size() == 2
    with pytest.raises(RuntimeError, match="torch.distributed is already in use in this process"):
        load_two(folder)
    assert two.generate("a", seed=1, **SMALL).report["layout"] == "cfg2"


def test_everything_that_denoising_reads_is_sent():
    """A field added to the state is sent, or named here as none of the further ranks' business."""
    not_sent = {"request", "revised_prompt", "start_latents", "step_seconds", "pixels"}
    names = {field.name for field in fields(ImageState)}
    assert names - not_sent == {*TENSORS, *TEXTS}
    assert {field.name for field in fields(TextEmbeds)} - {"rows", "memory"} == set(PARTS)
    assert {field.name for field in fields(ConditionState)} - {"size"} == set(CONDITION_TENSORS)


def test_an_image_survives_the_way():
    tensors = {name: torch.full((2,), float(i)) for i, name in enumerate(TENSORS)}
    text = TextEmbeds(torch.ones(1, 3), None, torch.zeros(1))
    image = ImageState(None, text=text, **tensors)
    found = image_of(None, dict(tensors_of(image)))
    assert found == image or vars(found).keys() == vars(image).keys()
    assert found.negative_text is None and found.text.pooled is None
    assert all(torch.equal(getattr(found, name), tensors[name]) for name in TENSORS)
    assert torch.equal(found.text.tokens, text.tokens) and found.text.prior is text.prior


def test_a_rank_killed_within_a_step_ends_all_with_one_error(two):
    """The rank is stopped, so that rank 0 waits for it in a collective, and then killed."""
    pids, (victim, *_) = ranks_of(two).pids, ranks_of(two).pids
    killer = threading.Timer(0.7, os.kill, (victim, signal.SIGKILL))
    times = {}

    def stop(progress):
        if (progress.label, progress.done) == ("denoise 1/1", 1):
            os.kill(victim, signal.SIGSTOP)
            killer.start()
            times["start"] = time.monotonic()

    expected = rf"^rank 1 \(process {victim}\) ended with SIGKILL; load the model again$"
    with pytest.raises(RankLost, match=expected):
        generate(two, stop)
    assert 0.5 < time.monotonic() - times["start"] < 10
    with pytest.raises(RankLost, match=expected):
        two.generate("a", **SMALL)
    two.close()
    assert not any(map(alive, pids))
    assert parallel_state.world_size() == 1


def test_a_generator_that_nobody_closes_leaves_no_process(folder):
    generator = load_two(folder)
    pids = ranks_of(generator).pids
    assert all(map(alive, pids))
    del generator
    gc.collect()
    assert not any(map(alive, pids)) and parallel_state.world_size() == 1


def test_a_rank_that_fails_says_why_and_close_leaves_none(folder, one, monkeypatch):
    """After the loss above, the process can load another; this one's rank gets a wrong job."""
    generator = load_two(folder)
    pids = ranks_of(generator).pids
    same = generator.generate("a", seed=2, return_frames=True, **SMALL).frames
    assert np.array_equal(same, one.generate("a", seed=2, return_frames=True, **SMALL).frames)
    ranks_of(generator).send_all("not a job")
    with pytest.raises(RankLost, match="(?s)rank 1 .*AttributeError: 'str' object"):
        generate(generator, lambda progress: None)
    generator.close()
    assert not any(map(alive, pids))
