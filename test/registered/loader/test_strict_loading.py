"""A checkpoint is loaded whole or refused, with the names of what is wrong."""

import json
import re
import shutil
import socket
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang.multimodal_gen import DiffGenerator
from sglang.multimodal_gen.configs.validation import InvalidParameter
from sglang.multimodal_gen.runtime.loader.component_loader import params_from_config
from sglang.multimodal_gen.runtime.loader.dummy import fill_random
from sglang.multimodal_gen.runtime.loader.weights import CheckpointError, load_strict
from sglang.multimodal_gen.runtime.models.dits.flux import FluxParams
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.tiny_checkpoints import write_tiny_flux

register_cpu_ci(est_time=35, suite="base-a-test-cpu")

COMPONENTS = ("transformer", "text_encoder", "text_encoder_2", "vae")
# One matrix of each component, and its shape.
TENSORS = {
    "transformer": ("transformer_blocks.1.attn.to_add_out.weight", [64, 64]),
    "text_encoder": ("encoder.layers.1.mlp.fc1.weight", [64, 32]),
    "text_encoder_2": ("encoder.block.1.layer.1.DenseReluDense.wi_1.weight", [64, 32]),
    "vae": ("decoder.mid_block.attentions.0.to_q.weight", [16, 16]),
}
MISFIT = "the weights do not fit the model"
GUIDANCE = "time_text_embed.guidance_embedder.linear_1.weight"


@pytest.fixture(scope="session")
def pristine(tmp_path_factory):
    return write_tiny_flux(tmp_path_factory.mktemp("tiny") / "one", guidance_embeds=True)


@pytest.fixture(scope="session")
def pristine_shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "shards"
    return write_tiny_flux(folder, guidance_embeds=True, max_shard_size="60KB")


@pytest.fixture
def folder(pristine, tmp_path):
    """A copy to break."""
    return Path(shutil.copytree(pristine, tmp_path / "model"))


@pytest.fixture
def shards(pristine_shards, tmp_path):
    """A copy whose components are each several files with an index."""
    return Path(shutil.copytree(pristine_shards, tmp_path / "model"))


def load(path, **options):
    return DiffGenerator.from_pretrained(path, device="cpu", log_level="error", **options)


def picture(generator):
    request = {"width": 64, "height": 64, "num_inference_steps": 1, "max_sequence_length": 16}
    return generator.generate("a red apple", **request).report["sha256"]


def weight_file(folder, component):
    (path,) = (folder / component).glob("*.safetensors")
    return path


def edit(folder, component, change):
    """Rewrite a component's file after `change(tensors)`."""
    path = weight_file(folder, component)
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def refusal(path, **options):
    with pytest.raises(ValueError) as caught:
        load(path, **options)
    return str(caught.value)


@pytest.mark.parametrize("component", COMPONENTS)
class TestTensors:
    def test_deleted(self, folder, component):
        name, _ = TENSORS[component]
        edit(folder, component, lambda tensors: tensors.pop(name))
        assert refusal(folder).endswith(f"{component}: {MISFIT}: missing {name}")

    def test_renamed(self, folder, component):
        name, _ = TENSORS[component]
        edit(folder, component, lambda t: t.update({"other.weight": t.pop(name)}))
        message = refusal(folder)
        assert f"missing {name}" in message and "unexpected other.weight" in message

    def test_added(self, folder, component):
        edit(folder, component, lambda tensors: tensors.update(extra=torch.zeros(2)))
        assert refusal(folder).endswith(f"{component}: {MISFIT}: unexpected extra")

    @pytest.mark.parametrize("shape", [[3, 5], [64], [64, 64, 1]])
    def test_reshaped(self, folder, component, shape):
        name, right = TENSORS[component]
        edit(folder, component, lambda tensors: tensors.update({name: torch.zeros(shape)}))
        assert refusal(folder).endswith(f"{MISFIT}: {name} has shape {shape}, expected {right}")


@pytest.mark.parametrize("component", COMPONENTS)
class TestFiles:
    def test_truncated(self, folder, component):
        path = weight_file(folder, component)
        path.write_bytes(path.read_bytes()[:-100])
        assert refusal(folder).startswith(f"{path}: got a corrupt or truncated file")

    @pytest.mark.parametrize("content", [b"", b"garbage " * 50], ids=["empty", "garbage"])
    def test_corrupt(self, folder, component, content):
        path = weight_file(folder, component)
        path.write_bytes(content)
        assert refusal(folder).startswith(f"{path}: got a corrupt or truncated file")

    def test_missing(self, folder, component):
        weight_file(folder, component).unlink()
        assert f"{folder / component}: got no *.safetensors file" in refusal(folder)

    def test_folder_missing(self, folder, component):
        shutil.rmtree(folder / component)
        assert f"{folder / component} has no config.json" in refusal(folder)

    @pytest.mark.parametrize("content", ["{", "[]", "\xff"])
    def test_config_unreadable(self, folder, component, content):
        path = folder / component / "config.json"
        path.write_bytes(content.encode("latin-1"))
        assert refusal(folder).startswith("model_path: ") and str(path) in refusal(folder)

    def test_shard_missing(self, shards, component):
        lost = sorted((shards / component).glob("*-00002-of-*"))[0]
        lost.unlink()
        assert f"names files that {shards / component} lacks: ['{lost.name}']" in refusal(shards)

    def test_shard_truncated(self, shards, component):
        path = sorted((shards / component).glob("*-00002-of-*"))[0]
        path.write_bytes(path.read_bytes()[:-10])
        assert refusal(shards).startswith(f"{path}: got a corrupt or truncated file")

    @pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": 3}'])
    def test_index_unreadable(self, shards, component, content):
        (path,) = (shards / component).glob("*.index.json")
        path.write_text(content)
        assert refusal(shards).startswith(f"{path}: got an unreadable index")


