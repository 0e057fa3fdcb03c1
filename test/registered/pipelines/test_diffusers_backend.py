"""The diffusers backend: the bytes of the pipeline's own call, and everything around them."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, StableDiffusionXLPipeline
from PIL import Image

from sglang.multimodal_gen import DiffGenerator
from sglang.multimodal_gen.configs.model_specs import known_spec
from sglang.multimodal_gen.configs.validation import InvalidParameter
from sglang.multimodal_gen.runtime.entrypoints import generate_command
from sglang.multimodal_gen.runtime.loader.weights import CheckpointError
from sglang.multimodal_gen.runtime.managers.numeric_switches import numeric_switches
from sglang.multimodal_gen.runtime.pipelines.diffusers_pipeline import DiffusersPipelineError
from sglang.multimodal_gen.runtime.pipelines.diffusers_spec import diffusers_spec
from sglang.multimodal_gen.runtime.pipelines.stages.checks import NonFiniteError
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.tiny_checkpoints import write_tiny_flux
from sglang.test.tiny_diffusers import write_tiny_qwen_image, write_tiny_sdxl, write_tiny_z_image

register_cpu_ci(est_time=60, suite="base-a-test-cpu")
register_cuda_ci(est_time=40, stage="base-b-kernel-unit", runner_config="1-gpu-large")

WRITERS = {
    "sdxl": write_tiny_sdxl,
    "qwen": write_tiny_qwen_image,
    "z_image": write_tiny_z_image,
}
PROMPT = "a red apple 漢字"
SMALL = {"width": 64, "height": 32, "num_inference_steps": 2}
CFG = {
    "sdxl": {"guidance_scale": 3.0, "negative_prompt": "blurry"},
    "qwen": {"true_cfg_scale": 3.0, "negative_prompt": "blurry"},
    "z_image": {"guidance_scale": 3.0, "negative_prompt": "blurry"},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("tiny models")  # with a space
    return {name: write(root / name) for name, write in WRITERS.items()}


@pytest.fixture(scope="module")
def engines(folders):
    return {
        name: DiffGenerator.from_pretrained(folder, device="cpu", log_level="error")
        for name, folder in folders.items()
    }


@pytest.fixture(scope="module")
def pipes(folders):
    made = {}
    for name, folder in folders.items():
        made[name] = DiffusionPipeline.from_pretrained(folder, local_files_only=True)
        made[name].set_progress_bar_config(disable=True)
    return made


def direct(pipe, seed=7, **request):
    """What a user of diffusers gets, uint8."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return np.asarray(pipe(generator=generator, **request).images[0])


def ours(engine, seed=7, **request):
    return engine.generate(seed=seed, return_frames=True, **request).frames


def sha(engine, **changes):
    return engine.generate(**{"prompt": PROMPT, **SMALL, **changes}).report["sha256"]


# The bytes


@pytest.mark.parametrize("cfg", [False, True], ids=["plain", "cfg"])
@pytest.mark.parametrize("size", [(64, 64), (64, 32), (96, 48)], ids=str)
@pytest.mark.parametrize("model", WRITERS)
def test_a_picture_is_that_of_the_pipelines_own_call(engines, pipes, model, size, cfg):
    request = {"prompt": PROMPT, "width": size[0], "height": size[1], "num_inference_steps": 2}
    request |= CFG[model] if cfg else {}
    got, expected = ours(engines[model], **request), direct(pipes[model], **request)
    assert got.std() > 15, "the picture is (nearly) constant"
    assert np.array_equal(got, expected)


@pytest.mark.parametrize("model", WRITERS)
def test_defaults_are_the_pipelines(engines, pipes, model):
    size = {} if model == "sdxl" else {"width": 32, "height": 32}
    request = {"prompt": "a cat", **size}
    assert np.array_equal(ours(engines[model], **request), direct(pipes[model], **request))
    spec = engines[model]._worker.spec
    expected = {
        "sdxl": ("StableDiffusionXLPipeline", 64, 8, 5.0, 5.0),
        "qwen": ("QwenImagePipeline", 1024, 16, None, 4.0),
        "z_image": ("ZImagePipeline", 1024, 16, 5.0, 5.0),
    }[model]
    got = (spec.pipeline_class, spec.width, spec.size_multiple, spec.guidance_scale)
    assert (*got, spec.true_cfg_scale) == expected and spec.num_inference_steps == 50


