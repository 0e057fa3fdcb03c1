"""LoRA: what is added to which weight, what is refused by name, that it goes without a trace."""

import json

import pytest
import torch
from safetensors.torch import save_file

from sglang.multimodal_gen import DiffGenerator
from sglang.multimodal_gen.configs.server_args import ServerArgs
from sglang.multimodal_gen.configs.validation import InvalidParameter
from sglang.multimodal_gen.runtime.loader.weights import CheckpointError
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.tiny_checkpoints import write_tiny_flux

register_cpu_ci(est_time=25, suite="base-a-test-cpu")

ATTENTION = "transformer_blocks.0.attn.to_q"
MLP = "single_transformer_blocks.1.proj_mlp"
RANK = 2
REQUEST = {"width": 64, "height": 64, "num_inference_steps": 2, "max_sequence_length": 32}
PEFT = ("lora_A.weight", "lora_B.weight")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_flux(tmp_path_factory.mktemp("lora") / "dev", guidance_embeds=True)


@pytest.fixture(scope="module")
def loaded(folder):
    with DiffGenerator.from_pretrained(folder, device="cpu", log_level="warning") as generator:
        yield generator


@pytest.fixture
def engine(loaded):
    loaded.unmerge_lora()
    return loaded


def matrices(engine, module, seed=0):
    """down [RANK, in] and up [out, RANK] for a linear."""
    outputs, inputs = engine.transformer.get_submodule(module).weight.shape
    source = torch.Generator().manual_seed(seed)
    down = torch.randn(RANK, inputs, generator=source)
    return down, torch.randn(outputs, RANK, generator=source)


def write(path, engine, modules=(ATTENTION, MLP), prefix="transformer.", ends=PEFT, seed=0, **more):
    """A LoRA file; `more` are further tensors."""
    tensors = dict(more)
    for module in modules:
        pair = matrices(engine, module, seed)
        tensors |= {f"{prefix}{module}.{end}": part for end, part in zip(ends, pair, strict=True)}
    save_file(tensors, path)
    return path


def weight_of(engine, module):
    return engine.transformer.get_submodule(module).weight.clone()


def state(engine):
    return {name: tensor.clone() for name, tensor in engine.transformer.state_dict().items()}


def same(before, after):
    return all(torch.equal(before[name], after[name]) for name in before)


def sha(engine):
    return engine.generate("a", **REQUEST).report["sha256"]


def added(engine, module, scale, seed=0):
    down, up = matrices(engine, module, seed)
    return scale * (up @ down)


@pytest.mark.parametrize("prefix", ["transformer.", "", "base_model.model.", "diffusion_model."])
@pytest.mark.parametrize("ends", [
    PEFT,
    ("lora_A.default.weight", "lora_B.default.weight"),
    ("lora.down.weight", "lora.up.weight"),
])  # fmt: skip
def test_every_dialect_adds_the_same(engine, tmp_path, prefix, ends):
    before = weight_of(engine, ATTENTION)
    engine.set_lora("a", write(tmp_path / "a.safetensors", engine, prefix=prefix, ends=ends), 0.5)
    expected = before + added(engine, ATTENTION, 0.5)
    assert torch.equal(weight_of(engine, ATTENTION), expected)
    assert not torch.equal(before, expected)


def test_names_of_kohya_are_translated(engine, tmp_path):
    module = "transformer_blocks.0.attn.to_out.0"
    down, up = matrices(engine, module)
    name = "lora_unet_double_blocks_0_img_attn_proj"
    tensors = {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up}
    save_file(tensors | {f"{name}.alpha": torch.tensor(1.0)}, tmp_path / "k.safetensors")
    before = weight_of(engine, module)
    engine.set_lora("kohya", tmp_path / "k.safetensors")
    torch.testing.assert_close(
        weight_of(engine, module), before + added(engine, module, 1 / RANK), rtol=1e-6, atol=1e-6
    )

    stranger = {"lora_unet_foo.lora_down.weight": down.clone()}
    save_file(tensors | stranger, tmp_path / "s.safetensors")
    with pytest.raises(CheckpointError, match="lora_unet_foo"):
        engine.set_lora("stranger", tmp_path / "s.safetensors")


def alpha_as_tensors(file, engine):
    return write(
        file, engine, **{f"transformer.{m}.alpha": torch.tensor(8.0) for m in (ATTENTION, MLP)}
    )


def alpha_in_metadata(file, engine):
    tensors = {}
    for module in (ATTENTION, MLP):
        down, up = matrices(engine, module)
        tensors |= {f"transformer.{module}.lora_A.weight": down}
        tensors |= {f"transformer.{module}.lora_B.weight": up}
    settings = {"transformer.r": RANK, "transformer.lora_alpha": 8}
    save_file(tensors, file, metadata={"lora_adapter_metadata": json.dumps(settings)})
    return file


