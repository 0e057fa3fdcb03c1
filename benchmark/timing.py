"""The one timing helper: GPU time, host time, the ceilings of this machine, one bench row.

GPU time is what the fused ops compete on (a denoising step keeps the GPU busy), so `time_us`
keeps launch overhead out of it: a spin kernel holds the GPU while the host queues the work, and
what two events with nothing between them show, which differs between machines, is taken off.
L2 is cold, because in a model every op reads what another op wrote tens of MB ago.
"""

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from sglang.kernels.ops.diffusion.bitexact_gate import tensors_equal

L2_FLUSH_BYTES = 256 * 2**20  # four times the H200's 60 MB of L2
SPIN_CYCLES_PER_US = 2000  # the H200 boosts to 1980 MHz
WARM_UP = 10

_compile_skipped = False

Output = torch.Tensor | tuple[torch.Tensor, ...]
Thunk = Callable[[], Output]


@dataclass(frozen=True)
class BenchRow:
    """One line of `kernels.json`; times are medians in microseconds."""

    op: str
    shape: tuple[int, ...]
    dtype: str
    equal: bool  # fused output has the same bits as eager's
    eager_us: float
    fused_us: float
    compile_us: float | None  # torch.compile of the eager chain; None = not measured
    speedup: float  # eager_us / fused_us
    gbps: float | None  # None for an op bound by arithmetic
    pct_copy: float | None  # of the copy ceiling measured in this process


def bench_row(
    op: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    eager: Thunk,
    fused: Thunk,
    bytes_moved: int | None,
    compile_fn: Thunk | None = None,
) -> BenchRow:
    """Compare `fused` with `eager` (both take nothing and return a tensor or a tuple of them).

    `bytes_moved`: each input byte read once plus each output byte written once; None for an op
    that arithmetic bounds. `compile_fn`: the third column, usually `compiled(eager)`.
    """
    equal = tensors_equal(eager(), fused())
    eager_us, fused_us = time_us(eager), time_us(fused)
    gbps = bytes_moved / fused_us / 1e3 if bytes_moved is not None else None
    return BenchRow(
        op=op,
        shape=tuple(shape),
        dtype=str(dtype).removeprefix("torch."),
        equal=equal,
        eager_us=eager_us,
        fused_us=fused_us,
        compile_us=time_us(compile_fn) if compile_fn is not None else None,
        speedup=eager_us / fused_us,
        gbps=gbps,
        pct_copy=gbps / copy_ceiling_tbps() / 10 if gbps is not None else None,
    )


def time_us(fn: Thunk, *, cold_l2: bool = True, iterations: int = 200) -> float:
    """Median GPU time of one `fn()` in microseconds; launch overhead is hidden, not counted."""
    for _ in range(WARM_UP):
        fn()
    spin_cycles = int(SPIN_CYCLES_PER_US * (50 + 1.5 * host_us(fn, iterations=20)))
    return _interval_us(fn, spin_cycles, cold_l2, iterations) - _empty_interval_us(cold_l2)


@functools.cache
def _empty_interval_us(cold_l2: bool) -> float:
    """Between two events that have nothing to wait for; measured once a process."""
    return _interval_us(lambda: None, 50 * SPIN_CYCLES_PER_US, cold_l2, iterations=200)


def _interval_us(
    fn: Callable[[], object], spin_cycles: int, cold_l2: bool, iterations: int
) -> float:
    flush = _flush_buffer() if cold_l2 else None
    events = [_timed_call(fn, spin_cycles, flush) for _ in range(iterations)]
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events) * 1e3


def _timed_call(
    fn: Callable[[], object], spin_cycles: int, flush: torch.Tensor | None
) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(spin_cycles)  # the host queues everything below while the GPU spins
    if flush is not None:
        flush.sum()
    start.record()
    fn()
    end.record()
    return start, end


def host_us(fn: Thunk, *, iterations: int = 200) -> float:
    """Median host time of one `fn()` in microseconds: what it costs to launch, not to run."""
    fn()
    samples = []
    for _ in range(iterations):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        fn()
        samples.append(time.perf_counter() - begin)
    torch.cuda.synchronize()
    return statistics.median(samples) * 1e6


@functools.cache
def copy_ceiling_tbps() -> float:
    """Device copy bandwidth in TB/s, read + write, of a 1 GiB buffer; measured once a process."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / time_us(lambda: target.copy_(source), iterations=30) / 1e6


@functools.cache
def bf16_matmul_ceiling_tflops(size: int = 8192) -> float:
    """TFLOP/s of a square bf16 matmul; measured once a process."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / time_us(lambda: a @ b, iterations=20) / 1e6


@functools.cache
def sdpa_ceiling(sequence: int = 4608, heads: int = 24, head_dim: int = 128) -> float:
    """TFLOP/s of cuDNN attention at FLUX.1's 1024x1024 shape, bf16; measured once a process."""
    shape = (1, heads, sequence, head_dim)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        us = time_us(lambda: F.scaled_dot_product_attention(q, k, v), iterations=30)
    return 4 * heads * sequence**2 * head_dim / us / 1e6


def compiled(fn: Thunk) -> Thunk | None:
    """`torch.compile(fn)` for one static shape, compiled before it is timed.

    None after `skip_compile()`. Dynamo's cache is dropped first: past its recompile limit it
    would quietly run eager.
    """
    if _compile_skipped:
        return None
    torch._dynamo.reset()
    compiled_fn = torch.compile(fn, dynamic=False, fullgraph=True)
    compiled_fn()
    return compiled_fn


def skip_compile() -> None:
    """Leave the torch.compile column out in this process: compiling takes most of a run."""
    global _compile_skipped
    _compile_skipped = True


@functools.cache
def _flush_buffer() -> torch.Tensor:
    """Read before each timed call. A buffer that is written instead would leave L2 full of dirty
    lines, and their write-back would be charged to the op."""
    with torch.inference_mode(False):
        return torch.zeros(L2_FLUSH_BYTES // 4, dtype=torch.float32, device="cuda")
