"""Sizes, empty `__init__` files, five places an op, and words that do not belong in a file."""

import ast
import re
from pathlib import Path

import pytest

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "python").rglob("*.py"))
MAX_LINES, MEDIAN_LINES, MAX_PIPELINE_LINES = 500, 95, 80
OPS = ROOT / "python" / "sglang" / "kernels" / "ops" / "diffusion"
# op module -> the test that covers it, where the name is not the stem
TEST_OF = {
    "layernorm_modulate": "test_glm_image_ln_modulate",
    "rmsnorm_scale_shift_bitexact": "test_ernie_norm_scale_shift",
}
OP_STEMS = sorted(
    path.stem
    for path in [*OPS.glob("*.py"), *OPS.glob("triton/*.py")]
    if re.search(r"^_\w+ = register_op\(|register_op\(", path.read_text(), re.MULTILINE)
)


def test_no_file_is_longer_than_the_limit():
    folders = ("python", "benchmark", "test", "tools", "examples")
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines())
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        if "work" not in path.parts
    }
    assert {name: n for name, n in lengths.items() if n > MAX_LINES} == {}


@pytest.mark.parametrize("model", ["base", "flux", "ernie_image", "glm_image"])
def test_a_pipeline_is_read_at_a_glance(model):
    path = ROOT / "python/sglang/multimodal_gen/runtime/pipelines" / f"{model}.py"
    assert len(path.read_text().splitlines()) <= MAX_PIPELINE_LINES


def test_the_median_source_file_fits_a_screen_or_two():
    lengths = sorted(len(path.read_text().splitlines()) for path in SOURCES if path.stat().st_size)
    assert lengths[len(lengths) // 2] <= MEDIAN_LINES


def test_init_files_are_empty_but_the_public_one():
    filled = [p for p in SOURCES if p.name == "__init__.py" and p.stat().st_size]
    assert filled == [ROOT / "python" / "sglang" / "multimodal_gen" / "__init__.py"]


def test_every_function_of_the_package_is_fully_annotated():
    missing = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if _is_device_code(node):
                    continue
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                bare = [a.arg for a in arguments if a.annotation is None]
                if set(bare) - {"self", "cls"} or node.returns is None:
                    missing.append(f"{path.name}:{node.lineno} {node.name}")
    assert missing == []


def _is_device_code(node):
    return any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)


@pytest.mark.parametrize("stem", OP_STEMS)
def test_an_op_has_its_test_its_bench_and_its_row(stem):
    tests = ROOT / "test" / "registered" / "kernels" / "ops" / "diffusion"
    assert (tests / f"{TEST_OF.get(stem, 'test_' + stem)}.py").exists()
    assert (ROOT / "benchmark" / "kernels" / f"bench_{stem}.py").exists()
    assert f"| `{stem}` |" in (ROOT / "README.md").read_text()


def test_the_op_list_is_found():
    assert {"residual_gate_add", "layernorm_modulate", "fused_linear_gelu"} <= set(OP_STEMS)


@pytest.mark.parametrize("stem", OP_STEMS)
def test_an_op_runs_under_the_memory_checker(stem):
    assert f'"{stem}": ' in (ROOT / "test" / "memcheck.py").read_text()
