"""One request, one sha256: on repeats, in other processes, between and beside other requests."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from sglang.multimodal_gen.runtime.pipelines.stages.checks import NonFiniteError
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=45, suite="base-a-test-cpu")

REQUEST = {
    "prompt": "a red apple",
    "seed": 42,
    "width": 64,
    "height": 64,
    "num_inference_steps": 2,
    "max_sequence_length": 64,
}
OTHERS = (
    {"width": 128, "height": 64},
    {"width": 64, "height": 96, "num_inference_steps": 3},
    {"prompt": "two dogs", "seed": 1, "guidance_scale": 7.0},
    {"negative_prompt": "blurry", "true_cfg_scale": 2.0, "max_sequence_length": 512},
    {"num_outputs_per_prompt": 3, "quality": "high"},
)
CHILD = """
import sys, torch
torch.set_num_threads(1)
from sglang.multimodal_gen import DiffGenerator
with DiffGenerator.from_pretrained(sys.argv[1], device="cpu", log_level="error") as generator:
    print(generator.generate(**eval(sys.argv[2])).report["sha256"])
"""


def sha(engine, **changes):
    return engine.generate(**{**REQUEST, **changes}).report["sha256"]


@pytest.fixture(scope="module")
def expected(engine):
    return sha(engine)


def test_ten_repeats_give_one_hash(engine, expected):
    assert {sha(engine) for _ in range(10)} == {expected}


@pytest.mark.parametrize("hash_seed", ["0", "1"])
def test_a_fresh_process_gives_the_same_hash(tiny_dev, expected, hash_seed):
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(tiny_dev), repr(REQUEST)],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [expected]


@pytest.mark.parametrize("other", OTHERS, ids=lambda other: "-".join(other))
def test_a_request_after_another_is_unchanged(engine, expected, other):
    engine.generate(**{**REQUEST, **other})
    assert sha(engine) == expected


def test_a_request_after_a_failed_one_is_unchanged(engine, expected):
    transformer = engine._worker.pipeline.transformer
    hook = transformer.proj_out.register_forward_hook(lambda *call: call[-1] * float("nan"))
    with pytest.raises(NonFiniteError):
        engine.generate(**REQUEST)
    hook.remove()
    assert sha(engine) == expected


def test_what_changes_the_picture_changes_the_hash(engine, expected):
    changes = (
        {"seed": 43},
        {"prompt": "a green apple"},
        {"guidance_scale": 7.0},
        {"num_inference_steps": 3},
        {"negative_prompt": "", "true_cfg_scale": 2.0},
        {"max_sequence_length": 32},
    )
    hashes = [sha(engine, **change) for change in changes]
    assert len({expected, *hashes}) == 1 + len(changes)


@pytest.mark.parametrize("count", [2, 3])
def test_image_i_of_a_batch_is_the_single_image_with_seed_plus_i(engine, count):
    batch = engine.generate(**REQUEST, num_outputs_per_prompt=count, return_frames=True)
    assert [result.seed for result in batch] == [42 + i for i in range(count)]
    for result in batch:
        single = engine.generate(**{**REQUEST, "seed": result.seed}, return_frames=True)
        assert np.array_equal(result.frames, single.frames)
        assert result.report["sha256"] == single.report["sha256"]
    assert len({result.report["sha256"] for result in batch}) == count


def test_a_prompt_in_a_list_gives_the_picture_it_gives_alone(engine):
    prompts = ["two dogs", "", "a red apple", "two dogs"]
    request = {k: v for k, v in REQUEST.items() if k not in ("prompt", "seed")}
    batch = engine.generate(prompts, seed=[5, 6, 5, 5], **request)
    alone = [engine.generate(r.prompt, seed=r.seed, **request) for r in batch]
    assert [r.prompt for r in batch] == prompts
    assert [r.report["sha256"] for r in batch] == [r.report["sha256"] for r in alone]
    assert batch[0].report["sha256"] == batch[3].report["sha256"]


def test_the_callers_global_state_neither_acts_nor_changes(engine, expected):
    torch.manual_seed(7)
    before = torch.get_rng_state()
    with torch.autocast("cpu", torch.bfloat16):
        assert sha(engine) == expected
    assert torch.equal(torch.get_rng_state(), before)
    torch.set_default_dtype(torch.float64)
    try:
        assert sha(engine) == expected
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
