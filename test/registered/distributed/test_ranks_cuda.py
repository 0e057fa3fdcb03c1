"""Two GPUs, NCCL: every layout's picture against one GPU's, and the loss of a rank in a step."""

import itertools
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sglang.multimodal_gen import DiffGenerator
from sglang.test.ci.ci_register import register_cuda_ci
from sglang.test.tiny_ernie import write_tiny_ernie
from sglang.test.tiny_glm import write_tiny_glm

register_cuda_ci(est_time=240, stage="base-b-2-gpu-test", runner_config="2-gpu-large")
pytestmark = pytest.mark.cuda(2)

LAYOUTS = {
    "cfg2": {"enable_cfg_parallel": True},
    "ulysses2": {"ulysses_degree": 2},
    "tp2": {"tp_size": 2},
}
SIZES = (
    {"width": 128, "height": 128},
    {"width": 144, "height": 112},
    {"width": 512, "height": 512},
)
LOST = """
import os, signal, threading, time
from sglang.multimodal_gen import DiffGenerator
from sglang.multimodal_gen.configs.sampling_params import SamplingParams
from sglang.multimodal_gen.runtime.distributed.launch import RankLost

generator = DiffGenerator.from_pretrained(num_gpus=2, enable_cfg_parallel={cfg}, device="cuda")
generator.generate("a fox", num_inference_steps=4, save_output=False)
(victim,) = generator._worker._ranks.pids

def stop(progress):
    if (progress.label, progress.done) == ("denoise 1/1", 2):
        os.kill(victim, signal.SIGSTOP)
        if {kill}:
            threading.Timer(1.0, os.kill, (victim, signal.SIGKILL)).start()

params = SamplingParams(prompt="a fox", num_inference_steps=40).resolve(generator._worker.spec)
start = time.monotonic()
try:
    generator._client.generate(params, stop)
except RankLost as error:
    print("LOST", time.monotonic() - start, str(error).splitlines()[0], flush=True)
    os._exit(0)  # the GPU may hold kernels that wait for a rank that is gone
os._exit(3)
"""


def pictures(folder=None, **settings):
    """Arrays and reports of the same requests by one generator."""
    asked = {"prompt": "a red apple", "seed": 5, "num_inference_steps": 6, "save_output": False}
    with DiffGenerator.from_pretrained(folder, device="cuda", **settings) as generator:
        return [
            generator.generate(return_frames=True, quality=quality, **asked, **size)
            for size, quality in itertools.product(SIZES, ("lossless", "high"))
        ]


def psnr_db(a, b):
    error = np.square(a.astype(float) - b.astype(float)).mean()
    return math.inf if error == 0 else 10 * math.log10(255**2 / error)


@pytest.fixture(scope="module")
def alone():
    return pictures()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_bundled_model_draws_what_one_gpu_draws(alone, layout):
    """cfg: the same bytes. Else bf16 rounds differently: how far is printed, and bounded."""
    found = pictures(num_gpus=2, **LAYOUTS[layout])
    assert {result.report["layout"] for result in found} == {layout}
    distances = [psnr_db(a.frames, b.frames) for a, b in zip(found, alone, strict=True)]
    print(layout, "PSNR in dB against one GPU:", [f"{d:.1f}" for d in distances])
    assert min(distances) > (1e9 if layout == "cfg2" else 25)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fused_sites_keep_the_bytes_of_their_layouts_eager_run(layout):
    fused, eager = (
        [r.report["sha256"] for r in pictures(num_gpus=2, fast_paths=on, **LAYOUTS[layout])[::2]]
        for on in (True, False)
    )
    assert fused == eager


@pytest.mark.parametrize("write", [write_tiny_ernie, write_tiny_glm])
@pytest.mark.parametrize("layout", ["cfg2", "ulysses2"])
def test_the_other_models_draw_what_one_gpu_draws(tmp_path, write, layout):
    extra = {"with_pe": False} if write is write_tiny_ernie else {}
    folder = write(tmp_path / "model", **extra)
    request = {"prompt": 'a sign "open"', "seed": 5, "num_inference_steps": 3} | {
        "width": 96,
        "height": 160,
        "save_output": False,
        "return_frames": True,
    }
    found = []
    for settings in ({}, {"num_gpus": 2, **LAYOUTS[layout]}):
        with DiffGenerator.from_pretrained(folder, device="cuda", **settings) as generator:
            found.append(generator.generate(**request).frames)
    assert psnr_db(*found) > (1e9 if layout == "cfg2" else 25)


@pytest.mark.parametrize("cfg", [True, False])
@pytest.mark.parametrize("kill", [True, False], ids=["killed", "stopped"])
def test_a_rank_lost_in_a_step_is_one_clear_error(cfg, kill):
    """In a process of its own: a watchdog of NCCL's would end it without a word."""
    import sglang

    paths = [str(Path(sglang.__path__[0]).parent), *sys.path]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "SGLANG_DIFFUSION_COLLECTIVE_TIMEOUT": "15",
    }
    script = LOST.format(cfg=cfg, kill=kill)
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("LOST")]
    assert ("ended with SIGKILL" if kill else "took longer than 15 s") in line
    assert float(line.split()[1]) < 45
