"""Every kernel of the library compiles for every supported architecture, without a GPU.

A Triton module takes part by ``aot_signatures() -> list of (jit function, signature, constexprs)``,
with compile options (``dict(num_warps=4)``) as an optional fourth entry.
"""

import importlib
import pkgutil
from pathlib import Path

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from sglang.kernels.jit import compile_cubin, declared_kernels, expand_source
from sglang.kernels.ops import diffusion
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=120, suite="base-a-test-cpu")

ARCHITECTURES = (80, 90, 100)  # a kernel with instructions of one GPU names that in `only_on`
FOLDER = Path(diffusion.__path__[0])
SOURCES = sorted(FOLDER.rglob("*.cuh"))
MODULES = [
    found.name
    for found in pkgutil.walk_packages([str(FOLDER)], f"{diffusion.__name__}.")
    if not found.ispkg
]


def import_all():
    return [importlib.import_module(name) for name in MODULES]


def is_header(source):
    return any(f'"{source.name}"' in other.read_text() for other in SOURCES)


ENTRY_SOURCES = [source for source in SOURCES if not is_header(source)]


def kernels_of(source):
    import_all()
    return [kernel for kernel in declared_kernels() if kernel.source == source]


def triton_kernels(module):
    """The launched kernels that a module defines; helpers do not end in _kernel."""
    return {
        value.fn.__qualname__
        for name, value in vars(module).items()
        if isinstance(value, JITFunction)
        and name.endswith("_kernel")
        and value.fn.__module__ == module.__name__
    }


def ahead_of_time(module):
    return module.aot_signatures() if hasattr(module, "aot_signatures") else []


def test_there_are_sources():
    assert {"residual_gate_add.cuh", "modulate_scale_shift.cuh"} <= {p.name for p in SOURCES}


def test_headers_and_sources_with_kernels_are_told_apart():
    names = {source.name for source in ENTRY_SOURCES}
    assert {"residual_gate_add.cuh", "linear_gelu_bitexact.cuh"} <= names
    assert not {"rounding.cuh", "persistent_gemm.cuh"} & names


@pytest.mark.parametrize("source", ENTRY_SOURCES, ids=lambda path: path.name)
def test_every_entry_point_is_declared(source):
    assert "__global__" in expand_source(source), "a header that no source includes"
    assert kernels_of(source), f"no module declares a CudaKernel of {source.name}"


def architectures_of(kernel):
    return [kernel.only_on] if kernel.only_on else [f"sm_{arch}" for arch in ARCHITECTURES]


@pytest.mark.parametrize("source", ENTRY_SOURCES, ids=lambda path: path.name)
def test_cuda_source_compiles(source):
    for kernel in kernels_of(source):
        for arch in architectures_of(kernel):
            cubin = compile_cubin(source, arch, kernel.defines)
            assert f"\0{kernel.name}\0".encode() in cubin, f"{kernel.name} is not in {arch}'s"


def test_every_triton_kernel_is_compiled_here():
    modules = import_all()
    defined = set().union(*(triton_kernels(module) for module in modules))
    compiled = {entry[0].fn.__qualname__ for module in modules for entry in ahead_of_time(module)}
    assert defined == compiled, f"add to aot_signatures: {sorted(defined - compiled)}"


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", [name for name in MODULES if ".triton." in name])
def test_triton_module_compiles(name, arch):
    for function, signature, constants, *options in ahead_of_time(importlib.import_module(name)):
        source = ASTSource(function, signature, constants)
        target = GPUTarget("cuda", arch, 32)
        compiled = triton.compile(source, target=target, options=options[0] if options else None)
        assert len(compiled.asm["cubin"]) > 0
