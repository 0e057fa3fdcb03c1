"""`DiffGenerator.generate`: what it refuses, returns, writes, reports and raises."""

import json
import math
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from sglang.multimodal_gen import DiffGenerator
from sglang.multimodal_gen.configs.validation import InvalidParameter
from sglang.multimodal_gen.report import pixel_hash
from sglang.multimodal_gen.runtime.entrypoints.image_files import OutputError
from sglang.multimodal_gen.runtime.pipelines.stages.checks import NonFiniteError
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.tiny_checkpoints import write_tiny_flux

register_cpu_ci(est_time=30, suite="base-a-test-cpu")

SMALL = {"width": 64, "height": 64, "num_inference_steps": 2, "max_sequence_length": 32}

# field, refused value, words that the message must hold besides the field's name
REFUSED = (
    ("width", 65, "multiple of 16 for this model; use 64 or 80"),
    ("height", 100, "multiple of 16 for this model; use 96 or 112"),
    ("width", 0, "got 0"),
    ("height", -64, "got -64"),
    ("width", 100000, "got 100000"),
    ("width", 64.0, "got 64.0"),
    ("height", "64", "got '64'"),
    ("num_inference_steps", 0, "got 0"),
    ("num_inference_steps", -1, "got -1"),
    ("num_inference_steps", 10**9, "got 1000000000"),
    ("num_inference_steps", "x", "got 'x'"),
    ("num_inference_steps", True, "got True"),
    ("num_outputs_per_prompt", 0, "got 0"),
    ("num_outputs_per_prompt", -1, "got -1"),
    ("num_outputs_per_prompt", 1000, "got 1000"),
    ("guidance_scale", math.nan, "got nan"),
    ("guidance_scale", math.inf, "got inf"),
    ("guidance_scale", -1, "got -1"),
    ("true_cfg_scale", "strong", "got 'strong'"),
    ("seed", -1, "got -1"),
    ("seed", 2**63, "got 9223372036854775808"),
    ("seed", 1.5, "got 1.5"),
    ("seed", None, "got None"),
    ("seed", [1, 2, 3], "got 3 seeds, expected 1"),
    ("max_sequence_length", 513, "at most 512 for this model"),
    ("max_sequence_length", 0, "got 0"),
    ("quality", "best", "lossless, high"),
    ("generator_device", "tpu", "cpu, cuda"),
    ("output_format", "gif", "png, jpeg, webp"),
    ("output_file_name", "../up", "starts with no dot"),
    ("output_file_name", "a/../../up", "without '/'"),
    ("output_file_name", "a\0b", "control characters"),
    ("output_path", "", "not empty"),
    ("prompt", None, "got None"),
    ("prompt", [], "at least one"),
    ("prompt", ["a", 3], "got 3"),
    ("prompt", "x" * 70000, "at most 65536 bytes"),
    ("negative_prompt", 1, "got 1"),
)


@pytest.fixture
def no_engine_work(engine, monkeypatch):
    """A request that reaches the worker fails the test."""

    def reached(*args):
        raise AssertionError("the request reached the worker")

    monkeypatch.setattr(engine._worker, "execute", reached)


def generate(engine, *args, **request):
    return engine.generate(*args, **{**SMALL, **request})


@pytest.mark.parametrize(("field", "value", "words"), REFUSED, ids=lambda case: str(case)[:20])
def test_a_bad_value_is_refused_before_any_work(
    engine, no_engine_work, tmp_path, monkeypatch, field, value, words
):
    monkeypatch.chdir(tmp_path)
    request = {"prompt": "a", "save_output": True, **SMALL, field: value}
    start = time.perf_counter()
    with pytest.raises(InvalidParameter) as caught:
        engine.generate(**request)
    assert time.perf_counter() - start < 0.1
    assert caught.value.field == field and words in str(caught.value)
    assert len(str(caught.value)) < 300
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("keyword", "near"), [("guidance", "guidance_scale"), ("widht", "width"), ("sed", "seed")]
)
def test_an_unknown_keyword_names_the_nearest(engine, no_engine_work, keyword, near):
    with pytest.raises(ValueError, match=f"{keyword}: unknown parameter; did you mean '{near}'"):
        generate(engine, "a", **{keyword: 1})


