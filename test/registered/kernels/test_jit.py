import ctypes
import logging
import multiprocessing
import struct
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from sglang.kernels import jit
from sglang.kernels.jit import CudaKernel, JitUnavailable, compile_cubin, expand_source
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=20, suite="base-a-test-cpu")
register_cuda_ci(est_time=20, stage="base-b-kernel-unit", runner_config="1-gpu-large")

SOURCE = """#include "helper.cuh"
extern "C" __global__ void scale(const float* x, float* out, long long n, int offset,
                                 float factor) {
  const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = apply(x[i], factor) + offset + BIAS;
}
"""
HELPER = "#pragma once\n__device__ float apply(float x, float factor) { return x * factor; }\n"


@pytest.fixture
def source(tmp_path):
    (tmp_path / "helper.cuh").write_text(HELPER)
    (tmp_path / "scale.cuh").write_text(SOURCE)
    return tmp_path / "scale.cuh"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty disk cache, and no warning given yet."""
    monkeypatch.setattr(jit, "_warned", set())
    monkeypatch.setenv("SGLANG_JIT_CACHE", str(tmp_path / "cache"))
    jit.cache_directory.cache_clear()
    yield tmp_path / "cache"
    jit.cache_directory.cache_clear()


@pytest.fixture
def runs(monkeypatch):
    """The (arch, name) of every NVRTC run."""
    seen = []
    real = jit._run_nvrtc

    def record(text, arch, name):
        seen.append((arch, name))
        return real(text, arch, name)

    monkeypatch.setattr(jit, "_run_nvrtc", record)
    return seen


def build(source, arch="sm_90", bias=0):
    return compile_cubin(source, arch, (f"BIAS={bias}",))


# --- source text ---


def test_headers_are_inlined_once(source):
    source.write_text('#include "helper.cuh"\n#include "helper.cuh"\nint last;\n')
    text = expand_source(source, ("A=1", "B", "C=x=y"))
    assert text.startswith('#define A 1\n#define B\n#define C x=y\n#line 1 "scale.cuh"\n')
    assert text.count("float apply") == 1
    assert text.endswith('#line 3 "scale.cuh"\nint last;\n')


def test_a_missing_source_is_unavailable(tmp_path, cache):
    with pytest.raises(JitUnavailable, match="nothing.cuh"):
        compile_cubin(tmp_path / "nothing.cuh", "sm_90")


# --- the compiler ---


def test_compiles_without_a_gpu(source, cache):
    assert build(source)[:4] == b"\x7fELF"


def test_a_compile_error_names_the_line(source, cache):
    source.with_name("helper.cuh").write_text(HELPER.replace("x * factor", "x * unknown"))
    with pytest.raises(JitUnavailable, match=r"(?s)scale.cuh does not compile.*helper.cuh\(2\)"):
        build(source)


def test_an_unknown_architecture_is_unavailable(source, cache):
    with pytest.raises(JitUnavailable, match="does not compile for sm_1"):
        build(source, arch="sm_1")


@pytest.mark.parametrize("missing", ("cuda.bindings", "cuda.core"))
def test_a_missing_package_is_unavailable(source, cache, monkeypatch, missing):
    for name in [name for name in sys.modules if name.startswith(missing)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.setitem(sys.modules, f"{missing}.experimental", None)
    jit.nvrtc_version.cache_clear()
    with pytest.raises(JitUnavailable, match=missing):
        build(source)
    jit.nvrtc_version.cache_clear()


# --- the disk cache ---


def test_the_second_time_comes_from_disk(source, cache, runs):
    first = build(source)
    assert build(source) == first and len(runs) == 1
    assert [path.suffix for path in cache.iterdir()] == [".cubin"], "no temporary files stay"


def test_whatever_decides_the_cubin_is_in_the_key(source, cache, runs, monkeypatch):
    build(source)
    build(source, arch="sm_80")
    build(source, bias=1)
    source.write_text(SOURCE + "// changed\n")
    build(source)
    source.with_name("helper.cuh").write_text(HELPER + "// changed\n")
    build(source)
    monkeypatch.setattr(jit, "nvrtc_version", lambda: "99.0")
    build(source)
    assert len(runs) == 6 and len(list(cache.iterdir())) == 6


@pytest.mark.parametrize("damage", (b"", b"short", b"x" * 4000))
def test_a_damaged_file_is_compiled_again(source, cache, runs, damage):
    cubin = build(source)
    (file,) = cache.iterdir()
    intact = file.read_bytes()
    file.write_bytes(damage)
    assert build(source) == cubin and len(runs) == 2
    assert file.read_bytes() == intact


def test_the_home_in_a_chosen_folder_is_expanded(cache, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SGLANG_JIT_CACHE", "~/chosen")
    assert jit.cache_directory() == tmp_path / "chosen" and (tmp_path / "chosen").is_dir()


def _no_home(path):
    raise RuntimeError("no home")


@pytest.mark.parametrize("why", ("unwritable", "no home"))
def test_without_a_usable_folder_the_cache_is_private(source, tmp_path, monkeypatch, caplog, why):
    if why == "unwritable":
        monkeypatch.setenv("SGLANG_JIT_CACHE", str(source / "below a file"))
    else:
        monkeypatch.delenv("SGLANG_JIT_CACHE", raising=False)
        monkeypatch.setattr(Path, "expanduser", _no_home)
    jit.cache_directory.cache_clear()
    monkeypatch.setattr(jit.tempfile, "tempdir", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        build(source)
        directory = jit.cache_directory()
    jit.cache_directory.cache_clear()
    assert directory.parent == tmp_path and directory.stat().st_mode & 0o777 == 0o700
    assert [record.message.split(" (")[0] for record in caplog.records] == [
        "The kernel cache is not usable"
    ]
    assert len(list(directory.glob("*.cubin"))) == 1


def test_without_any_folder_kernels_compile_uncached(source, cache, runs, monkeypatch, caplog):
    monkeypatch.setenv("SGLANG_JIT_CACHE", str(source / "below a file"))
    monkeypatch.setattr(jit.tempfile, "tempdir", str(source / "no folder either"))
    assert build(source) == build(source) and len(runs) == 2
    assert jit.cache_directory() is None
    (record,) = caplog.records
    assert "nor is a temporary folder" in record.message and "SGLANG_JIT_CACHE" in record.message


def test_a_full_disk_only_warns(source, cache, monkeypatch, caplog):
    def full(*args):
        raise OSError(28, "No space left on device")

    jit.cache_directory()
    monkeypatch.setattr(jit.os, "replace", full)
    assert build(source)[:4] == b"\x7fELF"
    assert "was not cached" in caplog.text


def test_threads_race(source, cache):
    with ThreadPoolExecutor(4) as pool:
        cubins = list(pool.map(lambda _: build(source), range(4)))
    assert len(set(cubins)) == 1 and len(list(cache.iterdir())) == 1


def _build_in_child(source, barrier, results):
    torch.set_num_threads(1)
    barrier.wait()
    results.put(compile_cubin(source, "sm_90", ("BIAS=0",)))


def test_processes_race(source, cache):
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    children = [
        context.Process(target=_build_in_child, args=(source, barrier, results)) for _ in range(2)
    ]
    for child in children:
        child.start()
    cubins = {results.get(timeout=120) for _ in children}
    for child in children:
        child.join()
    assert cubins == {build(source)} and len(list(cache.iterdir())) == 1


def test_too_many_arguments_are_refused(source):
    with pytest.raises(AssertionError, match="at most 16"):
        CudaKernel(source, "scale", "P" * 17)


class FakeDriver:
    """Stands for the driver's launch: keeps what it was given and where the arguments lay."""

    def __init__(self):
        self.calls = []

    def launch(self, function, *rest):
        self.calls.append((function, rest[:6], *rest[6:9]))
        return (0,)

    def arguments(self, *types):
        """Of the last launch, one per ctypes type, each read where its pointer points."""
        slots = (ctypes.c_void_p * len(types)).from_address(self.calls[-1][4])
        values = [t.from_address(slot) for t, slot in zip(types, slots, strict=True)]
        return [value.raw if isinstance(value, ctypes.Array) else value.value for value in values]


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 77, raising=False)
    monkeypatch.setattr(jit, "_bind_context", lambda driver, device: None)
    monkeypatch.setattr(jit, "_thread", threading.local())
    return FakeDriver()


