"""The imports point one way, shown by walking the source of every module.

entrypoints -> managers -> pipelines -> loader -> models -> layers -> kernels. Settings, environment
and utils stand at the side and import none of these; kernels imports nothing of multimodal_gen.
Imports inside functions and under TYPE_CHECKING count as well.
"""

import ast
from pathlib import Path

import pytest

import sglang.multimodal_gen
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

ROOT = Path(sglang.multimodal_gen.__file__).parents[1]
GEN, RUNTIME = "sglang.multimodal_gen", "sglang.multimodal_gen.runtime"
# From the top down; a module may import its own layer and every one below.
LAYERS = [
    ("sglang.cli", f"{RUNTIME}.launch_server"),
    (f"{RUNTIME}.entrypoints",),
    (f"{RUNTIME}.managers", f"{RUNTIME}.profiling", f"{GEN}.report"),  # what a worker did
    (f"{RUNTIME}.pipelines",),
    (f"{RUNTIME}.loader",),
    (f"{RUNTIME}.models",),
    (f"{RUNTIME}.layers",),
    (f"{RUNTIME}.distributed",),
    ("sglang.kernels",),
]
SIDE = [f"{GEN}.{name}" for name in ("configs", "environ", "utils", "version")]


def inside(module, parents):
    return any(module == parent or module.startswith(parent + ".") for parent in parents)


def layer_of(module):
    ranks = [rank for rank, parents in enumerate(LAYERS) if inside(module, parents)]
    return ranks[0] if ranks else None


def imported_modules(source, module, is_package=False):
    """Every dotted name that `source` imports; of `from a import b` both "a" and "a.b"."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".")
            kept = len(parts) - node.level + is_package
            base = ".".join([*parts[:kept], node.module or ""]).strip(".") if node.level else None
            base = base or node.module
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def violation(module, imported):
    """Why `module` must not import `imported`, or None."""
    if not inside(imported, ["sglang"]):
        return None
    own, other = layer_of(module), layer_of(imported)
    if inside(module, SIDE) and other is not None:
        return f"{module} stands at the side and imports {imported}"
    if inside(module, ["sglang.kernels"]) and inside(imported, [GEN]):
        return f"{module} is a kernel module and imports {imported}"
    if own is not None and other is not None and other < own:
        return f"{module} imports {imported}, which lies above it"
    return None


def modules():
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        yield path, ".".join(parts[:-1] if is_package else parts), is_package


def test_imports_point_one_way():
    found = [
        violation(name, imported)
        for path, name, is_package in modules()
        for imported in imported_modules(path.read_text(), name, is_package)
        if name != GEN  # the lazy public names
    ]
    assert [text for text in found if text] == []
    assert len(found) > 200  # the walk did see the package


def test_every_module_has_a_place():
    homeless = [
        name
        for path, name, is_package in modules()
        if not is_package
        and layer_of(name) is None
        and not inside(name, [*SIDE, "sglang.test", f"{GEN}.bundled_model"])
    ]
    assert homeless == []


def test_init_files_are_empty_but_for_the_public_one():
    filled = [name for path, name, package in modules() if package and path.read_text().strip()]
    assert filled in ([GEN], ["sglang", GEN])


@pytest.mark.parametrize(
    "module,source,bad",
    [
        (f"{RUNTIME}.layers.linear", f"from {RUNTIME}.models.dits import flux", True),
        (f"{RUNTIME}.layers.linear", "from ..models.dits.flux import X", True),
        (f"{RUNTIME}.layers.linear", "def f():\n    import sglang.cli", True),
        (f"{RUNTIME}.layers.linear", "from . import rotary\nimport sglang.kernels.jit", False),
        (f"{RUNTIME}.loader.weights", f"import {RUNTIME}.pipelines.flux", True),
        (f"{RUNTIME}.pipelines.flux", f"import {RUNTIME}.loader.weights", False),
        (f"{GEN}.configs.server_args", "import sglang.kernels.jit", True),
        (f"{GEN}.environ", "from .runtime import layers", True),
        (f"{GEN}.version", f"import {GEN}.environ, torch", False),
        (f"{RUNTIME}.pipelines.flux", f"import {GEN}.report", True),
        ("sglang.kernels.jit", f"from {GEN} import environ", True),
        ("sglang.kernels.jit", "from sglang import multimodal_gen", True),
        ("sglang.kernels.jit", "import sglang.kernels.registration, torch", False),
        (f"{RUNTIME}.entrypoints.x", f"from {RUNTIME}.managers.worker import Worker", False),
        (f"{RUNTIME}.managers.worker", f"from {RUNTIME}.entrypoints.x import y", True),
    ],
)
def test_the_walker_sees_what_it_should(module, source, bad):
    found = [violation(module, name) for name in imported_modules(source, module)]
    assert any(found) is bad
