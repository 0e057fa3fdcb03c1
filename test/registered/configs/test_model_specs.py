"""A checkpoint's row: told by its configs, changed by its own defaults, refused with reasons."""

import json

import pytest

from sglang.multimodal_gen.configs.model_specs import (
    BUNDLED_MODEL,
    DUMMY_CONFIGS,
    DUMMY_MODELS,
    local_model_folder,
    model_spec,
    read_model_spec,
)
from sglang.multimodal_gen.configs.sampling_params import SamplingParams
from sglang.multimodal_gen.configs.validation import InvalidParameter
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

VAE = {"block_out_channels": [8, 8, 8, 8]}


def spec(**overrides):
    return model_spec("FluxPipeline", transformer_config={}, vae_config=VAE, overrides=overrides)


def write_folder(root, index, transformer=None, vae=VAE):
    parts = {"transformer/config.json": transformer or {}, "vae/config.json": vae}
    for name, content in {"model_index.json": index, **parts}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(json.dumps(content))
    return root


def test_dev_and_schnell_differ_by_their_transformer_config_only(tmp_path):
    index = {"_class_name": "FluxPipeline"}
    dev = read_model_spec(write_folder(tmp_path / "schnell", index, {"guidance_embeds": True}))
    schnell = read_model_spec(write_folder(tmp_path / "dev", index, {"guidance_embeds": False}))
    assert (dev.num_inference_steps, dev.guidance_scale) == (50, 3.5)
    assert (schnell.num_inference_steps, schnell.has_guidance_embedding) == (4, False)


