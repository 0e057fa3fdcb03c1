"""docs/add-a-kernel.md is true: the toy op is built from its code blocks and passes its tests."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=40, suite="base-a-test-cpu")

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "add-a-kernel.md"
BLOCK = re.compile(r"^```(?:python|cpp)\n(?:#|//) (\S+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
COPIED = ["python/sglang/kernels", "python/sglang/test", "test/registered/kernels", "benchmark"]
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
PLACES = {
    "python/sglang/kernels/ops/diffusion/csrc/multiply_row.cuh",
    "python/sglang/kernels/ops/diffusion/multiply_row.py",
    "test/registered/kernels/ops/diffusion/test_multiply_row.py",
    "benchmark/kernels/bench_multiply_row.py",
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the kernel library with the page's files in it."""
    root = tmp_path_factory.mktemp("tree")
    for folder in COPIED:
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("python/sglang/__init__.py", "test/registered/conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / file, root / file)
    for path, text in blocks().items():
        assert not (root / path).exists(), f"{path} would overwrite a real file"
        (root / path).write_text(text)
    return root


def blocks():
    return dict(BLOCK.findall(PAGE.read_text(encoding="utf-8")))


def run(tree, *arguments):
    environment = os.environ | {"PYTHONPATH": str(tree / "python")}
    return subprocess.run(
        [sys.executable, *arguments], cwd=tree, env=environment, capture_output=True, text=True
    )


def test_the_page_has_every_place():
    assert set(blocks()) == PLACES


def test_the_files_that_the_page_names_exist():
    names = set(re.findall(r"`(?:triton/)?(\w+\.py)`", PAGE.read_text(encoding="utf-8")))
    folders = (ROOT / "python" / "sglang" / "kernels", ROOT / "test" / "registered")
    known = {path.name for folder in folders for path in folder.rglob("*.py")}
    assert names and names <= known, names - known


def test_the_toys_tests_pass(tree):
    test = "test/registered/kernels/ops/diffusion/test_multiply_row.py"
    done = run(tree, *PYTEST, "-m", "not cuda", test)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\b3 passed\b", done.stdout), done.stdout


def test_the_toys_source_compiles_for_every_architecture(tree):
    test = "test/registered/kernels/test_compile_all.py"
    done = run(tree, *PYTEST, "-k", "multiply_row", test)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_toys_bench_is_importable_and_files_are_formatted(tree):
    paths = "['benchmark', 'benchmark/kernels']"
    done = run(tree, "-c", f"import sys; sys.path[:0] = {paths}; import bench_multiply_row")
    assert done.returncode == 0, done.stderr
    files = [path for path in sorted(PLACES) if path.endswith(".py")]
    for check in (["check"], ["format", "--check"]):
        done = run(tree, "-m", "ruff", *check, "--no-cache", *files)
        assert done.returncode == 0, done.stdout + done.stderr
