"""Every python and bash block of the README runs as it stands, each in its own empty folder.

In bash blocks `make` only plans (`make -n`) and `pip install` does nothing: the suite that runs
this test is itself started by make in an environment that is already installed. Blocks without a
language need a GPU or weights that are not here; their commands are parsed.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sglang.multimodal_gen.runtime.entrypoints.generate_command import build_parser
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=60, suite="base-a-test-cpu")

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)[^\n]*\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
LIMIT_S = 120
STANDINS = {
    "make": f'exec "{shutil.which("make")}" -n -C "{ROOT}" "$@"',
    "pip": '[ "$1" = install ]',
    "python": f'exec "{sys.executable}" "$@"',
    "sglang": f'exec "{sys.executable}" -c '
    "'from sglang.cli import main; raise SystemExit(main())' \"$@\"",
}


def blocks_of(language):
    return [body for name, body in BLOCKS if name == language]


def run(command, folder, path):
    variables = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT / "python")}
    done = subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture
def path_with_standins(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bin")
    for name, script in STANDINS.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def test_the_readme_has_blocks_of_both_kinds():
    assert blocks_of("python") and blocks_of("bash")
    assert README.count("\n```") == 2 * len(BLOCKS), "a code block is not closed"


@pytest.mark.parametrize("code", blocks_of("python"), ids=range(len(blocks_of("python"))))
def test_a_python_block_runs(tmp_path, code):
    run([sys.executable, "-c", code], tmp_path, os.environ["PATH"])


@pytest.mark.parametrize("script", blocks_of("bash"), ids=range(len(blocks_of("bash"))))
def test_a_bash_block_runs(tmp_path, path_with_standins, script):
    run(["bash", "-euo", "pipefail", "-c", script], tmp_path, path_with_standins)
    if "--output-path out" in script:
        assert list((tmp_path / "out").glob("*.png"))


@pytest.mark.parametrize("line", re.findall(r"^sglang generate --.*$", README, re.MULTILINE))
def test_the_flags_of_every_generate_command_exist(line):
    given = build_parser().parse(shlex.split(line, comments=True)[2:])
    assert given.prompt


def test_every_make_target_that_is_named_exists():
    targets = set(re.findall(r"(?:^|`)make ([a-z]+)", README, flags=re.MULTILINE))
    assert {"demo", "test"} <= targets
    makefile = (ROOT / "Makefile").read_text()
    assert targets <= set(re.findall(r"^([a-z]+):", makefile, flags=re.MULTILINE))


def test_every_file_that_is_linked_exists():
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", README)
    assert links and [link for link in links if not (ROOT / link).exists()] == []
