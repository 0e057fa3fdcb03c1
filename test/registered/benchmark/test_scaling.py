"""The exchange bench on processes of the CPU, and the model that computes from its rows."""

import bench_collectives
import collective_rank
import pytest
import scaling_model
from collective_rank import Shapes
from scaling_model import HOST_MS, Exchanges, step_ms

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

NOTHING_MEASURED = Exchanges({})


def test_every_exchange_is_timed_by_all_ranks(monkeypatch):
    monkeypatch.setattr(collective_rank, "RUNS", 2)
    monkeypatch.setattr(collective_rank, "WARM", 58)  # the other rank makes 60 calls as well
    models = {"tiny": Shapes((3, 5), 4, 8, (1, 8, 2))}
    rows = bench_collectives.run(2, models, on_gpu=False)
    assert [(row.op, row.shape) for row in rows] == [
        ("exchange", [1, 5, 4, 8]),
        ("add_up", [1, 8, 32]),
        ("guidance", [1, 8, 2]),
    ]
    # half of q, k, v and the output, of 2 bytes each, goes to the other rank
    assert rows[0].mb_sent == pytest.approx(4 * 5 * 32 * 2 / 2 / 1e6)
    assert all(row.us > 0 and row.gbps == pytest.approx(1e3 * row.mb_sent / row.us) for row in rows)


def test_a_step_is_shared_out_and_exchanges_are_added():
    measured = Exchanges(
        {("flux1-dev", "exchange", 2): 100.0, ("ernie-image", "guidance", 2): 50.0}
    )
    assert step_ms("flux1-dev", 120.0, 1, measured) == ("single", 120.0)
    layout, ms = step_ms("flux1-dev", 240.0, 2, measured)
    assert layout == "ulysses2" and ms == pytest.approx(120 + 57 * 0.1)
    layout, ms = step_ms("ernie-image", 200.0, 2, measured)
    assert layout == "cfg2" and ms == pytest.approx(200 * 4216 / 8313 + 0.05)
    layout, _ = step_ms("glm-image", 200.0, 8, NOTHING_MEASURED)
    assert layout == "cfg2+ulysses4"


def test_a_cut_forward_is_never_faster_than_its_launches():
    assert step_ms("flux1-dev", 120.0, 2, NOTHING_MEASURED)[1] == pytest.approx(57 * HOST_MS)
    assert step_ms("flux1-dev", 120.0, 1, NOTHING_MEASURED)[1] == 120.0


@pytest.mark.parametrize("name", scaling_model.MODELS)
def test_more_gpus_are_faster_but_never_more_than_in_proportion(name):
    times = [step_ms(name, 150.0, n, NOTHING_MEASURED)[1] for n in (1, 2, 4, 8)]
    assert times == sorted(times, reverse=True)
    assert all(150.0 / ms <= n for ms, n in zip(times, (1, 2, 4, 8), strict=True))


def test_the_layouts_are_those_that_the_engine_picks():
    from sglang.multimodal_gen.configs.model_specs import (
        DUMMY_CONFIGS,
        read_json,
        read_model_spec,
    )
    from sglang.multimodal_gen.configs.parallel_layout import ModelTraits, choose_layout
    from sglang.multimodal_gen.configs.server_args import ServerArgs

    folders = {"flux1-dev": "FLUX.1-dev", "ernie-image": "ERNIE-Image", "glm-image": "GLM-Image"}
    for name, folder in folders.items():
        config = read_json(DUMMY_CONFIGS / folder / "transformer" / "config.json")
        traits = ModelTraits.of(read_model_spec(DUMMY_CONFIGS / folder), config)
        for ranks in (1, 2, 4, 8):
            picked = str(choose_layout(ServerArgs(num_gpus=ranks), traits))
            assert step_ms(name, 100.0, ranks, NOTHING_MEASURED)[0] == picked


def test_the_tables_of_the_document_are_printed():
    lines = scaling_model.table().splitlines() + scaling_model.throughput_table().splitlines()
    assert len(lines) == 2 * (2 + 3 * 4)
    assert any("ulysses8" in line for line in lines) and any("8 x 1" in line for line in lines)


def test_parts_of_rows_and_heads_are_compared_with_the_whole():
    import row_split
    import torch
    from row_split import split_attention, split_linear

    from sglang.multimodal_gen.runtime.layers.attention import AttentionBackend

    cpu = torch.device("cpu")
    rows = [*split_linear("tiny", (64, 32, 48), True, cpu)]
    rows += split_attention("tiny", (10, 8, 16), cpu, AttentionBackend("math"))
    assert [(row.op, row.ranks) for row in rows] == [
        (op, ranks) for op in ("linear", "attention") for ranks in (2, 4, 8)
    ]
    for row in rows:
        assert row.equal == (row.wrong_ppm == 0) == (row.largest_error == 0)
    assert {shape for shape, _ in row_split.linears("flux1-dev")} > {(4608, 15360, 3072)}
    assert all(len(list(row_split.linears(model))) >= 10 for model in row_split.ATTENTIONS)
