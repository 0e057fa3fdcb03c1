"""Compile a ``.cuh`` with NVRTC, keep the cubin on disk, load it, launch it.

No nvcc, ninja or host compiler: `cuda-core` drives NVRTC, which needs no GPU either (about 100 ms a
source). The sources include only their own neighbours, so no CUDA header has to be found.

Whatever goes wrong before a launch (no cuda-core, no NVRTC, no driver, a compile error) is a
`JitUnavailable` with the reason. `CudaKernel.ready` turns it into False and one warning, and the
caller runs its eager expression.

Launches go through the driver call of `cuda.bindings` with one packed buffer per thread. On an H200
machine a launch costs the host 5.2 us, the look-ups of device, context and stream included;
`cuda.core.launch` with all of these made beforehand costs 4.0 us, and one eager op about 9.
``python benchmark/kernels/launch_costs.py`` prints the costs on the machine at hand.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import re
import struct
import tempfile
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

STANDARD = "c++17"
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"\s*$')
_MAX_ARGUMENTS = 16
# Every kernel argument has a slot of its own; little endian, so a narrow value starts its slot.
_SLOT_FORMAT = {"P": "Q", "q": "q", "i": "i4x", "I": "I4x", "f": "f4x", "T": "128s"}
_lock = threading.RLock()
_thread = threading.local()
_warned: set[str] = set()
_declared: weakref.WeakSet[CudaKernel] = weakref.WeakSet()


class JitUnavailable(RuntimeError):
    """A kernel cannot be compiled or loaded here; the text says why. Callers run eager."""


# --- source -> cubin ---


def expand_source(source: Path, defines: Sequence[str] = ()) -> str:
    """The text given to NVRTC: ``#define`` lines, then the source with its quoted includes inlined.

    Each header is inlined once, so the text alone decides the cubin and keys the cache.
    """
    seen: set[Path] = set()

    def inline(path: Path) -> str:
        seen.add(path)
        lines = [f'#line 1 "{path.name}"']
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            included = _INCLUDE.match(line)
            if included is None:
                lines.append(line if line.strip() != "#pragma once" else "")
                continue
            header = path.parent / included.group(1)
            if header not in seen:
                lines.append(inline(header))
            lines.append(f'#line {number + 1} "{path.name}"')
        return "\n".join(lines)

    head = "".join(f"#define {define.replace('=', ' ', 1)}\n" for define in defines)
    return head + inline(source) + "\n"


def compile_cubin(source: Path, arch: str, defines: Sequence[str] = ()) -> bytes:
    """The cubin of `source` for `arch` ("sm_90"), from the disk cache or from NVRTC; needs no GPU.

    Raises JitUnavailable when a file is missing, and with NVRTC's log when it does not compile.
    """
    try:
        text = expand_source(source, defines)
    except OSError as error:
        raise JitUnavailable(f"{source.name} cannot be read: {error}") from error
    identity = "\0".join((f"nvrtc {nvrtc_version()}", STANDARD, arch, text))
    name = f"{source.stem}-{arch}-{hashlib.sha256(identity.encode()).hexdigest()[:32]}.cubin"
    cached = _read_cache(name)
    if cached is not None:
        return cached
    cubin = _run_nvrtc(text, arch, source.name)
    _write_cache(name, cubin)
    return cubin


@functools.cache
def nvrtc_version() -> str:
    """NVRTC's version, "13.0"; JitUnavailable when there is no NVRTC."""
    try:
        from cuda.bindings import nvrtc

        status, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, OSError, RuntimeError) as error:
        raise JitUnavailable(f"no NVRTC ({error}); install cuda-bindings and NVRTC") from error
    if int(status) != 0:
        raise JitUnavailable(f"NVRTC answers {status}")
    return f"{major}.{minor}"


def _run_nvrtc(text: str, arch: str, name: str) -> bytes:
    try:
        try:
            from cuda.core import Program, ProgramOptions
        except ImportError:  # cuda-core below 0.5 had only this name
            from cuda.core.experimental import Program, ProgramOptions
        options = ProgramOptions(name=name, arch=arch, std=STANDARD)
        return bytes(Program(text, "c++", options).compile("cubin").code)
    except Exception as error:  # NVRTC, cuda-core and the dynamic loader each have their own types
        raise JitUnavailable(f"{name} does not compile for {arch}: {error}") from error