@pytest.mark.parametrize("blocks,multiple", [(1, 2), (2, 4), (4, 16), (5, 32)])
def test_the_size_multiple_follows_the_vae(blocks, multiple):
    vae = {"block_out_channels": [8] * blocks}
    row = model_spec("FluxPipeline", transformer_config={}, vae_config=vae)
    assert row.size_multiple == multiple
    with pytest.raises(InvalidParameter, match=f"a multiple of {multiple}"):
        SamplingParams(prompt="", width=64 + multiple // 2).fit(row)


def test_a_checkpoint_overrides_defaults():
    row = spec(width=128, height=128, num_inference_steps=20, max_sequence_length=64)
    assert (row.width, row.num_inference_steps, row.max_sequence_length) == (128, 20, 64)
    assert row.max_sequence_length_limit == 512 and row.negative_prompt is None


@pytest.mark.parametrize(
    "entry,has_one", [(None, 0), ([None, None], 0), ("pe", 0), (3, 0), (["transformers", "X"], 1)]
)
def test_the_prompt_enhancer_is_on_where_the_checkpoint_has_one(tmp_path, entry, has_one):
    for name in ("ErnieImagePipeline", "FluxPipeline"):
        index = {"_class_name": name, "pe": entry}
        row = read_model_spec(write_folder(tmp_path / name, index))
        has_one = has_one and name == "ErnieImagePipeline"
        assert (row.use_pe, row.has_prompt_enhancer) == (has_one, has_one)
        assert SamplingParams(prompt="").fit(row).use_pe == has_one
        if not has_one:
            with pytest.raises(InvalidParameter, match="use_pe: got True, expected False"):
                SamplingParams(prompt="", use_pe=True).fit(row)


def test_one_guidance_has_two_names_where_the_model_has_no_embedded_one():
    row = model_spec("ErnieImagePipeline", transformer_config={}, vae_config=VAE)
    for given in ({"guidance_scale": 0.0}, {"true_cfg_scale": 0.0}, {}):
        params = SamplingParams(prompt="", **given).resolve(row).resolve(row)
        scales = {params.guidance_scale, params.true_cfg_scale}
        assert scales == {0.0 if given else 4.0} and params.negative_prompt == ""
    row = row.with_overrides({"guidance_scale": 3})
    assert SamplingParams(prompt="").fit(row).true_cfg_scale == 3.0


def test_a_default_true_cfg_acts_against_the_empty_prompt(caplog):
    params = SamplingParams(prompt="a").resolve(spec(true_cfg_scale=2))
    assert (params.true_cfg_scale, params.negative_prompt) == (2.0, "")
    assert caplog.records == []


@pytest.mark.parametrize(
    "overrides,words",
    [
        ({"widht": 128}, "did you mean 'width'"),
        ({"prompt": "x"}, "unknown name"),
        ({"seed": 1}, "unknown name"),
        ({"width": 100}, "a multiple of 16"),
        ({"width": None}, "expected a value"),
        ({"true_cfg_scale": "3"}, "a finite number"),
        ({"max_sequence_length": 600}, "at most 512"),
    ],
)
def test_bad_overrides_are_refused_as_the_checkpoints_fault(overrides, words):
    with pytest.raises(InvalidParameter, match=words) as caught:
        spec(**overrides)
    assert caught.value.field == "model_path" and "_sglang_defaults" in str(caught.value)


def broken_folders(root):
    index = {"_class_name": "FluxPipeline"}
    (root / "empty").mkdir()
    yield root / "missing", "a folder that exists"
    yield root / "empty", "has no model_index.json"
    yield write_folder(root / "other", {"_class_name": "XPipeline"}), "class: .*FluxPipeline"
    yield write_folder(root / "nameless", {}), "class: .*FluxPipeline"
    yield write_folder(root / "list_name", {"_class_name": ["Flux"]}), "class: .*FluxPipeline"
    yield write_folder(root / "list", [1]), "a JSON object"
    yield write_folder(root / "vae", index, vae={}), "block_out_channels"
    yield write_folder(root / "defaults", index | {"_sglang_defaults": 3}), "_sglang_defaults"
    broken = write_folder(root / "broken", index)
    (broken / "model_index.json").write_bytes(b"\xff{")
    yield broken, "not valid JSON"
    partial = write_folder(root / "partial", index)
    (partial / "vae" / "config.json").unlink()
    yield partial, "vae has no config.json"


def test_broken_folders_say_what_is_wrong(tmp_path):
    for folder, words in broken_folders(tmp_path):
        with pytest.raises(InvalidParameter, match=words) as caught:
            read_model_spec(folder)
        assert caught.value.field == "model_path"


@pytest.mark.parametrize("name", ["with space", "ünï", "slash/", "link"])
def test_odd_local_paths_are_found(tmp_path, name):
    (tmp_path / name).mkdir()
    (tmp_path / "alias").symlink_to(tmp_path / name)
    for path in (f"{tmp_path}/{name}", f"{tmp_path}/alias"):
        assert local_model_folder(path).samefile(tmp_path / name)


def test_paths_and_hub_ids_are_told_apart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "file").touch()
    assert local_model_folder("black-forest-labs/FLUX.1-dev") is None
    for path in (
        "/no/such",
        "./x",
        "../x",
        "models/flux",
        "a b/c",
        "name",
        "a/b/c",
        "file",
        "~/x/",
    ):
        with pytest.raises(InvalidParameter, match="the folder does not exist|not a folder"):
            local_model_folder(path)


def test_names_of_shipped_configs():
    assert local_model_folder(None) == BUNDLED_MODEL
    for name in DUMMY_MODELS:
        assert local_model_folder(name, "dummy") == DUMMY_CONFIGS / name
        assert read_model_spec(DUMMY_CONFIGS / name).width == 1024
    with pytest.raises(InvalidParameter, match="did you mean 'FLUX.1-dev'"):
        local_model_folder("flux1-dev", "dummy")


def test_glm_image_guides_by_default_and_needs_sizes_of_its_prior():
    row = model_spec("GlmImagePipeline", transformer_config={}, vae_config=VAE)
    params = SamplingParams(prompt="a").resolve(row)
    assert (params.num_inference_steps, params.true_cfg_scale) == (30, 1.5)
    assert (params.negative_prompt, params.max_sequence_length) == ("", 2048)
    assert SamplingParams(prompt="a", guidance_scale=1).fit(row).true_cfg_scale == 1
    for size in (500, 1080, 1040):
        with pytest.raises(InvalidParameter, match="a multiple of 32"):
            SamplingParams(prompt="a", height=size).fit(row)
