"""Where text encoders live: flags first, then whether the weights fit."""

from types import SimpleNamespace

import pytest
import torch

from sglang.multimodal_gen import DiffGenerator
from sglang.multimodal_gen.configs.server_args import ServerArgs
from sglang.multimodal_gen.runtime.pipelines.residency import offloads_text_encoders
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.tiny_checkpoints import write_tiny_flux

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

GIB = 2**30


def loader(device, weight_gib):
    return SimpleNamespace(device=torch.device(device), weight_bytes=lambda: weight_gib * GIB)


@pytest.mark.parametrize(("free_gib", "offloads"), [(141, False), (41, False), (39, True)])
def test_auto_offloads_what_would_not_fit(monkeypatch, free_gib, offloads):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free_gib * GIB, 141 * GIB))
    assert offloads_text_encoders(ServerArgs(), loader("cuda", 34)) is offloads


@pytest.mark.parametrize(
    ("flags", "offloads"),
    [
        ({"performance_mode": "speed"}, False),
        ({"performance_mode": "memory"}, True),
        ({"performance_mode": "manual"}, False),
        ({"text_encoder_cpu_offload": True}, True),
        ({"text_encoder_cpu_offload": False}, False),
    ],
)
def test_flags_decide_before_memory_does(monkeypatch, flags, offloads):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 0))
    assert offloads_text_encoders(ServerArgs(**flags), loader("cuda", 34)) is offloads


def test_nothing_to_offload_to_on_a_cpu():
    assert offloads_text_encoders(ServerArgs(), loader("cpu", 34)) is False


def test_memory_mode_changes_no_pixel(tmp_path):
    write_tiny_flux(tmp_path, guidance_embeds=True)
    hashes = set()
    for mode in ("speed", "memory"):
        with DiffGenerator.from_pretrained(tmp_path, device="cpu", performance_mode=mode) as engine:
            result = engine.generate(prompt="x", width=64, height=64, num_inference_steps=2)
            hashes.add(result.report["sha256"])
    assert len(hashes) == 1