def test_a_cuda_generator_without_a_gpu_is_refused_by_name(engine, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="generator_device: got 'cuda', expected cpu"):
        generate(engine, "a", generator_device="cuda")


def test_both_keyword_forms_are_the_same(engine):
    request = {"prompt": "a red apple", "seed": 5, **SMALL}
    results = [
        engine.generate(**request),
        engine.generate(sampling_params_kwargs=request),
        engine.generate("a red apple", seed=5, sampling_params_kwargs=dict(SMALL)),
    ]
    assert len({result.report["sha256"] for result in results}) == 1


@pytest.mark.parametrize(
    ("args", "keywords", "field"),
    [
        (("a",), {"sampling_params_kwargs": {"prompt": "b"}}, "prompt"),
        (("a",), {"seed": 1, "sampling_params_kwargs": {"seed": 1}}, "seed"),
    ],
)
def test_a_parameter_given_twice_is_refused(engine, no_engine_work, args, keywords, field):
    with pytest.raises(InvalidParameter, match=f"{field}: given twice"):
        engine.generate(*args, **keywords)


def test_one_picture_is_a_result_and_several_are_a_list_in_prompt_order(engine):
    assert generate(engine, "a").prompt == "a"
    assert generate(engine, ["a"]).prompt == "a"
    several = generate(engine, ["a", "b"], num_outputs_per_prompt=2, seed=10)
    assert [(r.prompt, r.seed) for r in several] == [("a", 10), ("a", 11), ("b", 12), ("b", 13)]
    assert [r.report["seed"] for r in several] == [10, 11, 12, 13]
    assert all(r.report["seeds"] == [10, 11, 12, 13] for r in several)


def test_a_list_of_seeds_is_used_as_given(engine):
    results = generate(engine, ["a", "a", "a"], seed=[9, 0, 9])
    assert [r.seed for r in results] == [9, 0, 9]
    hashes = [r.report["sha256"] for r in results]
    assert hashes[0] == hashes[2] != hashes[1]


def test_zero_and_empty_are_not_taken_for_missing(engine):
    zero = generate(engine, "a", seed=0, guidance_scale=0)
    assert (zero.seed, zero.report["guidance_scale"]) == (0, 0)
    assert zero.report["sha256"] != generate(engine, "a", seed=0).report["sha256"]
    plain = generate(engine, "a", true_cfg_scale=3)
    against_empty = generate(engine, "a", true_cfg_scale=3, negative_prompt="")
    assert plain.report["sha256"] != against_empty.report["sha256"]


def test_the_result_holds_the_picture_and_its_history(engine):
    result = generate(engine, "a", width=96, seed=3, return_frames=True)
    assert result.size == result.image.size == (96, 64)
    assert result.frames.shape == (64, 96, 3) and result.frames.dtype == np.uint8
    assert np.array_equal(np.asarray(result.image), result.frames)
    assert result.generation_time > 0 and result.peak_memory_mb > 0
    assert (result.revised_prompt, result.output_file_path) == (None, None)
    assert generate(engine, "a").frames is None


def test_the_report_says_what_ran(engine):
    result = generate(engine, "a", seed=3, guidance_scale=2, return_frames=True)
    report = json.loads(json.dumps(result.report))
    assert report["sha256"] == pixel_hash(result.frames) == pixel_hash(np.asarray(result.image))
    asked = ("prompt", "seed", "seeds", "size", "num_inference_steps", "guidance_scale")
    assert [report[name] for name in asked] == ["a", 3, [3], [64, 64], 2, 2.0]
    assert (report["requested_quality"], report["quality"]) == ("lossless", "lossless")
    assert report["attention_backend"] == "flash"
    assert report["precisions"] == {"dit": "fp32", "vae": "fp32", "text_encoder": "fp32"}
    stages = "TextEncoding LatentPreparation TimestepPreparation Denoising Decoding".split()
    assert list(report["stage_seconds"]) == [f"{stage}Stage" for stage in stages]
    assert len(report["step_seconds"]) == 2 and min(report["step_seconds"]) > 0
    assert sum(report["stage_seconds"].values()) <= result.generation_time
    assert report["versions"]["torch"] == torch.__version__