def loaded(fake, signature, **options):
    """A kernel that launches through the fake driver."""
    kernel = CudaKernel(Path("scale.cuh"), "scale", signature, **options)
    kernel._functions[0], kernel._driver_launch = "function", fake.launch
    return kernel


P, Q, I32, F32, MAP = (
    ctypes.c_uint64, ctypes.c_int64, ctypes.c_int32, ctypes.c_float, ctypes.c_char * 128
)  # fmt: skip


def test_a_launch_packs_its_arguments(fake):
    """Each argument starts its own slot, of 8 bytes but for tensor maps."""
    loaded(fake, "PPqif").launch(0, (5, 6), 128, 2**63 + 1, 2, -(2**40), -3, 0.5)
    function, grid_and_block, shared, stream, _ = fake.calls[0]
    assert (function, grid_and_block, shared) == ("function", (5, 6, 1, 128, 1, 1), 0)
    assert stream == 77
    assert fake.arguments(P, P, Q, I32, F32) == [2**63 + 1, 2, -(2**40), -3, 0.5]


def test_a_tensor_map_lies_among_the_arguments(fake):
    first, second = bytes(range(128)), bytes(range(127, -1, -1))
    loaded(fake, "iTTP").launch(0, (1, 1), 384, -3, first, second, 2**63 + 1)
    assert fake.arguments(I32, MAP, MAP, P) == [-3, first, second, 2**63 + 1]


