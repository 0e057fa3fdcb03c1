"""Which layouts are legal for a model, which is chosen, and what a refusal says."""

import itertools
import logging

import pytest

from sglang.multimodal_gen import DiffGenerator
from sglang.multimodal_gen.configs.model_specs import DUMMY_CONFIGS, read_json, read_model_spec
from sglang.multimodal_gen.configs.parallel_layout import (
    ModelTraits,
    ParallelLayout,
    choose_layout,
    explain,
    legal_layouts,
)
from sglang.multimodal_gen.configs.server_args import ServerArgs
from sglang.multimodal_gen.configs.validation import InvalidParameter
from sglang.multimodal_gen.runtime.managers import rank_launch
from sglang.multimodal_gen.runtime.managers.worker import resolve_device
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")


def traits(heads=24, pipeline_class="FluxPipeline", runs_cfg=False):
    return ModelTraits(pipeline_class=pipeline_class, heads=heads, runs_cfg=runs_cfg)


FLUX = traits()
ERNIE = traits(32, "ErnieImagePipeline", runs_cfg=True)


@pytest.mark.parametrize("heads", [1, 2, 3, 24, 32, 64])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8, 12])
def test_the_matrix_of_heads_and_degrees(ranks, heads):
    """Legal is exactly: the product fits, and every rank has whole heads."""
    found = {(x.cfg, x.ulysses, x.tp) for x in legal_layouts(ranks, traits(heads))}
    degrees = range(1, ranks + 1)
    expected = {
        (cfg, ulysses, tp)
        for cfg, ulysses, tp in itertools.product((1, 2), degrees, degrees)
        if cfg * ulysses * tp == ranks and heads % (ulysses * tp) == 0
    }
    assert found == expected
    without_tp = legal_layouts(ranks, traits(heads, "GlmImagePipeline"))
    assert {(x.cfg, x.ulysses, x.tp) for x in without_tp} == {x for x in expected if x[2] == 1}


@pytest.mark.parametrize("heads", [2, 24, 32])
@pytest.mark.parametrize("tp", [None, 1, 2, 3, 4])
@pytest.mark.parametrize("ulysses", [None, 1, 2, 3, 4])
@pytest.mark.parametrize("cfg", [None, False, True])
def test_every_combination_of_settings_is_obeyed_or_refused_by_name(cfg, ulysses, tp, heads):
    for ranks in (1, 2, 4, 6, 8):
        args = ServerArgs(
            num_gpus=ranks, tp_size=tp, ulysses_degree=ulysses, enable_cfg_parallel=cfg
        )
        legal = legal_layouts(ranks, traits(heads))
        fitting = [
            x
            for x in legal
            if tp in (None, x.tp) and ulysses in (None, x.ulysses) and cfg in (None, x.cfg > 1)
        ]
        if fitting:
            assert choose_layout(args, traits(heads)) == fitting[0]
        else:
            names = "num_gpus|tp_size|ulysses_degree|enable_cfg_parallel"
            with pytest.raises(InvalidParameter, match=rf"^({names}): got .*expected"):
                choose_layout(args, traits(heads))


@pytest.mark.parametrize(
    ("ranks", "flux", "ernie"),
    [
        (1, "single", "single"),
        (2, "ulysses2", "cfg2"),
        (4, "ulysses4", "cfg2+ulysses2"),
        (8, "ulysses8", "cfg2+ulysses4"),
    ],
)
def test_the_number_of_gpus_alone_picks_the_best_layout(ranks, flux, ernie):
    args = ServerArgs(num_gpus=ranks)
    assert str(choose_layout(args, FLUX)) == flux
    assert str(choose_layout(args, ERNIE)) == ernie


