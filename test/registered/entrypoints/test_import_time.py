"""Importing is light: no torch, below 0.3 s; a help or a refusal answers without the engine."""

import statistics
import subprocess
import sys
import time

import pytest

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

HEAVY = ("torch", "numpy", "diffusers", "transformers", "PIL")
SHOW_HEAVY = f"import sys; print([name for name in {HEAVY} if name in sys.modules])"


def python(code, *flags):
    return subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True)


def seconds(code):
    begin = time.perf_counter()
    assert python(code).returncode == 0
    return time.perf_counter() - begin


def test_the_package_imports_in_less_than_300_ms():
    # The interpreter's own start is taken off; the median of 5 stands up to a busy machine.
    pairs = [(seconds("import sglang.multimodal_gen"), seconds("pass")) for _ in range(5)]
    assert statistics.median(with_import - bare for with_import, bare in pairs) < 0.3


@pytest.mark.parametrize(
    "code",
    [
        "import sglang.multimodal_gen",
        "from sglang.multimodal_gen import SamplingParams; SamplingParams(prompt='a')",
        "import sglang.multimodal_gen.configs.model_specs",
        "import sglang.multimodal_gen.environ",
        "import sglang.multimodal_gen.runtime.entrypoints.generate_command",
        "import sglang.cli",
    ],
)
def test_nothing_heavy_is_loaded(code):
    assert python(f"{code}\n{SHOW_HEAVY}").stdout.strip() == "[]"


def test_public_names_are_lazy_and_listed():
    code = """if True:
    import sys, sglang.multimodal_gen as m
    assert {"DiffGenerator", "SamplingParams", "GenerationResult"} <= set(dir(m))
    assert "torch" not in sys.modules
    from sglang.multimodal_gen import DiffGenerator, GenerationResult
    assert "torch" in sys.modules and DiffGenerator is m.DiffGenerator
    try:
        m.Nothing
    except AttributeError as error:
        print(error)
    """
    answer = python(code)
    assert "has no attribute 'Nothing'" in answer.stdout, answer.stderr


def test_help_answers_in_less_than_a_second_and_a_half():
    code = "import sys; from sglang.cli import main; sys.exit(main(['generate', '--help']))"
    begin = time.perf_counter()
    answer = python(code)
    assert answer.returncode == 0 and "--prompt" in answer.stdout
    assert time.perf_counter() - begin < 1.5
