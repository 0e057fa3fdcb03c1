"""What one call costs the host: launches, custom ops, and the ops beside their eager chains.

python benchmark/kernels/launch_costs.py

Tiny tensors, so that the GPU never holds the host up; microseconds a call, median of 15 rounds.
"""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "benchmark")]

import torch  # noqa: E402

from sglang.kernels.ops.diffusion import residual_gate_add as gate_module  # noqa: E402
from sglang.kernels.ops.diffusion.gelu_tanh_concat import (  # noqa: E402
    gelu_tanh_concat,
    gelu_tanh_concat_reference,
)
from sglang.kernels.ops.diffusion.modulate_scale_shift import (  # noqa: E402
    modulate_scale_shift,
    modulate_scale_shift_reference,
)

CALLS, ROUNDS = 300, 15


def host_us(fn: Callable[[], object]) -> float:
    """Microseconds of host time a call."""
    fn()
    rounds = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(CALLS):
            fn()
        rounds.append((time.perf_counter() - begin) / CALLS)
    return statistics.median(rounds) * 1e6


def launches(residual: torch.Tensor, gate: torch.Tensor) -> dict[str, Callable[[], object]]:
    """The bare launch, ours and cuda-core's, into one output."""
    out = torch.empty_like(residual)
    kernel = gate_module._KERNELS.select(residual, gate)
    assert kernel.ready(0), kernel.failure
    pointers = [t.data_ptr() for t in (residual, residual, gate, out)]
    vectors, row = residual.numel() // 8, residual.shape[-1] // 8

    def ours() -> None:
        kernel.launch(0, (1, 1), 256, *pointers, vectors, row, 256 % row)

    rows = {"launch: CudaKernel": ours}
    try:
        rows["launch: cuda.core"] = cuda_core_launch(kernel, pointers)
    except (ImportError, AttributeError, TypeError) as error:  # its names move between versions
        print(f"launch: cuda.core is not measured: {error!r}")
    return rows


def cuda_core_launch(kernel: "gate_module.CudaKernel", pointers: list[int]) -> Callable[[], object]:
    """The same kernel through `cuda.core.launch`."""
    import numpy as np
    from cuda.core import Device, LaunchConfig, ObjectCode, launch

    from sglang.kernels.jit import compile_cubin

    device = Device(0)
    device.set_current()
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability(0))
    code = ObjectCode.from_cubin(compile_cubin(kernel.source, arch, kernel.defines))
    loaded, config = code.get_kernel(kernel.name), LaunchConfig(grid=1, block=256)
    stream = device.create_stream()
    sizes = [np.uint32(1)] * 3
    return lambda: launch(stream, config, loaded, *pointers, *sizes)


def registrations(tensors: tuple[torch.Tensor, ...]) -> dict[str, Callable[[], object]]:
    """One implementation, reached in four ways."""
    implementation = gate_module._residual_gate_add
    custom = torch.library.custom_op("sglang_launch_costs::gate", implementation, mutates_args=())
    overload = torch.ops.sglang_diffusion.residual_gate_add.default
    return {
        "residual_gate_add: implementation": lambda: implementation(*tensors),
        "residual_gate_add: public (bypass)": lambda: gate_module.residual_gate_add(*tensors),
        "residual_gate_add: torch.ops, Library": lambda: overload(*tensors),
        "residual_gate_add: torch.ops, custom_op": lambda: custom(*tensors),
        "residual_gate_add: eager": lambda: gate_module.residual_gate_add_reference(*tensors),
    }


def others(x: torch.Tensor, row: torch.Tensor) -> dict[str, Callable[[], object]]:
    """The other two ops and their eager chains."""
    return {
        "modulate_scale_shift: public": lambda: modulate_scale_shift(x, row, row),
        "modulate_scale_shift: eager": lambda: modulate_scale_shift_reference(x, row, row),
        "gelu_tanh_concat: public": lambda: gelu_tanh_concat(x, x),
        "gelu_tanh_concat: eager": lambda: gelu_tanh_concat_reference(x, x),
    }


def main() -> None:
    x = torch.randn(1, 8, 64, device="cuda", dtype=torch.bfloat16)
    row = torch.randn(1, 64, device="cuda", dtype=torch.bfloat16)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, host us a call")
    with torch.inference_mode():
        groups = (launches(x, row), registrations((x, x, row)), others(x, row))
        for name, fn in (item for group in groups for item in group.items()):
            print(f"{name:42} {host_us(fn):7.2f}")


if __name__ == "__main__":
    main()