# --- the disk cache ---


@functools.cache
def cache_directory() -> Path | None:
    """``$SGLANG_JIT_CACHE``, else ``~/.cache/sglang/jit``; a private one where that fails.

    None where no folder can be written at all: then every process compiles its kernels anew.
    """
    try:
        chosen = os.environ.get("SGLANG_JIT_CACHE") or "~/.cache/sglang/jit"
        directory = Path(chosen).expanduser()
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return directory
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
        return _private_directory(error)


def _private_directory(reason: Exception) -> Path | None:
    try:
        directory = Path(tempfile.mkdtemp(prefix="sglang-jit-"))
    except OSError as error:
        logger.warning(
            "The kernel cache is not usable (%s), nor is a temporary folder (%s): kernels are "
            "compiled in every process. Set SGLANG_JIT_CACHE to a folder that can be written.",
            reason, error,
        )  # fmt: skip
        return None
    logger.warning("The kernel cache is not usable (%s); using %s.", reason, directory)
    return directory


def _read_cache(name: str) -> bytes | None:
    """The cached cubin, or None where there is none or its checksum is wrong."""
    directory = cache_directory()
    if directory is None:
        return None
    try:
        content = (directory / name).read_bytes()
    except OSError:
        return None
    checksum, cubin = content[:32], content[32:]
    return cubin if hashlib.sha256(cubin).digest() == checksum else None


def _write_cache(name: str, cubin: bytes) -> None:
    """Atomic: readers and other writers see no half-written file."""
    directory = cache_directory()
    if directory is None:
        return
    try:
        with tempfile.NamedTemporaryFile(dir=directory, prefix=f".{name}.", delete=False) as file:
            file.write(hashlib.sha256(cubin).digest() + cubin)
        os.replace(file.name, directory / name)
    except OSError as error:  # a full disk costs a compilation next time, nothing else
        logger.warning("The kernel %s was not cached: %s", name, error)


# --- cubin -> launch ---


def _checked(result: tuple, what: str) -> Any:
    """The value of a driver call, or JitUnavailable naming the call and the driver's error."""
    status, *values = result
    if int(status) != 0:
        raise JitUnavailable(f"{what} failed: {getattr(status, 'name', status)}")
    return values[0] if values else None


def _bind_context(driver: Any, device: int) -> None:
    """Make torch's context current on this thread; a fresh thread may have none."""
    if int(_checked(driver.cuCtxGetCurrent(), "cuCtxGetCurrent")) == 0:
        ordinal = _checked(driver.cuDeviceGet(device), "cuDeviceGet")
        context = _checked(driver.cuDevicePrimaryCtxRetain(ordinal), "cuDevicePrimaryCtxRetain")
        _checked(driver.cuCtxSetCurrent(context), "cuCtxSetCurrent")


@functools.cache
def _library(source: Path, arch: str, defines: tuple[str, ...]) -> Any:
    from cuda.bindings import driver

    cubin = compile_cubin(source, arch, defines)
    loaded = driver.cuLibraryLoadData(cubin, [], [], 0, [], [], 0)
    return _checked(loaded, f"loading {source.name}")