@pytest.mark.parametrize("model", WRITERS)
def test_image_i_is_the_single_image_with_seed_plus_i(engines, model):
    request = {"prompt": ["a cat", "a dog"], **SMALL, "num_inference_steps": 1}
    batch = engines[model].generate(**request, seed=3, num_outputs_per_prompt=2)
    alone = [
        sha(engines[model], prompt=prompt, seed=3 + i, num_inference_steps=1)
        for i, prompt in enumerate(["a cat", "a cat", "a dog", "a dog"])
    ]
    assert [result.report["sha256"] for result in batch] == alone and len(set(alone)) == 4
    assert [result.seed for result in batch] == [3, 4, 5, 6]


@pytest.mark.parametrize("model", WRITERS)
def test_repeats_and_other_requests_between_change_nothing(engines, model):
    expected = sha(engines[model])
    torch.manual_seed(5)
    before = torch.get_rng_state()
    sha(engines[model], width=32, **CFG[model])
    assert sha(engines[model]) == expected
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_of_the_table_runs_on_diffusers_when_asked(tmp_path):
    folder = write_tiny_flux(tmp_path / "flux", guidance_embeds=True)
    options = {"device": "cpu", "log_level": "error"}
    request = {"prompt": PROMPT, **SMALL, "guidance_scale": 3.5, "max_sequence_length": 32}
    reports = {}
    for backend in ("auto", "sglang", "diffusers"):
        with DiffGenerator.from_pretrained(folder, backend=backend, **options) as engine:
            reports[backend] = engine.generate(**request).report
    assert [report["backend"] for report in reports.values()] == ["sglang", "sglang", "diffusers"]
    assert len({report["sha256"] for report in reports.values()}) == 1  # float32 on a CPU


# Requests


def test_progress_tells_of_every_step_and_may_cancel(engines, monkeypatch):
    heard = []
    display = "sglang.multimodal_gen.runtime.entrypoints.progress.SilentDisplay.__call__"
    monkeypatch.setenv("SGLANG_DIFFUSION_PROGRESS", "off")
    monkeypatch.setattr(display, lambda self, p: heard.append((p.label, p.done, p.total)))
    expected = sha(engines["sdxl"], num_inference_steps=3)
    assert heard == [("denoise 1/1", step, 3) for step in (1, 2, 3)]

    def stop(self, progress):
        heard.append(progress.done)
        raise KeyboardInterrupt

    heard.clear()
    with monkeypatch.context() as patched:
        patched.setattr(display, stop)
        with pytest.raises(KeyboardInterrupt):
            sha(engines["sdxl"], num_inference_steps=3)
    assert heard == [1] and sha(engines["sdxl"], num_inference_steps=3) == expected


def test_steps_are_timed_and_the_backend_is_reported(engines):
    report = engines["qwen"].generate(PROMPT, **SMALL).report
    assert (report["backend"], report["attention_backend"]) == ("diffusers", "diffusers")
    assert len(report["step_seconds"]) == 2 and report["sites"] == []
    assert list(report["stage_seconds"]) == ["DiffusersStage"]
    json.dumps(report)


def test_quality_high_is_reported_as_not_mounted(engines, caplog):
    caplog.set_level("WARNING", logger="sglang")
    report = engines["sdxl"].generate(PROMPT, quality="high", **SMALL).report
    assert (report["requested_quality"], report["quality"]) == ("high", "lossless")
    reasons = {row["reason"] for row in report["sites"]}
    assert reasons == {"the diffusers backend has no fused sites"} and len(report["sites"]) == 2
    assert "quality=high was asked for" in caplog.text


@pytest.mark.parametrize("model,multiple", [("sdxl", 8), ("qwen", 16), ("z_image", 16)])
def test_a_size_that_would_be_rounded_is_refused(engines, model, multiple):
    with pytest.raises(InvalidParameter, match=f"got 68, expected a multiple of {multiple}"):
        sha(engines[model], width=68)


@pytest.mark.parametrize(
    "model,given,words",
    [
        ("sdxl", {"max_sequence_length": 8}, "StableDiffusionXLPipeline does not take it"),
        ("qwen", {"guidance_scale": 2.0}, "guidance_scale=2.0 has no effect"),
        ("qwen", {"true_cfg_scale": 2.0}, "no effect without negative_prompt"),
        ("sdxl", {"negative_prompt": "x", "guidance_scale": 1.0}, "negative_prompt has no effect"),
        ("z_image", {}, None),
        ("sdxl", {"guidance_scale": 7.0}, None),
        ("qwen", {}, None),
    ],
)
def test_a_parameter_that_cannot_act_gives_one_warning(engines, caplog, model, given, words):
    caplog.set_level("WARNING", logger="sglang")
    sha(engines[model], **given, num_inference_steps=1)
    messages = [r.message for r in caplog.records if r.name.startswith("sglang")]
    assert [words in message for message in messages] == ([True] if words else [])


