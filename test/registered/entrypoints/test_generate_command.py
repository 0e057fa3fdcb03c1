"""`sglang generate` around a stand-in engine: exit codes, messages, files, what is not loaded."""

import json
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest

from sglang import cli
from sglang.multimodal_gen.runtime.entrypoints.image_files import OutputError
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

DUMMY = ["--load-format", "dummy", "--model-path", "FLUX.1-schnell"]
ENGINE = "sglang.multimodal_gen.runtime.entrypoints.diff_generator"


class FakeGenerator:
    """Records its calls; `answer` is what generate returns, or raises when it is an exception."""

    calls: list
    answer: object

    @classmethod
    def from_pretrained(cls, **server):
        cls.calls.append(server)
        return cls()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.calls.append("closed")

    def generate(self, *, sampling_params_kwargs):
        self.calls.append(sampling_params_kwargs)
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


def result(number, path="out/a.png"):
    return SimpleNamespace(output_file_path=path, report={"seed": number})


@pytest.fixture
def engine(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    FakeGenerator.calls, FakeGenerator.answer = [], result(1)
    module = ModuleType(ENGINE)
    module.DiffGenerator = FakeGenerator
    monkeypatch.setitem(sys.modules, ENGINE, module)
    return FakeGenerator


def generate(*words):
    """The exit status, whichever way it is said."""
    try:
        return cli.main(["generate", "--prompt", "a", *DUMMY, *words])
    except SystemExit as stop:
        return stop.code


def test_only_the_given_flags_reach_the_engine(engine, capsys):
    assert generate("--seed", "0", "--width", "64") == 0
    server, request, closed = engine.calls
    assert server == {"load_format": "dummy", "model_path": "FLUX.1-schnell"}
    assert request == {"prompt": "a", "seed": 0, "width": 64, "save_output": True}
    assert closed == "closed" and capsys.readouterr().out == "out/a.png\n"


def test_the_report_of_one_picture_is_the_report_itself(engine, tmp_path):
    assert generate("--report", "new/r.json") == 0
    assert json.loads((tmp_path / "new" / "r.json").read_text()) == {"seed": 1}


def test_several_pictures_are_printed_and_reported_in_order(engine, tmp_path, capsys):
    engine.answer = [result(1, "a.png"), result(2, "b.png")]
    assert generate("--report", "r.json") == 0
    assert json.loads((tmp_path / "r.json").read_text()) == {"images": [{"seed": 1}, {"seed": 2}]}
    assert capsys.readouterr().out == "a.png\nb.png\n"


def test_no_save_output_prints_no_path(engine, capsys):
    engine.answer = result(1, None)
    assert generate("--no-save-output") == 0
    assert engine.calls[1]["save_output"] is False and capsys.readouterr().out == ""


REFUSALS = [
    (["--width", "0"], "width: got 0"),
    (["--width", "-16"], "width: got -16"),
    (["--width", "100000"], "width: got 100000"),
    (["--width", "8192", "--height", "8192"], "at most 16777216 pixels"),
    (
        ["--height", "100"],
        "height: got 100, expected a multiple of 16 for this model; use 96 or 112",
    ),
    (["--width", "x"], "width: got 'x'"),
    (["--num-inference-steps", "0"], "num_inference_steps: got 0"),
    (["--num-inference-steps", "1000000000"], "from 1 to 1000"),
    (["--guidance-scale", "nan"], "guidance_scale: got nan"),
    (["--guidance-scale=-inf"], "guidance_scale: got -inf"),
    (["--seed", "-1"], "seed: got -1"),
    (["--seed", "1.5"], "seed: got '1.5'"),
    (["--num-outputs-per-prompt", "1000"], "num_outputs_per_prompt: got 1000"),
    (["--quality", "best"], "one of lossless, high, exact, extra-high"),
    (["--max-sequence-length", "513"], "at most 512 for this model"),
    (["--output-file-name", "../x"], "output_file_name"),
    (["--output-file-name", "a.jpg"], "output_format='jpeg'"),
    (["--output-path", "taken"], "output_path: got 'taken', expected a folder"),
    (["--report", "folder"], "report: got 'folder', expected a file name"),
    (["--report", "taken/r.json"], "report: got 'taken', expected a folder"),
    (["--model-path", "FLUX1-dev"], "did you mean 'FLUX.1-dev'"),
    (["--load-format", "auto", "--model-path", "./none"], "the folder does not exist"),
    (["--load-format", "auto", "--model-path", "folder"], "has no model_index.json"),
    (["--num-gpus", "0"], "num_gpus: got 0, expected an integer from 1 to 64"),
    (["--widht", "1"], "did you mean '--width'"),
]


@pytest.mark.parametrize("words,message", REFUSALS, ids=lambda case: str(case)[:40])
def test_bad_input_exits_with_2_before_the_engine_and_writes_nothing(
    engine, tmp_path, capsys, words, message
):
    (tmp_path / "taken").touch()
    (tmp_path / "folder").mkdir()
    assert generate(*words) == 2
    errors = capsys.readouterr().err
    assert message in errors and "sglang generate: error: " in errors and "Traceback" not in errors
    assert engine.calls == []
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["folder", "taken"]


def test_a_missing_prompt_is_refused(engine, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["generate"])
    assert caught.value.code == 2 and "prompt: is missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error,status,message",
    [
        (ValueError("device: got 'cuda'"), 2, "device: got 'cuda'"),
        (RuntimeError("denoising made NaN"), 1, "denoising made NaN"),
        (OSError("gone"), 1, "gone"),
        (MemoryError(), 1, "MemoryError"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_engine_errors_give_a_message_and_a_status(engine, capsys, error, status, message):
    engine.answer = error
    assert generate() == status
    errors = capsys.readouterr().err
    assert errors.startswith("sglang generate: ") and message in errors
    assert "Traceback" not in errors and engine.calls[-1] == "closed"


def test_debug_logging_shows_where_an_engine_error_came_from(engine, capsys):
    engine.answer = RuntimeError("denoising made NaN")
    assert generate("--log-level", "debug") == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_fault_of_ours_is_not_dressed_up_as_the_users(engine):
    engine.answer = KeyError("bug")
    with pytest.raises(KeyError):
        generate()


def test_pictures_that_could_not_be_written_are_still_reported(engine, tmp_path, capsys):
    engine.answer = OutputError("cannot write x.png: No space left on device")
    engine.answer.results = (result(1, "first.png"), result(2, None))
    assert generate("--report", "r.json") == 1
    streams = capsys.readouterr()
    assert streams.out == "first.png\n" and "No space left" in streams.err
    assert len(json.loads((tmp_path / "r.json").read_text())["images"]) == 2


@pytest.mark.parametrize(
    "flags", [["--help"], ["--prompt", "a", "--width", "100", *DUMMY], ["--x"]]
)
def test_no_torch_for_help_and_refusals(flags):
    code = "\n".join(
        [
            "import sys",
            "from sglang.cli import main",
            "try:",
            f"    main({['generate', *flags]!r})",
            "except SystemExit as stop:",
            "    print('status', stop.code, 'torch' in sys.modules)",
        ]
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    expected = 0 if flags == ["--help"] else 2
    assert answer.stdout.splitlines()[-1] == f"status {expected} False", answer.stderr