class _ArgumentFrame:
    """One thread's arguments of kernels with slots of these sizes, and the pointers to them."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.slots = ctypes.create_string_buffer(sum(sizes))
        base = ctypes.addressof(self.slots)
        places = (base + sum(sizes[:index]) for index in range(len(sizes)))
        self._pointers = (ctypes.c_void_p * len(sizes))(*places)
        self.address = ctypes.addressof(self._pointers)


class CudaKernel:
    """One ``extern "C"`` kernel of a ``.cuh``, compiled and loaded at first use, on each device.

    `signature` has one letter per argument: P pointer, q int64, i int32, I uint32, f float32, T
    tensor map (128 bytes). `defines` are macros, ``NAME=VALUE``. `only_on` names the one
    architecture that has the instructions ("sm_90a"); `shared_bytes` is dynamic shared memory.
    """

    def __init__(
        self,
        source: Path,
        name: str,
        signature: str,
        defines: Sequence[str] = (),
        only_on: str | None = None,
        shared_bytes: int = 0,
    ) -> None:
        assert len(signature) <= _MAX_ARGUMENTS, f"{name}: at most {_MAX_ARGUMENTS} arguments"
        self.source, self.name, self.defines = source, name, tuple(defines)
        self.only_on, self.shared_bytes = only_on, shared_bytes
        self.failure: str | None = None
        self._slots = "<" + "".join(_SLOT_FORMAT[c] for c in signature)
        self._sizes = tuple(struct.calcsize("<" + _SLOT_FORMAT[c]) for c in signature)
        self._pack = struct.Struct(self._slots).pack_into
        self._functions: dict[int, Any] = {}
        self._driver_launch: Any = None
        _declared.add(self)

    def ready(self, device: int) -> bool:
        """Whether `launch` works on CUDA device `device`. The first call compiles and loads.

        False means: run eager. A failure is remembered in `failure`; each reason is warned about
        once. Inside CUDA-graph capture nothing is loaded: a kernel not loaded yet answers False.
        """
        if self._functions.get(device) is not None:
            return True
        with _lock:
            if device not in self._functions and not torch.cuda.is_current_stream_capturing():
                self._functions[device] = self._load_or_warn(device)
            return self._functions.get(device) is not None

    def _load_or_warn(self, device: int) -> Any:
        try:
            return self._load(device)
        except JitUnavailable as error:
            self.failure = str(error)
            if self.failure not in _warned:
                _warned.add(self.failure)
                logger.warning("CUDA kernels run eager, correctness is preserved: %s", error)
            return None

    def _load(self, device: int) -> Any:
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise JitUnavailable(f"no cuda-bindings ({error})") from error
        arch = self._arch(*torch.cuda.get_device_capability(device))
        with torch.cuda.device(device):
            _bind_context(driver, device)
            library = _library(self.source, arch, self.defines)
            kernel = _checked(driver.cuLibraryGetKernel(library, self.name.encode()), self.name)
            function = _checked(driver.cuKernelGetFunction(kernel), self.name)
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            shared = driver.cuFuncSetAttribute(function, attribute, self.shared_bytes)
            _checked(shared, f"{self.shared_bytes} bytes of shared memory for {self.name}")
        self._driver_launch = driver.cuLaunchKernel
        return function

    def _arch(self, major: int, minor: int) -> str:
        found = f"sm_{major}{minor}"
        if self.only_on is None:
            return found
        if self.only_on.removesuffix("a") != found:
            raise JitUnavailable(f"{self.name} is for {self.only_on}, and this GPU is {found}")
        return self.only_on

    def launch(
        self, device: int, grid: tuple[int, int], block: int, *arguments: int | float | bytes
    ) -> None:
        """Launch on `device`'s current torch stream. `ready(device)` must have answered True.

        Raises RuntimeError with the driver's error name when the driver refuses the launch.
        """
        if device != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                return self.launch(device, grid, block, *arguments)
        frames = getattr(_thread, "frames", None) or _new_frames(device)
        frame = frames.get(self._slots) or frames.setdefault(
            self._slots, _ArgumentFrame(self._sizes)
        )
        self._pack(frame.slots, 0, *arguments)
        stream = torch._C._cuda_getCurrentRawStream(device)
        function, (grid_x, grid_y) = self._functions[device], grid
        (status,) = self._driver_launch(
            function, grid_x, grid_y, 1, block, 1, 1, self.shared_bytes, stream, frame.address, 0
        )
        if status:
            raise RuntimeError(f"{self.name}: grid {grid} block {block} failed: {status.name}")
        return None


def declared_kernels() -> list[CudaKernel]:
    """Every kernel that the imported modules declare, so that all can be compiled ahead of time."""
    return list(_declared)


def _new_frames(device: int) -> dict[str, _ArgumentFrame]:
    from cuda.bindings import driver

    _bind_context(driver, device)
    _thread.frames = {}
    return _thread.frames