def alpha_beside(file, engine):
    write(file, engine)
    (file.parent / "adapter_config.json").write_text(json.dumps({"r": RANK, "lora_alpha": 8}))
    return file.parent


@pytest.mark.parametrize("alpha_of", [alpha_as_tensors, alpha_in_metadata, alpha_beside])
def test_alpha_acts(engine, tmp_path, alpha_of):
    before = weight_of(engine, MLP)
    engine.set_lora("a", alpha_of(tmp_path / "a.safetensors", engine))
    assert torch.equal(weight_of(engine, MLP), before + added(engine, MLP, 8 / RANK))


def test_what_is_taken_away_leaves_no_trace(engine, tmp_path):
    before, picture = state(engine), sha(engine)
    one = write(tmp_path / "1.safetensors", engine)
    two = write(tmp_path / "2.safetensors", engine, modules=[MLP], seed=1)
    engine.set_lora("one", one, strength=0.3)
    engine.set_lora("two", two, strength=-2)
    both, changed = state(engine), sha(engine)
    assert changed != picture and not same(before, both)
    engine.unmerge_lora()
    assert same(before, state(engine)) and sha(engine) == picture and engine.list_loras() == []
    engine.set_lora("two", two, strength=-2)
    engine.set_lora("one", one, strength=9)
    engine.set_lora("one", one, strength=0.3)  # replaces; the order does not matter
    assert same(both, state(engine)) and sha(engine) == changed
    engine.set_lora("one", one, strength=0)
    engine.set_lora("two", two, strength=0)
    assert same(before, state(engine))


def test_what_is_merged_is_shown(engine, tmp_path):
    path = write(tmp_path / "a.safetensors", engine)
    engine.set_lora("style", path, strength=0.7, target="transformer")
    expected = [{"nickname": "style", "path": str(path), "strength": 0.7, "weights": 2}]
    assert engine.list_loras() == expected
    assert engine.generate("a", **REQUEST).report["loras"] == expected


REFUSED = {
    "no LoRA tensors": ({}, CheckpointError),
    "unexpected something.weight": ({"something.weight": torch.ones(2)}, CheckpointError),
    "text_encoder.x is no linear layer": (
        {"text_encoder.x.lora_A.weight": torch.ones(2, 2)},
        CheckpointError,
    ),
    f"{ATTENTION} lacks one of its two": (
        {f"transformer.{ATTENTION}.lora_A.weight": torch.ones(2, 2)},
        CheckpointError,
    ),
    f"{ATTENTION} has shapes": (
        {f"transformer.{ATTENTION}.lora_{x}.weight": torch.ones(2, 2) for x in "AB"},
        CheckpointError,
    ),
    "norm_q is no linear layer": (
        {"transformer.transformer_blocks.0.attn.norm_q.lora_A.weight": torch.ones(2, 2)},
        CheckpointError,
    ),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_does_not_fit_is_refused_by_name_and_changes_nothing(engine, tmp_path, words):
    tensors, kind = REFUSED[words]
    before = state(engine)
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(kind, match=words):
        engine.set_lora("a", tmp_path / "a.safetensors")
    assert same(before, state(engine)) and engine.list_loras() == []


def test_paths_and_values_are_refused_by_name(engine, tmp_path):
    (tmp_path / "cut.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(CheckpointError, match="cut.safetensors"):
        engine.set_lora("a", tmp_path / "cut.safetensors")
    for path in (tmp_path / "none", tmp_path / "none.safetensors"):
        with pytest.raises(InvalidParameter, match="lora_path: got .*none"):
            engine.set_lora("a", path)
    path = write(tmp_path / "a.safetensors", engine)
    for values, name in (
        (("a", ""), "path"),
        ((3, path), "nickname"),
        (("a", path, float("nan")), "strength"),
        (("a", path, 1.0, "vae"), "target"),
    ):
        with pytest.raises(InvalidParameter, match=f"^{name}: got"):
            engine.set_lora(*values)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"use_rslora": True}))
    with pytest.raises(CheckpointError, match="use_rslora is not supported"):
        engine.set_lora("a", path)
    assert engine.list_loras() == []


def test_a_process_can_start_with_one(engine, folder, tmp_path):
    path = write(tmp_path / "a.safetensors", engine)
    engine.set_lora("a", path)
    asked = {"device": "cpu", "log_level": "warning", "lora_path": path}
    with DiffGenerator.from_pretrained(folder, **asked) as other:
        assert [lora["nickname"] for lora in other.list_loras()] == ["default"]
        assert sha(other) == sha(engine)
    with pytest.raises(RuntimeError, match="set_lora: this generator is closed"):
        other.set_lora("a", path)
    for conflict in ({"num_gpus": 2}, {"backend": "diffusers"}):
        with pytest.raises(InvalidParameter, match="^lora_path: got"):
            ServerArgs(lora_path=str(path), **conflict)
