"""Dependent launches compile, and weights are on their way before a kernel waits."""

import importlib
import re

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=40, suite="base-a-test-cpu")

FOLDER = "sglang.kernels.ops.diffusion.triton"
MODULES = ("gemv", "decode_attention", "residual_rmsnorm", "sample_token")
WITHOUT_CONSTANTS = ("combine_chunks_kernel", "sample_token_kernel")  # all is written by kernels
WAIT, START = "griddepcontrol.wait", "griddepcontrol.launch_dependents"


def compiled(name):
    """(kernel name, PTX for sm_90) of the kernels of a module, launched dependently."""
    for kernel, signature, constants, *options in importlib.import_module(
        f"{FOLDER}.{name}"
    ).aot_signatures():
        aligned = [["tt.divisibility", 16]]
        attributes = {
            (place,): aligned
            for place, argument in enumerate(kernel.arg_names)
            if signature[argument].startswith("*")
        }
        source = ASTSource(kernel, signature, constants | {"PDL": True}, attributes)
        target = GPUTarget("cuda", 90, 32)
        built = triton.compile(source, target=target, options=options[0] if options else None)
        assert built.asm["cubin"]
        yield kernel.fn.__name__, built.asm["ptx"]


@pytest.mark.parametrize("name", MODULES)
def test_every_kernel_waits_once_before_it_writes(name):
    for kernel, ptx in compiled(name):
        assert ptx.count(WAIT) == 1 and ptx.count(START) == 1, kernel
        assert ptx.index(START) < ptx.index(WAIT) < ptx.index("st.global"), kernel
        loads_before = len(re.findall(r"ld\.global\S*v[24]", ptx[: ptx.index(WAIT)]))
        assert (loads_before > 0) == (kernel not in WITHOUT_CONSTANTS), kernel