def test_shared_memory_is_asked_for(fake):
    loaded(fake, "P", shared_bytes=197_696).launch(0, (132, 1), 384, 0)
    assert fake.calls[0][2] == 197_696


def test_kernels_share_arguments_of_one_layout_and_no_others(fake):
    kernels = [loaded(fake, signature) for signature in ("PPqif", "TPi", "PPqIf", "PPqif")]
    given = [(1, 2, 3, 4, 0.5), (bytes(range(128)), 5, -6), (7, 8, 9, 10, 1.5), (1, 2, 3, 4, 2.5)]
    layouts = [(P, P, Q, I32, F32), (MAP, P, I32), (P, P, Q, I32, F32), (P, P, Q, I32, F32)]
    for _ in range(2):
        for kernel, arguments, types in zip(kernels, given, layouts, strict=True):
            kernel.launch(0, (1, 1), 128, *arguments)
            assert fake.arguments(*types) == list(arguments)
    places = [call[4] for call in fake.calls]
    assert places[:4] == places[4:] and places[0] == places[3] and len(set(places)) == 3


def test_each_thread_has_its_own_arguments(fake):
    kernel, barrier = loaded(fake, "TP"), threading.Barrier(2)

    def launch(value):
        barrier.wait()  # both threads are alive at once, so that no memory is used again
        kernel.launch(0, (1, 1), 128, bytes(128), value)
        barrier.wait()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(launch, range(2)))
    assert len({call[4] for call in fake.calls}) == 2


