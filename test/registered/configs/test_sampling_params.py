"""A request is checked once: what is accepted, what is refused and how the refusal reads."""

import pickle
import time
from pathlib import Path

import numpy as np
import pytest

from sglang.multimodal_gen.configs.model_specs import model_spec
from sglang.multimodal_gen.configs.sampling_params import MAX_SEED, SamplingParams
from sglang.multimodal_gen.configs.validation import InvalidParameter, show
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

VAE = {"block_out_channels": [128, 256, 512, 512]}
DEV = model_spec("FluxPipeline", transformer_config={"guidance_embeds": True}, vae_config=VAE)
SCHNELL = model_spec("FluxPipeline", transformer_config={}, vae_config=VAE)

REFUSED = {
    "prompt": [None, 3, b"x", [], ["a", None], [["a"]], {"a": 1}, "\ud800", "x" * 70000],
    "negative_prompt": [3, ["a"], "\udfff"],
    "width": [0, -16, 15, 8193, 10**5000, 64.0, "64", True, float("nan"), [64], np.float32(64)],
    "height": [0, -16, 15, 100000, "x", False],
    "num_inference_steps": [0, -1, 10**9, 1001, "x", 4.0, True],
    "guidance_scale": [float("nan"), float("inf"), -0.1, 101, "3.5", True, 10**400, 1j],
    "true_cfg_scale": [float("nan"), -1, "x", [1.0]],
    "seed": [-1, MAX_SEED + 1, 1.5, "x", True, None, [], [-1], [True], [1, 2]],
    "num_outputs_per_prompt": [0, -1, 65, 1000, None, 1.0, True],
    "quality": ["", "ultra", "LOSSLESS", None, 1, ["high"]],
    "generator_device": ["gpu", None, 0],
    "max_sequence_length": [0, -1, 4097, "x", 1.0],
    "use_pe": [0, "yes", [True]],
    "image": [3, "", "a\0b", "no/such/file", b"", b"x", [], [None], {"a": 1}, True],
    "strength": [0, -0.5, 1.01, float("nan"), "0.5", True],
    "output_path": ["", " ", "a\0b", b"out", 3, None, "x" * 256],
    "output_file_name": ["", "..", ".hidden", "../x", "/etc/x", "a/b", "a\\b", "a\0b", "a\nb"],
    "save_output": [1, "yes", None],
    "output_format": ["gif", "PNG", None, 1],
    "output_compression": [-1, 101, 50.0, True],
    "return_frames": [1, None],
    "profile": ["on"],
    "num_profiled_timesteps": [0, None, 1001],
}
REFUSED["output_file_name"] += ["x" * 201, "é" * 101, 3, "a.jpg", "a.webp", " "]
CASES = [(field, value) for field, values in REFUSED.items() for value in values]


@pytest.mark.parametrize("field,value", CASES, ids=lambda case: ascii(show(case))[:30])
def test_a_bad_value_is_refused_by_name_without_a_long_echo(field, value):
    with pytest.raises(InvalidParameter) as caught:
        SamplingParams(**{"prompt": "a", field: value})
    message = str(caught.value)
    assert caught.value.field == field and message.startswith(field)
    assert "expected" in message and len(message) < 300 and "\n" not in message


def test_every_field_has_refused_values():
    assert set(REFUSED) == set(SamplingParams.__dataclass_fields__)


@pytest.mark.parametrize(
    "field,value",
    [
        ("prompt", ""),
        ("prompt", "красное яблоко 🍎"),
        ("negative_prompt", ""),
        ("seed", 0),
        ("seed", MAX_SEED),
        ("guidance_scale", 0.0),
        ("true_cfg_scale", 0.0),
        ("output_compression", 0),
        ("output_file_name", "v1.2 draft"),
        ("output_file_name", "é" * 100),
    ],
)
def test_zero_and_empty_are_values_of_their_own(field, value):
    params = SamplingParams(**{"prompt": "a", field: value}).fit(DEV)
    assert getattr(params, field) == value


def test_numpy_and_path_values_become_plain_ones():
    params = SamplingParams(
        prompt="a", width=np.int64(64), guidance_scale=np.float32(2), output_path=Path("o")
    )
    assert [type(v) for v in (params.width, params.guidance_scale)] == [int, float]
    assert params.output_path == "o"


def test_missing_prompt_is_refused():
    with pytest.raises(InvalidParameter, match="prompt: got None"):
        SamplingParams()


@pytest.mark.parametrize(
    "key,near", [("widht", "width"), ("steps_inference", None), ("sed", "seed")]
)
def test_an_unknown_keyword_names_the_nearest(key, near):
    with pytest.raises(InvalidParameter, match=f"'{near}'" if near else "unknown parameter") as e:
        SamplingParams.from_kwargs(prompt="a", **{key: 1})
    assert e.value.field == key