def test_an_edit_and_an_enhancer_are_refused(engines):
    with pytest.raises(InvalidParameter, match="image: .*QwenImagePipeline. makes pictures from"):
        sha(engines["qwen"], image=Image.new("RGB", (8, 8)))
    with pytest.raises(InvalidParameter, match="use_pe: got True"):
        sha(engines["qwen"], use_pe=True)


def test_what_the_pipeline_refuses_reaches_the_user(engines):
    with pytest.raises(ValueError, match="max_sequence_length.*cannot be greater than 1024"):
        sha(engines["qwen"], max_sequence_length=2000)


@pytest.mark.parametrize(
    "images,error,words",
    [
        (np.full((1, 32, 64, 3), np.nan), NonFiniteError, "NaN or infinite"),
        (np.zeros((1, 32, 60, 3)), DiffusersPipelineError, "expected height 32, width 64"),
        (np.zeros((2, 32, 64, 3)), DiffusersPipelineError, "got 2 images, expected one"),
        (None, DiffusersPipelineError, "expected one image"),
    ],
)
def test_an_output_that_is_no_such_picture_is_an_error(engines, monkeypatch, images, error, words):
    output = type("Output", (), {"images": images})()
    monkeypatch.setattr(
        StableDiffusionXLPipeline, "__call__", lambda self, prompt, output_type: output
    )
    with pytest.raises(error, match=words):
        sha(engines["sdxl"])


def test_the_command_line_runs_it(folders, tmp_path, capsys):
    words = ["--model-path", str(folders["z_image"]), "--prompt", "a cat", "--device", "cpu"]
    words += ["--output-path", str(tmp_path), "--height=32", "--num-inference-steps=1"]
    assert generate_command.run([*words, "--width=64"]) == 0
    (picture,) = tmp_path.glob("*.png")
    assert str(picture) in capsys.readouterr().out and Image.open(picture).size == (64, 32)
    assert generate_command.run([*words, "--width=60"]) == 2
    assert "a multiple of 16" in capsys.readouterr().err


# Signatures


def pipe_of(call, **parts):
    return type("OddPipeline", (), {"__call__": call, **parts})()


def with_config(**values):
    return SimpleNamespace(config=SimpleNamespace(**values))


def test_the_size_is_what_the_pipeline_says():
    def call(self, prompt=None, height=None, width=768):
        pass

    for parts, size in (
        ({}, (768, 1024)),
        ({"unet": with_config(sample_size=64)}, (768, 512)),
        ({"unet": with_config(sample_size=(64, 96))}, (768, 1024)),
        ({"transformer": with_config(sample_size=32), "vae_scale_factor": 32}, (768, 1024)),
        ({"unet": with_config(sample_size=64), "default_sample_size": 32}, (768, 256)),
    ):
        spec = diffusers_spec(pipe_of(call, **parts))
        assert (spec.width, spec.height) == size
        assert spec.size_multiple == parts.get("vae_scale_factor", 8)
        assert set(spec.untaken) == set(CFG["qwen"]) | {
            "num_inference_steps", "guidance_scale", "max_sequence_length",
        }  # fmt: skip


def test_embedded_guidance_is_told_from_classifier_free_one():
    def both(self, prompt, true_cfg_scale=1.5, guidance_scale=2.5, negative_prompt=None):
        pass

    def embedded(self, prompt, guidance_scale=2.5):
        pass

    guided = pipe_of(both, transformer=with_config(guidance_embeds=True))
    for pipe, acts, scales in (
        (guided, True, (2.5, 1.5)),
        (pipe_of(both), False, (2.5, 1.5)),
        (pipe_of(embedded), True, (2.5, 1.0)),
    ):
        spec = diffusers_spec(pipe)
        assert spec.has_guidance_embedding is acts and not spec.guidance_scale_is_cfg
        assert (spec.guidance_scale, spec.true_cfg_scale) == scales