@pytest.mark.parametrize(
    ("settings", "model", "message"),
    [
        ({"num_gpus": 5}, FLUX, "num_gpus: got 5, expected one of 1, 2, 3, 4, 6, 8, 12, 16"),
        ({"num_gpus": 3}, ERNIE, "num_gpus: got 3, expected one of 1, 2, 4, 8, 16, 32, 64"),
        ({"num_gpus": 4, "tp_size": 3}, FLUX, "tp_size: got 3 with num_gpus=4, .*ulysses2.tp2"),
        ({"num_gpus": 2, "tp_size": 2}, ERNIE, "tp_size: got 2 .*is there for FluxPipeline"),
        ({"tp_size": 2}, FLUX, "tp_size: got 2 with num_gpus=1, .*: single "),
        (
            {"num_gpus": 4, "tp_size": 2, "ulysses_degree": 2, "enable_cfg_parallel": True},
            FLUX,
            "enable_cfg_parallel: got True with num_gpus=4, tp_size=2, ulysses_degree=2, expected",
        ),
    ],
)
def test_a_refusal_names_the_setting_and_what_is_legal(settings, model, message):
    with pytest.raises(InvalidParameter, match=f"^{message}"):
        choose_layout(ServerArgs(**settings), model)


def test_the_traits_of_the_shipped_configs():
    found = {}
    for name in ("FLUX.1-dev", "ERNIE-Image", "GLM-Image"):
        folder = DUMMY_CONFIGS / name
        config = read_json(folder / "transformer" / "config.json")
        found[name] = ModelTraits.of(read_model_spec(folder), config)
    assert {name: (t.heads, t.runs_cfg) for name, t in found.items()} == {
        "FLUX.1-dev": (24, False),
        "ERNIE-Image": (32, True),
        "GLM-Image": (32, True),
    }
    spec = read_model_spec(DUMMY_CONFIGS / "FLUX.1-dev")
    assert ModelTraits.of(spec, {}).heads == 24
    with pytest.raises(
        InvalidParameter, match="num_attention_heads: got '24', expected an integer"
    ):
        ModelTraits.of(spec, {"num_attention_heads": "24"})


def test_a_bad_layout_is_refused_before_anything_is_loaded(monkeypatch):
    monkeypatch.setattr(rank_launch, "RankProcesses", None)
    with pytest.raises(InvalidParameter, match="^ulysses_degree: got 3 with num_gpus=2"):
        DiffGenerator.from_pretrained(num_gpus=2, ulysses_degree=3, device="cpu")


@pytest.mark.parametrize(("name", "count"), [("auto", 0), ("cuda", 1)])
def test_more_ranks_than_gpus_are_refused(monkeypatch, name, count):
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    device = resolve_device("cpu") if count == 0 else type("Gpu", (), {"type": "cuda"})
    expected = f"^num_gpus: got 2, expected at most the {count} GPUs here; device='cpu' runs"
    with pytest.raises(InvalidParameter, match=expected):
        rank_launch.check_devices(ServerArgs(num_gpus=2, device=name), device)
    rank_launch.check_devices(ServerArgs(num_gpus=2, device="cpu"), resolve_device("cpu"))


def test_the_log_says_which_layout_and_why(caplog):
    folder = DUMMY_CONFIGS / "ERNIE-Image"
    with caplog.at_level(logging.INFO, logger="sglang"):
        rank_launch.find_layout(ServerArgs(num_gpus=4), read_model_spec(folder), folder)
    assert [r.getMessage() for r in caplog.records] == [
        "num_gpus=4: layout cfg2+ulysses2: prompt and negative prompt run side by side;"
        " the tokens are cut into 2 parts, attention by heads"
    ]
    assert "only requests with a negative prompt" in explain(ParallelLayout(cfg=2), FLUX)


def test_the_scope_of_exactness_is_said():
    assert ParallelLayout(cfg=2).exactness == "byte-equal to one rank"
    assert "byte-equal where" in ParallelLayout(cfg=2, ulysses=2).exactness
    assert ParallelLayout(tp=2, ulysses=2).exactness.startswith("bounded")