def test_a_huge_size_is_refused_in_under_100_ms():
    begin = time.perf_counter()
    for size in ({"width": 100000, "height": 100000}, {"width": 8192, "height": 8192}):
        with pytest.raises(InvalidParameter, match="8192"):
            SamplingParams(prompt="a", **size)
    assert time.perf_counter() - begin < 0.1


def test_errors_survive_pickling():
    with pytest.raises(InvalidParameter) as caught:
        SamplingParams(prompt=["a", 1])
    copy = pickle.loads(pickle.dumps(caught.value))
    assert str(copy) == "prompt[1]: got 1, expected a text" and copy.field == "prompt"


@pytest.mark.parametrize("given,tier", [("exact", "lossless"), ("extra-high", "high")])
def test_quality_aliases_are_normalised(given, tier):
    assert SamplingParams(prompt="a", quality=given).quality == tier


def test_expand_keeps_prompt_order_and_counts_seeds_over_the_whole_request():
    requests = SamplingParams(prompt=["a", "b"], num_outputs_per_prompt=2, seed=7).expand()
    assert [(r.index, r.prompt, r.seed) for r in requests] == [
        (0, "a", 7),
        (1, "a", 8),
        (2, "b", 9),
        (3, "b", 10),
    ]


def test_expand_uses_a_seed_list_as_given_zero_included():
    requests = SamplingParams(prompt=["a", "b"], seed=[0, 5], negative_prompt="").expand()
    assert [(r.seed, r.negative_prompt) for r in requests] == [(0, ""), (5, "")]
    assert [r.seed for r in SamplingParams(prompt="a", seed=0).expand()] == [0]


def test_the_last_seed_must_fit_and_images_are_bounded():
    assert SamplingParams(prompt="a", seed=MAX_SEED - 1, num_outputs_per_prompt=2).num_images == 2
    with pytest.raises(InvalidParameter, match="seed: "):
        SamplingParams(prompt="a", seed=MAX_SEED, num_outputs_per_prompt=2)
    with pytest.raises(InvalidParameter, match="5 prompts x 64 pictures"):
        SamplingParams(prompt=["a"] * 5, num_outputs_per_prompt=64)


def test_model_defaults_fill_what_was_not_asked():
    dev, schnell = (SamplingParams(prompt="a").fit(spec) for spec in (DEV, SCHNELL))
    assert (dev.width, dev.height, dev.num_inference_steps) == (1024, 1024, 50)
    assert (dev.guidance_scale, dev.true_cfg_scale, dev.max_sequence_length) == (3.5, 1.0, 512)
    assert (schnell.num_inference_steps, schnell.max_sequence_length) == (4, 256)


@pytest.mark.parametrize(
    "field,value,text",
    [
        ("height", 1080, "a multiple of 16 for this model; use 1072 or 1088"),
        ("width", 17, "use 16 or 32"),
        ("width", 8191, "use 8176 or 8192"),
        ("max_sequence_length", 513, "at most 512 for this model"),
    ],
)
def test_a_model_limit_is_named_with_the_nearest_valid_values(field, value, text):
    params = SamplingParams(**{"prompt": "a", field: value})
    with pytest.raises(InvalidParameter, match=text) as caught:
        params.resolve(DEV)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "spec,given,words",
    [
        (SCHNELL, {"guidance_scale": 3.5}, "no guidance embedding"),
        (DEV, {"negative_prompt": "blur"}, "negative_prompt has no effect at true_cfg_scale=1.0"),
        (DEV, {"negative_prompt": "", "true_cfg_scale": 1.0}, "negative_prompt has no effect"),
        (DEV, {"true_cfg_scale": 4.0}, "without negative_prompt"),
        (DEV, {"output_compression": 50}, "no effect on png"),
        (DEV, {"output_file_name": "x"}, "without save_output=True"),
        (DEV, {"output_path": "x"}, "without save_output=True"),
        (DEV, {"num_profiled_timesteps": 3}, "without profile=True"),
    ],
)
def test_a_parameter_that_cannot_act_gives_one_warning(spec, given, words, caplog):
    caplog.set_level("WARNING", logger="sglang")
    SamplingParams(prompt="a", **given).resolve(spec)
    assert [words in record.message for record in caplog.records] == [True]


@pytest.mark.parametrize(
    "spec,given",
    [
        (DEV, {}),
        (SCHNELL, {"guidance_scale": 0.0}),
        (DEV, {"guidance_scale": 0.0}),
        (DEV, {"negative_prompt": "", "true_cfg_scale": 2.0}),
        (DEV, {"output_compression": 5, "output_format": "jpeg"}),
    ],
)
def test_no_warning_when_everything_acts(spec, given, caplog):
    caplog.set_level("WARNING", logger="sglang")
    SamplingParams(prompt="a", **given).resolve(spec).resolve(spec)
    assert caplog.records == []
