"""Weights cut over ranks: names and full shapes are the checkpoint's, sums those of one rank."""

import pytest
import torch

from sglang.multimodal_gen.runtime.distributed.tensor_parallel import (
    Part,
    RowParallelLinear,
    column_parallel,
    full_shape,
    local_part,
)
from sglang.multimodal_gen.runtime.layers.attention import AttentionBackend
from sglang.multimodal_gen.runtime.loader.dummy import fill_random
from sglang.multimodal_gen.runtime.loader.weights import CheckpointError, load_strict
from sglang.multimodal_gen.runtime.models.dits import flux
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.thread_axis import on_every_rank
from sglang.test.tiny_checkpoints import fill_at_unit_scale, transformer_config

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

CPU = torch.device("cpu")


def build(tp=flux.WHOLE_WEIGHTS):
    config = transformer_config(True, heads=4)
    params = flux.FluxParams(**config)
    return flux.FluxTransformer2DModel(params, AttentionBackend("flash"), tp)


@pytest.fixture(scope="module")
def whole():
    model = build()
    fill_at_unit_scale(model, 3)
    return model


def test_a_part_takes_its_share_of_every_section():
    full = torch.arange(12.0).expand(2, 12)
    parts = [Part(1, (4, 8), rank, 2).of(full)[0].tolist() for rank in (0, 1)]
    assert parts == [[0, 1, 4, 5, 6, 7], [2, 3, 8, 9, 10, 11]]


@pytest.mark.parametrize("ranks", [2, 4])
def test_names_and_full_shapes_are_the_checkpoints(whole, ranks):
    expected = {name: p.shape for name, p in whole.named_parameters()}

    def run(axis):
        model = build(axis)
        cut = [p for p in model.parameters() if full_shape(p) != p.shape]
        # q, k, v of two streams, two outputs, two MLPs; then q, k, v and the MLP of a single block
        assert len(cut) == 2 * (12 + 2 + 6) + 2 * (6 + 3)
        return {name: full_shape(p) for name, p in model.named_parameters()}

    assert on_every_rank(ranks, run) == [expected] * ranks


@pytest.mark.parametrize("ranks", [2, 4])
def test_loading_takes_the_slices_and_refuses_what_does_not_fit(whole, ranks):
    weights = whole.state_dict()

    def run(axis):
        model = build(axis)
        load_strict(model, iter(weights.items()), "here")
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, local_part(parameter, weights[name])), name
        name = "transformer_blocks.0.ff.net.2.weight"
        shape = r"has shape \[64, 128\], expected \[64, 256\]"
        with pytest.raises(CheckpointError, match=f"{name} {shape}"):
            load_strict(model, iter([(name, weights[name][:, :128])]), "here")
        return {name: p for name, p in model.named_parameters()}

    parts = on_every_rank(ranks, run)
    name = "transformer_blocks.0.attn.to_q.weight"
    assert torch.equal(torch.cat([p[name] for p in parts]), weights[name])


def test_random_weights_are_slices_of_one_ranks():
    expected = build()
    fill_random(expected, CPU)
    expected = dict(expected.named_parameters())

    def run(axis):
        model = build(axis)
        fill_random(model, CPU)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, local_part(parameter, expected[name])), name

    on_every_rank(2, run)


@pytest.mark.parametrize("ranks", [2, 4])
def test_linears_and_feed_forward_equal_one_ranks(whole, ranks):
    x = torch.randn(2, 7, 64, generator=torch.Generator().manual_seed(1))
    linear, feed_forward = whole.transformer_blocks[0].attn.to_q, whole.transformer_blocks[0].ff
    weights = feed_forward.state_dict()

    def run(axis):
        columns, rows = column_parallel(linear, axis), RowParallelLinear(linear, axis)
        for cut in (columns, rows):
            load_strict(cut, iter(linear.state_dict().items()), "here")
        parallel = flux.FluxParallelFeedForward(64, axis)
        assert isinstance(parallel.net[0], flux.FluxGELU)
        load_strict(parallel, iter(weights.items()), "here")
        own = x.chunk(ranks, dim=-1)[axis.rank]
        return columns(x), rows(own), parallel(x)

    found = on_every_rank(ranks, run)
    assert torch.equal(torch.cat([columns for columns, *_ in found], dim=-1), linear(x))
    for _, rows, fed in found:
        torch.testing.assert_close(rows, linear(x), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(fed, feed_forward(x), rtol=1e-5, atol=1e-5)
        assert torch.equal(rows, found[0][1]) and torch.equal(fed, found[0][2])


def test_one_rank_has_the_plain_modules():
    block = build().transformer_blocks[0]
    assert type(block.ff) is flux.FluxFeedForward and type(block.attn.to_q) is torch.nn.Linear
    assert type(block.attn.to_out[0]) is torch.nn.Linear
    assert not any(hasattr(p, "part") for p in block.parameters())