def test_the_report_counts_every_site_and_says_why_it_ran_eager(engine):
    sites = {row["op"]: row for row in generate(engine, "a").report["sites"]}
    gates = "residual_gate_add layernorm_modulate qk_rmsnorm_rope gelu_tanh_concat".split()
    assert {f"flux.{gate}" for gate in gates} <= set(sites)
    assert all(row["status"] == "eager" and row["reason"] for row in sites.values())
    assert all(row["fused_calls"] == 0 and row["eager_calls"] > 0 for row in sites.values())
    # 2 steps x (2 dual blocks x 4 + 2 single blocks x 1)
    assert sites["flux.residual_gate_add"]["eager_calls"] == 20
    assert sites["flux.residual_gate_add"]["count"] == 20


def test_high_quality_that_cannot_mount_is_reported_and_warned_of(engine, caplog):
    lossless = generate(engine, "a")
    high = generate(engine, "a", quality="high")
    assert (high.report["requested_quality"], high.report["quality"]) == ("high", "lossless")
    assert high.report["sha256"] == lossless.report["sha256"]
    rows = {row["op"]: row for row in high.report["sites"]}
    assert rows["fused_linear_gelu"]["count"] == 2 * 2 + 2  # both streams, and the single blocks
    for op in ("fused_linear_gelu", "fused_ln_modulate"):
        assert rows[op]["status"] == "eager" and rows[op]["reason"]
    assert [r.message for r in caplog.records if "quality=high was asked for" in r.message]
    assert generate(engine, "a").report["requested_quality"] == "lossless"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"negative_prompt": "b"}, "negative_prompt has no effect at true_cfg_scale=1.0"),
        ({"true_cfg_scale": 2.0}, "true_cfg_scale=2.0 has no effect without negative_prompt"),
        ({"output_compression": 50}, "output_compression has no effect on png"),
    ],
)
def test_a_parameter_that_cannot_act_is_warned_of(engine, caplog, given, words):
    generate(engine, "a", **given)
    assert sum(words in record.message for record in caplog.records) == 1


def test_a_cut_prompt_says_which_encoder_cut_what_once(engine, caplog):
    generate(engine, "word " * 200, num_outputs_per_prompt=2, max_sequence_length=128)
    clip, t5 = (
        [r.getMessage() for r in caplog.records if f"The {name} encoder" in r.getMessage()]
        for name in ("CLIP", "T5")
    )
    assert len(clip) == 1 and "reads 77 of" in clip[0] and "cut for it alone" in clip[0]
    assert len(t5) == 1 and "reads 128 of" in t5[0]


