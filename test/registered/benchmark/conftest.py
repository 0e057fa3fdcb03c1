"""The benches are scripts beside each other: their folder goes on the path, as they do it."""

import json
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "benchmark"))

FLOW_MATCH = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000}
FLUX_SCHEDULER = {"shift": 3.0, "use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15}
GLM_SCHEDULER = {"use_dynamic_shifting": True, "base_shift": 0.25, "max_shift": 0.75} | {
    "time_shift_type": "linear"
}


@pytest.fixture(scope="session")
def write_configs():
    """Writes what a dummy model needs: configs in diffusers layout, no weights."""

    def write(folder, pipeline_class, transformer, scheduler):
        files = {
            "model_index.json": {"_class_name": pipeline_class},
            "transformer/config.json": transformer,
            "vae/config.json": {"block_out_channels": [8, 8, 8, 8]},
            "scheduler/scheduler_config.json": FLOW_MATCH | scheduler,
        }
        for name, content in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(json.dumps(content))
        return folder

    return write


@pytest.fixture(scope="session")
def cases(write_configs, tmp_path_factory):
    """One tiny case a model, float32 on the CPU: model name -> DenoiseCase."""
    from denoise_arms import CaseSetup
    from denoise_ernie import ErnieDenoiseCase
    from denoise_flux import FluxDenoiseCase
    from denoise_glm import GlmDenoiseCase

    from sglang.test.tiny_checkpoints import transformer_config
    from sglang.test.tiny_ernie import ernie_transformer_config
    from sglang.test.tiny_glm import glm_transformer_config

    models = {
        "flux1-dev": (FluxDenoiseCase, "FluxPipeline", transformer_config(True), FLUX_SCHEDULER),
        "ernie-image": (
            ErnieDenoiseCase,
            "ErnieImagePipeline",
            ernie_transformer_config(),
            {"shift": 3.0},
        ),
        "glm-image": (GlmDenoiseCase, "GlmImagePipeline", glm_transformer_config(), GLM_SCHEDULER),
    }
    made = {}
    for name, (make, *configs) in models.items():
        folder = write_configs(tmp_path_factory.mktemp(name), *configs)
        setup = CaseSetup(folder, 96, 64, 3, torch.device("cpu"), torch.float32, "flash")
        made[name] = make(setup)
    return made
