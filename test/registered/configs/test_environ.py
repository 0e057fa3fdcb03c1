"""Environment variables: unset, empty, good and bad."""

import re
from pathlib import Path

import pytest

import sglang.multimodal_gen
from sglang.multimodal_gen import environ
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")


@pytest.mark.parametrize("variable", environ.ALL, ids=lambda variable: variable.name)
def test_unset_or_empty_is_the_default(variable, monkeypatch):
    monkeypatch.delenv(variable.name, raising=False)
    assert variable.get() == variable.default
    monkeypatch.setenv(variable.name, "")
    assert variable.get() == variable.default


def test_good_values_are_parsed(monkeypatch):
    monkeypatch.setenv("SGLANG_DIFFUSION_PROGRESS", "plain")
    assert environ.PROGRESS.get() == "plain"


def test_a_bad_value_raises_naming_variable_value_and_what_is_accepted(monkeypatch):
    monkeypatch.setenv("SGLANG_DIFFUSION_PROGRESS", "x" * 500)
    with pytest.raises(ValueError, match="SGLANG_DIFFUSION_PROGRESS: got 'xxx.*auto, bar") as e:
        environ.PROGRESS.get()
    assert len(str(e.value)) < 200


def test_no_other_module_reads_the_environment():
    package = Path(sglang.multimodal_gen.__file__).parent
    sources = [path for path in package.rglob("*.py") if path.name != "environ.py"]
    readers = [p.name for p in sources if re.search(r"os\.(environ|getenv)", p.read_text())]
    assert len(sources) > 10 and readers == []