def test_nothing_is_written_unless_asked(engine, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert generate(engine, "a").output_file_path is None
    assert list(tmp_path.iterdir()) == []


def test_a_saved_png_decodes_to_the_returned_picture_and_is_never_replaced(engine, tmp_path):
    prompt = "../../etc/passwd\näpfel 🍎 " + "long " * 200
    first, second = (
        generate(engine, prompt, save_output=True, output_path=tmp_path / "a" / "b")
        for _ in range(2)
    )
    paths = [Path(result.output_file_path) for result in (first, second)]
    assert paths[0] != paths[1] and {path.parent for path in paths} == {tmp_path / "a" / "b"}
    for path in paths:
        assert path.suffix == ".png"
        assert pixel_hash(np.asarray(Image.open(path))) == first.report["sha256"]


@pytest.mark.parametrize(
    ("fmt", "suffix", "pil"), [("jpeg", ".jpg", "JPEG"), ("webp", ".webp", "WEBP")]
)
def test_lossy_formats_on_request(engine, tmp_path, fmt, suffix, pil):
    request = {"save_output": True, "output_path": str(tmp_path), "output_format": fmt}
    path = Path(generate(engine, "a", output_compression=80, **request).output_file_path)
    assert path.suffix == suffix and Image.open(path).format == pil


def test_an_explicit_name_is_kept_numbered_and_replaced(engine, tmp_path):
    request = {"save_output": True, "output_path": tmp_path, "output_file_name": "pic"}
    generate(engine, "a", **request, seed=1)
    result = generate(engine, "a", **request, seed=2)
    assert [p.name for p in tmp_path.iterdir()] == ["pic.png"]
    assert pixel_hash(np.asarray(Image.open(tmp_path / "pic.png"))) == result.report["sha256"]
    several = generate(engine, ["a", "b"], **request)
    assert [Path(r.output_file_path).name for r in several] == ["pic_0.png", "pic_1.png"]


def test_pictures_survive_a_folder_that_cannot_be_written(engine, tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("not a folder")
    with pytest.raises(OutputError, match=f"cannot write {blocker}.*another output folder") as e:
        generate(engine, ["a", "b"], save_output=True, output_path=blocker / "out")
    assert [result.prompt for result in e.value.results] == ["a", "b"]
    for result in e.value.results:
        assert pixel_hash(np.asarray(result.image)) == result.report["sha256"]
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_two_threads_get_what_each_gets_alone(engine):
    requests = [{"prompt": "a", "seed": 1}, {"prompt": "b", "seed": 2, "width": 96}]
    expected = [generate(engine, **request).report["sha256"] for request in requests]
    results = [[], []]

    def work(i):
        results[i] += [generate(engine, **requests[i]).report["sha256"] for _ in range(4)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert results == [[expected[0]] * 4, [expected[1]] * 4]


def test_ctrl_c_while_denoising_leaves_no_file_and_a_usable_engine(engine, tmp_path):
    expected = generate(engine, "a").report["sha256"]

    def interrupt(*call):
        raise KeyboardInterrupt

    hook = engine._worker.pipeline.transformer.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        generate(engine, "a", quality="high", save_output=True, output_path=tmp_path)
    hook.remove()
    assert list(tmp_path.iterdir()) == []
    assert generate(engine, "a").report["sha256"] == expected


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("component", "stage"),
    [
        ("text_encoder", "TextEncodingStage"),
        ("text_encoder_2", "TextEncodingStage"),
        ("transformer", "DenoisingStage"),
        ("vae", "DecodingStage"),
    ],
)
def test_a_weight_that_is_not_finite_fails_with_the_stages_name(tmp_path, component, stage, value):
    from safetensors.torch import load_file, save_file

    folder = write_tiny_flux(tmp_path / "model", guidance_embeds=True)
    (file,) = (folder / component).glob("*.safetensors")
    weights = load_file(file)
    for name, tensor in weights.items():
        if name.endswith(("layer_norm.weight", "proj_out.bias", "conv_out.bias")):
            tensor[0] = value
    save_file(weights, file, metadata={"format": "pt"})
    request = {"save_output": True, "output_path": tmp_path / "out"}
    with DiffGenerator.from_pretrained(folder, device="cpu", log_level="error") as generator:
        with pytest.raises(NonFiniteError, match=f"^{stage}: .* NaN or infinite of"):
            generate(generator, "a", **request)
    assert not (tmp_path / "out").exists()


def test_a_closed_generator_says_so(tiny_dev):
    with DiffGenerator.from_pretrained(tiny_dev, device="cpu", log_level="error") as generator:
        pass
    with pytest.raises(RuntimeError, match="this generator is closed"):
        generate(generator, "a")


def test_the_blocks_alone_can_be_compiled(tiny_dev, engine, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: compiled.append(module))
    asked = {"device": "cpu", "log_level": "warning", "regional_compile": True}
    with DiffGenerator.from_pretrained(tiny_dev, **asked) as regional:
        blocks = regional.transformer
        assert compiled == [*blocks.transformer_blocks, *blocks.single_transformer_blocks]
        assert generate(regional, "a").report["quality"] == "compiled"
    monkeypatch.undo()
    assert generate(engine, "a").report["quality"] == "lossless"


def test_a_compiled_model_is_not_blamed_on_its_fusions(tiny_dev, caplog):
    asked = {"device": "cpu", "log_level": "warning", "enable_torch_compile": True}
    with DiffGenerator.from_pretrained(tiny_dev, **asked) as compiled:
        compiled.transformer.compile(
            backend="eager"
        )  # what is compiled, and how, is beside the point
        report = generate(compiled, "a").report
    assert report["quality"] == "compiled"
    assert [r.message for r in caplog.records if "the transformer is compiled" in r.message]
    assert not [r.message for r in caplog.records if "none of its fusions" in r.message]
