"""The command line's flags: pinned, built from the settings classes, refusing by name."""

import dataclasses

import pytest
from PIL import Image

from sglang import cli
from sglang.multimodal_gen.configs.sampling_params import SamplingParams
from sglang.multimodal_gen.configs.server_args import ServerArgs
from sglang.multimodal_gen.runtime.entrypoints.cli_flags import values_of
from sglang.multimodal_gen.runtime.entrypoints.generate_command import (
    COMMAND_DEFAULTS,
    build_parser,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

# A flag that goes away breaks users' scripts: change this list on purpose only.
PINNED = """
    --help --report
    --prompt --negative-prompt --width --height --num-inference-steps --guidance-scale
    --true-cfg-scale --seed --num-outputs-per-prompt --quality --generator-device
    --max-sequence-length --use-pe --image --strength --output-path --output-file-name
    --save-output --output-format --output-compression --return-frames --profile
    --num-profiled-timesteps
    --model-path --backend --num-gpus --tp-size --ulysses-degree --enable-cfg-parallel --local-mode
    --load-format --device --dit-precision --vae-precision --text-encoder-precision
    --attention-backend --performance-mode --text-encoder-cpu-offload
    --dit-layerwise-offload --lora-path --enable-torch-compile --regional-compile --fast-paths
    --log-level
""".split()


def parse(*words):
    return build_parser().parse(words)


def refusal(capsys, *words):
    with pytest.raises(SystemExit) as caught:
        parse(*words)
    assert caught.value.code == 2
    return capsys.readouterr().err


def test_the_flags_are_pinned():
    names = {name for action in build_parser()._actions for name in action.option_strings}
    assert {n for n in names if not n.startswith("--no-")} == {*PINNED, "-h"}
    assert all(n.replace("--no-", "--") in names for n in names)


def test_no_field_is_in_both_classes():
    request, process = (
        {f.name for f in dataclasses.fields(c)} for c in (SamplingParams, ServerArgs)
    )
    assert not request & process and "report" not in request | process


def test_the_command_line_has_pythons_defaults():
    given = parse("--prompt", "a")
    assert values_of(given, SamplingParams) == {"prompt": "a"}
    assert values_of(given, ServerArgs) == {}
    assert COMMAND_DEFAULTS == {"save_output": True}  # the one difference, shown in the help


def test_every_flag_reaches_its_field(tmp_path):
    picture = tmp_path / "in.png"
    Image.new("RGB", (2, 1)).save(picture)
    words = (
        "--prompt p --negative-prompt n --width 64 --height 96 --num-inference-steps 2 "
        "--guidance-scale 0 --true-cfg-scale 1.5 --seed 0 --num-outputs-per-prompt 3 "
        "--quality exact --generator-device cuda --max-sequence-length 77 --output-path o "
        "--output-file-name f --no-save-output --output-format webp --output-compression 0 "
        "--return-frames --profile --num-profiled-timesteps 2 --no-use-pe "
        f"--strength 0.5 --image {picture}"
    ).split()
    params = SamplingParams(**values_of(parse(*words), SamplingParams))
    assert dataclasses.asdict(params) == {
        "prompt": "p",
        "negative_prompt": "n",
        "width": 64,
        "height": 96,
        "num_inference_steps": 2,
        "guidance_scale": 0.0,
        "true_cfg_scale": 1.5,
        "seed": 0,
        "num_outputs_per_prompt": 3,
        "quality": "lossless",
        "generator_device": "cuda",
        "max_sequence_length": 77,
        "use_pe": False,
        "image": ({"width": 2, "height": 1, "rgb": bytes(6)},),
        "strength": 0.5,
        "output_path": "o",
        "output_file_name": "f",
        "save_output": False,
        "output_format": "webp",
        "output_compression": 0,
        "return_frames": True,
        "profile": True,
        "num_profiled_timesteps": 2,
    }


def test_process_flags_reach_their_fields():
    words = (
        "--model-path m --backend sglang --num-gpus 1 --tp-size 1 --ulysses-degree 1 "
        "--no-enable-cfg-parallel --local-mode --load-format auto --device cuda "
        "--dit-precision bf16 --vae-precision fp32 --text-encoder-precision fp16 "
        "--attention-backend cudnn --performance-mode manual --text-encoder-cpu-offload "
        "--no-dit-layerwise-offload --lora-path l --enable-torch-compile --regional-compile "
        "--no-fast-paths --log-level debug"
    ).split()
    values = values_of(parse(*words), ServerArgs)
    assert set(values) == set(ServerArgs.__dataclass_fields__)
    changed = {k for k, v in dataclasses.asdict(ServerArgs(**values)).items() if v != values[k]}
    assert changed == set() and not values["fast_paths"] and values["text_encoder_cpu_offload"]


def test_repeated_flags_make_lists():
    words = ("--prompt", "a b", "--prompt", "", *"--seed 1 --seed 0 --image x --image y".split())
    expected = {"prompt": ["a b", ""], "seed": [1, 0], "image": ["x", "y"]}
    assert values_of(parse(*words), SamplingParams) == expected


@pytest.mark.parametrize("text", ["x", "1e3", "4.0", "", "nan", "9" * 5000])
def test_a_word_that_is_no_number_is_left_to_the_one_check(text):
    values = values_of(parse("--prompt", "a", f"--width={text}"), SamplingParams)
    with pytest.raises(ValueError, match="^width: got .*expected an integer from 16 to 8192"):
        SamplingParams(**values)


def test_an_unknown_option_names_the_nearest(capsys):
    message = refusal(capsys, "--prompt", "a", "--widht", "64")
    assert "unknown option '--widht'; did you mean '--width'?" in message
    assert "see --help" in refusal(capsys, "--qqqqq")
    assert "did you mean '--prompt'" in refusal(capsys, "--promp=x")  # no silent abbreviation


def test_an_unquoted_prompt_is_explained(capsys):
    assert "quote a value with spaces" in refusal(capsys, "--prompt", "a", "red", "apple")
    assert "--flag=VALUE" in refusal(capsys, "--prompt", "-x")
    assert values_of(parse("--prompt=-x"), SamplingParams) == {"prompt": "-x"}


def test_the_help_fits_two_screens(capsys):
    with pytest.raises(SystemExit) as caught:
        parse("--help")
    lines = capsys.readouterr().out.splitlines()
    assert caught.value.code == 0
    assert len(lines) <= 100 and max(map(len, lines)) <= 100
    assert all(any(flag in line for line in lines) for flag in ("--[no-]save-output", "[lossless]"))


@pytest.mark.parametrize("words", [[], ["gnerate"], ["--version"], ["x" * 500]])
def test_an_unknown_command_lists_the_commands(words, capsys):
    assert cli.main(words) == 2
    message = capsys.readouterr().err
    wrong = "unknown command" if words else "a command is missing"
    assert f"sglang: error: {wrong}" in message and "verify" in message
    assert len(message) < 1000 and ("'generate'" in message) == (words == ["gnerate"])


def test_the_commands_are_listed_and_lead_to_modules(capsys):
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in ("generate", "verify", "version"))


def test_version_names_the_package_and_torch(capsys):
    assert cli.main(["version"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split()[0] for line in lines]
    assert names == ["sglang-multimodal-gen", "python", "torch", "cuda", "gpu"]