@pytest.mark.parametrize("name", ["tokenizer", "tokenizer_2"])
class TestTokenizers:
    @pytest.mark.parametrize("lost", ["folder", "file"])
    def test_missing(self, folder, name, lost):
        """The library would make up a tokenizer that knows no word."""
        path = folder / name
        shutil.rmtree(path) if lost == "folder" else (path / "tokenizer.json").unlink()
        assert refusal(folder).startswith(f"{path}: got no tokenizer, expected one of the files")

    @pytest.mark.parametrize("content", ["{", "[]", "{}"])
    def test_corrupt(self, folder, name, content):
        (folder / name / "tokenizer.json").write_text(content)
        assert refusal(folder).startswith(f"{folder / name}: cannot load ")


class TestModelFolder:
    def test_missing(self, tmp_path):
        assert "the folder does not exist" in refusal(tmp_path / "nowhere")

    def test_a_file(self, folder):
        assert "expected an existing folder" in refusal(folder / "model_index.json")

    def test_no_index(self, folder):
        (folder / "model_index.json").unlink()
        assert f"{folder} has no model_index.json" in refusal(folder)

    def test_unknown_pipeline_class(self, folder):
        (folder / "model_index.json").write_text('{"_class_name": "StableDifusionPipeline"}')
        message = refusal(folder)
        assert "got 'StableDifusionPipeline', expected a pipeline class of diffusers" in message
        message = refusal(folder, backend="sglang")
        assert "got 'StableDifusionPipeline'" in message and "FluxPipeline" in message

    def test_no_scheduler(self, folder):
        shutil.rmtree(folder / "scheduler")
        assert "has no scheduler_config.json" in refusal(folder)

    def test_unknown_option_of_the_scheduler(self, folder):
        path = folder / "scheduler" / "scheduler_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "use_karras_sigmas": True}))
        assert "use_karras_sigmas=True" in refusal(folder)

    def test_unknown_option_of_the_transformer(self, folder):
        path = folder / "transformer" / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "use_moe": True}))
        assert "options this model lacks: ['use_moe']" in refusal(folder)

    def test_unknown_keyword(self, folder):
        message = refusal(folder, atention_backend="math")
        assert "did you mean 'attention_backend'" in message


def test_a_guidance_embedder_is_neither_dropped_nor_made_up(folder):
    config = folder / "transformer" / "config.json"
    dev = config.read_text()
    config.write_text(json.dumps({**json.loads(dev), "guidance_embeds": False}))
    assert f"unexpected {GUIDANCE}" in refusal(folder)
    config.write_text(dev)
    edit(folder, "transformer", lambda tensors: tensors.pop(GUIDANCE))
    assert refusal(folder).endswith(f"missing {GUIDANCE}")


def test_a_second_copy_of_the_weights_is_refused(folder):
    path = weight_file(folder, "transformer")
    shutil.copy(path, path.with_name("again.safetensors"))
    message = refusal(folder)
    assert "duplicate context_embedder.bias" in message and re.search(r"and \d+ more$", message)


def test_every_problem_is_listed_and_the_errors_are_value_errors():
    module = torch.nn.Linear(2, 3)
    weights = {"bias": torch.zeros(4), "other": torch.zeros(1)}
    with pytest.raises(CheckpointError) as caught:
        load_strict(module, iter(weights.items()), "here")
    assert str(caught.value) == (
        f"here: {MISFIT}: bias has shape [4], expected [3]; unexpected other; missing weight"
    )
    assert issubclass(CheckpointError, ValueError) and issubclass(InvalidParameter, ValueError)


def test_config_lists_become_tuples():
    params = params_from_config(FluxParams, {"_class_name": "x", "axes_dims_rope": [8, 12, 12]})
    assert params.axes_dims_rope == (8, 12, 12)


@pytest.mark.parametrize("where", ["with spaces", "ünïcödé 漢字 🍎", "100%", "a'b\"c"])
def test_any_folder_name_loads(pristine, tmp_path, where):
    with load(pristine) as plain, load(shutil.copytree(pristine, tmp_path / where)) as odd:
        assert picture(odd) == picture(plain)


