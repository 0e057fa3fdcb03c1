"""Blocks whose weights visit the device in turns: the same bytes, and nothing readable between.

On the CPU the host copies and the two buffers are apart as on a GPU; only the streams are missing.
"""

import pytest
import torch
from torch import nn

from sglang.multimodal_gen import DiffGenerator
from sglang.multimodal_gen.configs.server_args import ServerArgs
from sglang.multimodal_gen.configs.validation import InvalidParameter
from sglang.multimodal_gen.runtime.layers.layerwise_offload import is_offloaded, offload_blocks
from sglang.multimodal_gen.runtime.layers.packed_projections import _joined
from sglang.multimodal_gen.runtime.pipelines.stages.denoising import DenoisingStage, mounted_tier
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.tiny_checkpoints import write_tiny_flux
from sglang.test.tiny_ernie import write_tiny_ernie
from sglang.test.tiny_glm import write_tiny_glm

register_cpu_ci(est_time=40, suite="base-a-test-cpu")
register_cuda_ci(est_time=60, stage="base-b-kernel-unit", runner_config="1-gpu-large")

CPU = torch.device("cpu")
WRITE = {
    "flux": lambda folder: write_tiny_flux(folder, guidance_embeds=True),
    "ernie": lambda folder: write_tiny_ernie(folder, with_pe=False),
    "glm": write_tiny_glm,
}
PICTURE = dict(prompt='a sign "open"', width=64, height=96, num_inference_steps=3, seed=4)


def pictures(generator):
    found = [generator.generate(**PICTURE, quality=quality) for quality in ("lossless", "high")]
    return [result.report["sha256"] for result in found]


@pytest.mark.parametrize("model", WRITE)
def test_the_picture_is_the_same(tmp_path, model):
    WRITE[model](tmp_path)
    with DiffGenerator.from_pretrained(tmp_path, device="cpu") as generator:
        expected = pictures(generator)
        transformer = generator.transformer
        before = sum(p.numel() for p in transformer.parameters())
        offload_blocks(transformer, CPU)
        assert pictures(generator) == expected
        assert is_offloaded(transformer)
        assert 0 < sum(p.numel() for p in transformer.parameters()) < before


@pytest.mark.cuda
@pytest.mark.parametrize("model", WRITE)
def test_the_picture_is_the_same_on_a_gpu(tmp_path, model):
    WRITE[model](tmp_path)
    found = []
    for offload in (False, True):
        settings = {"device": "cuda", "dit_layerwise_offload": offload}
        with DiffGenerator.from_pretrained(tmp_path, **settings) as generator:
            assert is_offloaded(generator.transformer) is offload
            found.append([generator.generate(**PICTURE).report["sha256"] for _ in range(3)])
    assert found[0] == found[1]


class Block(nn.Module):
    """Two projections of one input that are packed, and a scale of another dtype."""

    PACKED = (("a", "b"),)

    def __init__(self, width):
        super().__init__()
        self.a, self.b = nn.Linear(8, width), nn.Linear(8, width)
        self.scale = nn.Parameter(torch.randn(3, dtype=torch.float64))
        self.packed = None

    def forward(self, x):
        self.packed = _joined([self.a.weight, self.b.weight]) is not None
        if x.isnan().any():
            raise ValueError("a block that fails")
        return (self.a(x) + self.b(x)).sum() * self.scale.sum() + x


class Model(nn.Module):
    def __init__(self, *widths):
        super().__init__()
        self.into = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block(width) for width in widths)
        self.register_buffer("shift", torch.randn(8))
        self.requires_grad_(False)

    def forward(self, x):
        x = self.into(x) + self.shift
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("widths", [(4,), (4, 9), (9, 4, 5), (4, 4, 4, 4)])
def test_any_number_of_blocks_of_any_size(widths):
    model, x = Model(*widths), torch.randn(2, 8)
    expected = [model(x), model(2 * x)]
    offload_blocks(model, CPU)
    for _ in range(2):
        assert torch.equal(model(x), expected[0]) and torch.equal(model(2 * x), expected[1])
        assert all(block.packed for block in model.blocks)
        assert [p.numel() for p in model.blocks.parameters()] == [0] * 5 * len(widths)
    assert model.into.weight.numel() == 64


def test_blocks_in_another_order_and_after_a_failure():
    model, x = Model(4, 5, 6), torch.randn(2, 8)
    expected = [block(x) for block in model.blocks]
    offload_blocks(model, CPU)
    for index in (2, 0, 0, 1, 2, 1):
        assert torch.equal(model.blocks[index](x), expected[index])
    with pytest.raises(ValueError, match="a block that fails"):
        model.blocks[1](x * float("nan"))
    assert not any(p.numel() for p in model.blocks.parameters())
    assert torch.equal(model.blocks[1](x), expected[1])


def test_a_weight_read_outside_its_block_is_an_error_and_not_another_blocks():
    model = offload_blocks(Model(4, 4), CPU)
    model(torch.randn(2, 8))
    with pytest.raises(RuntimeError):
        torch.nn.functional.linear(torch.randn(2, 8), model.blocks[0].a.weight)


def test_layers_that_run_before_or_within_their_block_have_turns_of_their_own():
    model, x = Model(4, 5, 6), torch.randn(2, 8)
    expected = [model(x), model.blocks[1].a(x)]
    model.hoisted_layers = lambda: (module.a for module in model.blocks)
    hoisted, joint = model.blocks[1].a, model.blocks[1].b
    offload_blocks(model, CPU)
    assert torch.equal(hoisted(x), expected[1]) and not joint.weight.numel()
    assert torch.equal(model(x), expected[0])


def test_no_high_tier_no_lora_and_no_graph(tmp_path):
    write_tiny_flux(tmp_path, guidance_embeds=True)
    with DiffGenerator.from_pretrained(tmp_path, device="cpu") as generator:
        transformer = offload_blocks(generator.transformer, CPU)
        with pytest.raises(InvalidParameter, match="lora_path: .*dit_layerwise_offload"):
            generator.set_lora("style", tmp_path)
    with mounted_tier(transformer, "high") as mounted:
        assert all(mounted.values())
    stage = DenoisingStage(offload_blocks(Model(4), CPU), True, torch.device("cuda"))
    stage._graphs = None  # would be asked for the forward
    assert stage._forward(torch.ones(2, 8)).shape == (2, 8)


@pytest.mark.parametrize(
    "other",
    [
        {"device": "cpu"},
        {"num_gpus": 2},
        {"enable_torch_compile": True},
        {"regional_compile": True},
        {"lora_path": "x"},
    ],
)
def test_what_it_cannot_be_combined_with(other):
    with pytest.raises(InvalidParameter, match=f"dit_layerwise_offload: .*{next(iter(other))}"):
        ServerArgs(dit_layerwise_offload=True, **other)


def test_the_diffusers_backend_has_none():
    with pytest.raises(InvalidParameter, match="dit_layerwise_offload"):
        ServerArgs(dit_layerwise_offload=True, backend="diffusers", model_path="x")