def test_a_pipeline_that_wants_more_than_a_prompt_is_refused():
    def edits(self, prompt, image, strength=0.8):
        pass

    def films(self, prompt=None, num_frames=16):
        pass

    def unconditional(self, batch_size=1):
        pass

    for call, wants in ((edits, "image"), (films, "num_frames"), (unconditional, "no prompt")):
        with pytest.raises(InvalidParameter, match=f"a text-to-image pipeline; it wants {wants}"):
            diffusers_spec(pipe_of(call))


# Loading


def test_the_spec_is_known_before_loading_only_where_files_tell_it(folders):
    assert known_spec(str(folders["qwen"]), "auto", "auto") is None
    assert known_spec(None, "auto", "auto").pipeline_class == "FluxPipeline"
    assert known_spec(None, "auto", "diffusers") is None
    with pytest.raises(InvalidParameter, match="a supported pipeline class"):
        known_spec(str(folders["qwen"]), "auto", "sglang")


UNFIT = {"num_gpus": 2, "attention_backend": "math", "performance_mode": "memory"}


@pytest.mark.parametrize("setting,value", UNFIT.items())
def test_a_setting_that_cannot_act_is_refused(folders, setting, value):
    for backend in ("auto", "diffusers"):
        with pytest.raises(InvalidParameter, match="with the diffusers backend") as caught:
            DiffGenerator.from_pretrained(folders["sdxl"], backend=backend, **{setting: value})
        assert caught.value.field == setting


@pytest.fixture
def copy(folders, tmp_path):
    return shutil.copytree(folders["sdxl"], tmp_path / "copy")


def load(folder, **options):
    return DiffGenerator.from_pretrained(folder, device="cpu", log_level="error", **options)


def rewrite_index(folder, **changes):
    path = folder / "model_index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_missing_weights_are_an_error_with_their_names(copy):
    from safetensors.torch import load_file, save_file

    path = copy / "unet" / "diffusion_pytorch_model.safetensors"
    weights = load_file(path)
    removed = sorted(weights)[0]
    save_file({k: v for k, v in weights.items() if k != removed}, path)
    with pytest.raises(CheckpointError, match=f"missing {removed}"):
        load(copy)


def test_a_folder_without_a_component_is_an_error(copy):
    shutil.rmtree(copy / "text_encoder_2")
    with pytest.raises(ValueError, match="text_encoder_2"):
        load(copy)


@pytest.mark.parametrize("name", ["NoSuchPipeline", "AutoencoderKL", "DDPMScheduler"])
def test_a_class_that_diffusers_lacks_is_refused(copy, name):
    rewrite_index(copy, _class_name=name)
    with pytest.raises(InvalidParameter, match=f"got '{name}', expected a pipeline class of diff"):
        load(copy)


@pytest.mark.parametrize("name", [None, ["x.py", "MyPipeline"], 3])
def test_a_folder_without_a_class_is_refused(copy, name):
    rewrite_index(copy, _class_name=name)
    for backend in ("auto", "diffusers"):
        with pytest.raises(InvalidParameter, match="class"):
            load(copy, backend=backend)


def test_a_checkpoint_has_defaults_of_its_own(copy):
    rewrite_index(copy, _sglang_defaults={"num_inference_steps": 1, "width": 32})
    with load(copy) as engine:
        result = engine.generate("a cat")
    assert result.size == (32, 64) and len(result.report["step_seconds"]) == 1


def test_a_local_folder_never_touches_the_network(folders, monkeypatch):
    import socket

    monkeypatch.setattr(
        socket.socket, "connect", lambda *args: pytest.fail("a connection was opened")
    )
    with load(folders["z_image"]) as engine:
        assert len(sha(engine, num_inference_steps=1)) == 64


# On the GPU, bfloat16.


@pytest.mark.cuda
@pytest.mark.parametrize("model", WRITERS)
def test_a_picture_is_that_of_the_pipelines_own_call_on_cuda(folders, model):
    pipe = DiffusionPipeline.from_pretrained(folders[model], torch_dtype=torch.bfloat16)
    pipe.set_progress_bar_config(disable=True)
    request = {"prompt": PROMPT, **SMALL, **CFG[model]}
    with numeric_switches(torch.device("cuda")):
        expected = direct(pipe.to("cuda"), **request)
    with DiffGenerator.from_pretrained(folders[model], log_level="error") as engine:
        assert np.array_equal(ours(engine, **request), expected)
        assert np.array_equal(ours(engine, **request), expected)