def test_a_trailing_slash_a_link_a_relative_path_and_a_str_load(pristine, tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(pristine)
    monkeypatch.chdir(pristine.parent)
    paths = (pristine, f"{pristine}/", tmp_path / "link", pristine.name, f"./{pristine.name}/")
    hashes = set()
    for path in paths:
        with load(path) as generator:
            hashes.add(picture(generator))
    assert len(hashes) == 1


def test_shards_give_the_picture_of_one_file(pristine, pristine_shards):
    with load(pristine) as one, load(pristine_shards) as several:
        assert picture(one) == picture(several)


def test_the_names_of_published_clip_files_load(pristine, folder):
    """Published files say text_model.… and some hold the position ids, which are no weights."""

    def publish(tensors):
        old = {f"text_model.{name}": tensors.pop(name) for name in list(tensors)}
        tensors.update(old, **{"text_model.embeddings.position_ids": torch.arange(77)[None]})

    edit(folder, "text_encoder", publish)
    with load(pristine) as plain, load(folder) as published:
        assert picture(plain) == picture(published)


def test_a_local_folder_never_touches_the_network(pristine, monkeypatch):
    attempts = []

    def refuse(*args, **kwargs):
        attempts.append(args)
        raise OSError("no network in this test")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    with pytest.raises(OSError, match="no network in this test"):
        socket.create_connection(("localhost", 80))  # the trap works
    attempts.clear()
    with load(pristine) as generator:
        picture(generator)
    assert attempts == []


class TestConfigs:
    """A config of the wrong kind is named before any picture is made."""

    @pytest.mark.parametrize(
        ("file", "change", "named"),
        [
            ("scheduler/scheduler_config.json", {"shift": "3.0"}, "shift: got '3.0'"),
            ("scheduler/scheduler_config.json", {"shift": 0.0}, "shift=0.0"),
            ("scheduler/scheduler_config.json", {"num_train_timesteps": 0}, "num_train_timesteps"),
            ("scheduler/scheduler_config.json", {"use_dynamic_shifting": "false"}, "use_dynamic"),
            (
                "scheduler/scheduler_config.json",
                {"max_image_seq_len": 256, "base_image_seq_len": 256},
                "max_image_seq_len",
            ),
            ("transformer/config.json", {"num_layers": "2"}, "num_layers: got '2'"),
            ("transformer/config.json", {"guidance_embeds": "false"}, "guidance_embeds"),
            ("transformer/config.json", {"axes_dims_rope": [7, 13, 12]}, "axes_dims_rope"),
            ("vae/config.json", {"shift_factor": None}, "shift_factor"),
            ("vae/config.json", {"scaling_factor": "1"}, "scaling_factor"),
        ],
    )
    def test_wrong_kind_of_value(self, tmp_path, file, change, named):
        write_tiny_flux(tmp_path, guidance_embeds=True)
        edit_json(tmp_path / file, change)
        with pytest.raises(ValueError, match=re.escape(named)):
            DiffGenerator.from_pretrained(tmp_path, device="cpu")

    @pytest.mark.parametrize(
        ("component", "cls"),
        [
            ("text_encoder", "T5EncoderModel"),
            ("text_encoder_2", "CLIPTextModel"),
            ("transformer", "SD3Transformer2DModel"),
            ("vae", "AsymmetricAutoencoderKL"),
            ("scheduler", "EulerDiscreteScheduler"),
        ],
    )
    def test_component_of_another_class(self, tmp_path, component, cls):
        write_tiny_flux(tmp_path, guidance_embeds=True)
        edit_json(tmp_path / "model_index.json", {component: ["some_library", cls]})
        with pytest.raises(ValueError, match=f"got '{cls}', expected .* as {component}"):
            DiffGenerator.from_pretrained(tmp_path, device="cpu")

    @pytest.mark.parametrize("component", ["transformer", "text_encoder", "vae"])
    def test_tensor_that_is_no_plain_float(self, tmp_path, component):
        write_tiny_flux(tmp_path, guidance_embeds=True)
        (path,) = (tmp_path / component).glob("*.safetensors")
        tensors = load_file(path)
        name = sorted(tensors)[0]
        save_file({**tensors, name: tensors[name].to(torch.int32)}, path, {"format": "pt"})
        with pytest.raises(ValueError, match=f"{re.escape(name)} is I32"):
            DiffGenerator.from_pretrained(tmp_path, device="cpu")

    def test_a_variant_beside_the_weights_is_left_alone(self, tmp_path):
        write_tiny_flux(tmp_path, guidance_embeds=True)
        (path,) = (tmp_path / "transformer").glob("*.safetensors")
        path.with_suffix(".fp16.safetensors").write_bytes(path.read_bytes())
        DiffGenerator.from_pretrained(tmp_path, device="cpu").close()


def edit_json(path, change):
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))


def test_random_weights_that_do_not_fit_in_memory_are_refused_at_once():
    with torch.device("meta"):
        module = torch.nn.Linear(2**22, 2**22)  # 64 TiB
    with pytest.raises(MemoryError, match=r"65536\.0 GiB, .* GiB are free"):
        fill_random(module, torch.device("cpu"))