def test_a_kernel_for_one_architecture_says_so_elsewhere(source, cache, monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    kernel = CudaKernel(source, "scale", "PPqif", only_on="sm_90a")
    assert not kernel.ready(0)
    assert kernel.failure == "scale is for sm_90a, and this GPU is sm_100"
    (record,) = caplog.records
    assert "run eager, correctness is preserved: scale is for sm_90a" in record.message


@pytest.mark.parametrize("only_on, found", ((None, "sm_90"), ("sm_90a", "sm_90a")))
def test_the_architecture_that_is_compiled_for(source, only_on, found):
    assert CudaKernel(source, "scale", "P", only_on=only_on)._arch(9, 0) == found


# --- on a GPU ---


def kernel_of(source, name="scale", bias=0):
    return CudaKernel(source, name, "PPqif", (f"BIAS={bias}",))


def run(kernel, x, offset=3, factor=0.5):
    device = x.get_device()
    assert kernel.ready(device), kernel.failure
    out = torch.full_like(x, float("nan"))
    blocks = -(-x.numel() // 128)
    kernel.launch(device, (blocks, 1), 128, x.data_ptr(), out.data_ptr(), x.numel(), offset, factor)
    return out


@pytest.mark.cuda
def test_launch_passes_every_kind_of_argument(source, cache):
    x = torch.arange(1000.0, device="cuda")
    assert torch.equal(run(kernel_of(source, bias=10), x, offset=-3), x * 0.5 + 7)


@pytest.mark.cuda
def test_a_failure_is_remembered_and_warned_about_once(source, cache, caplog, runs):
    source.write_text("this is not CUDA\n")
    kernel = kernel_of(source)
    assert not kernel.ready(0) and not kernel.ready(0)
    assert len(runs) == 1 and len(caplog.records) == 1, "a failure is remembered"
    assert "run eager, correctness is preserved: scale.cuh does not compile" in caplog.text
    assert "does not compile" in kernel.failure
    assert not kernel_of(source).ready(0) and len(caplog.records) == 1


@pytest.mark.cuda
def test_an_unknown_kernel_name_is_a_failure(source, cache):
    kernel = kernel_of(source, name="nothing")
    assert not kernel.ready(0)
    assert kernel.failure.startswith("nothing failed: CUDA_ERROR_NOT_FOUND")


@pytest.mark.cuda
def test_nothing_is_loaded_during_capture(source, cache):
    kernel, x = kernel_of(source), torch.ones(256, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.add_(1)
        assert not kernel.ready(0)
    assert kernel.failure is None
    assert torch.equal(run(kernel, x), torch.full_like(x, 3.5))


@pytest.mark.cuda
def test_a_refused_launch_raises(source, cache):
    kernel, x = kernel_of(source), torch.ones(4, device="cuda")
    run(kernel, x)
    with pytest.raises(RuntimeError, match="scale: grid .* CUDA_ERROR_INVALID_VALUE"):
        kernel.launch(0, (1, 1), 4096, x.data_ptr(), x.data_ptr(), 4, 0, 1.0)
    assert torch.equal(run(kernel, x), torch.full_like(x, 3.5)), "the context is still good"


@pytest.mark.cuda
def test_launches_are_ordered_on_the_current_stream(source, cache):
    kernel, stream = kernel_of(source), torch.cuda.Stream()
    x = torch.zeros(2**20, device="cuda")
    run(kernel, x)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        x.fill_(8.0)
        out = run(kernel, x)
    stream.synchronize()
    assert torch.equal(out, torch.full_like(x, 7.0))


@pytest.mark.cuda
def test_fresh_threads_launch(source, cache):
    kernel, x = kernel_of(source), torch.arange(256.0, device="cuda")
    expected = run(kernel, x)
    outs = []
    thread = threading.Thread(target=lambda: outs.append(run(kernel, x)))
    thread.start()
    thread.join()
    assert torch.equal(outs[0], expected)


@pytest.mark.cuda
def test_threads_do_not_share_arguments(source, cache):
    kernel, x = kernel_of(source), torch.ones(256, device="cuda")

    def many(offset):
        return all(bool((run(kernel, x, offset=offset) == 0.5 + offset).all()) for _ in range(50))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(many, range(8)))


@pytest.mark.cuda
def test_threads_race_to_the_first_use(source, cache, runs):
    kernel = kernel_of(source)
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda _: kernel.ready(0), range(8)))
    assert len(runs) == 1


SHARED = """struct Map { unsigned long long words[16]; };
extern "C" __global__ void through(int last, const __grid_constant__ Map map, long long* out) {
  extern __shared__ long long memory[];
  memory[last - threadIdx.x] = map.words[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = memory[last - 15 + threadIdx.x];
}
"""


@pytest.mark.cuda
def test_a_map_goes_through_the_last_bytes_of_shared_memory(source, cache):
    source.write_text(SHARED)
    kernel = CudaKernel(source, "through", "iTP", shared_bytes=200_000)
    assert kernel.ready(0), kernel.failure
    words, out = list(range(100, 116)), torch.zeros(16, dtype=torch.int64, device="cuda")
    packed = struct.pack("16q", *words)
    kernel.launch(0, (1, 1), 16, 200_000 // 8 - 1, packed, out.data_ptr())
    assert out.tolist() == words[::-1]


@pytest.mark.cuda
def test_more_shared_memory_than_there_is_is_a_failure(source, cache):
    source.write_text(SHARED)
    kernel = CudaKernel(source, "through", "iTP", shared_bytes=2**20)
    assert not kernel.ready(0)
    assert kernel.failure.startswith("1048576 bytes of shared memory for through failed: CUDA_")
