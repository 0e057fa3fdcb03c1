"""`--profile`: a torch profiler trace of some denoising steps and a table of kernel families."""

import logging
import re
import time
from collections import defaultdict
from pathlib import Path
from types import TracebackType

import torch

from sglang.multimodal_gen.configs.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

# First match wins; kernel (or CPU op) names in lower case.
FAMILIES = {
    "fused (this package)": r"residual_(gate_add|rmsnorm)|(modulate|rmsnorm)_scale_shift"
    r"|gelu_(tanh_concat|mul)|linear_gelu|layernorm_modulate|qk_(head_layernorm|rotate|rmsnorm)|rmsnorm_rope"
    r"|gemv_(kernel|swiglu|qkv)|decode_attention|combine_chunks|sample_token",
    "attention": r"flash|fmha|sdpa|attention|cudnn_generated",
    "gemm": r"gem[mv]|cutlass|nvjet|xmma|addmm|linear|matmul|aten::mm|aten::bmm|cublas",
    "convolution": r"conv|implicit",
    "norm": r"norm",
    "activation": r"gelu|silu",
    "copy and cat": r"cat|copy|memcpy|memset|fill",
    "elementwise": r"elementwise|aten::(mul|add|sub|neg|pow|to|div)",
}


class RequestProfiler:
    """Context manager around one request; does nothing unless `params.profile` is set.

    Profiles `num_profiled_timesteps` denoising steps after the first, which warms up.
    """

    def __init__(self, params: SamplingParams, device: torch.device) -> None:
        self._folder = Path(params.output_path)
        self._profile = _make_profile(params, device) if params.profile else None

    def __enter__(self) -> "RequestProfiler":
        if self._profile is not None:
            self._profile.start()
        return self

    def on_step(self) -> None:
        """One denoising step ended."""
        if self._profile is not None:
            self._profile.step()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._profile is None:
            return
        self._profile.stop()
        if kind is None:
            self._write()

    def _write(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"profile-{time.strftime('%Y%m%d-%H%M%S')}.json"
        self._profile.export_chrome_trace(str(path))
        rows = family_seconds(self._profile.key_averages())
        total = sum(rows.values()) or 1.0
        lines = [
            f"{name:22} {1e3 * s:10.3f} ms {100 * s / total:6.1f} %" for name, s in rows.items()
        ]
        logger.info("Profile written to %s\n%s", path, "\n".join(lines))


def _make_profile(params: SamplingParams, device: torch.device) -> torch.profiler.profile:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    steps = (params.num_inference_steps or 1) - params.first_step
    active = min(params.num_profiled_timesteps, max(1, steps - 1))
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=active, repeat=1)
    return torch.profiler.profile(activities=activities, schedule=schedule)


def family_seconds(events: "torch.autograd.profiler_util.EventList") -> dict[str, float]:
    """Kernel family -> seconds of the profiled steps, largest first. On a machine without a GPU
    the families are those of CPU ops."""
    cuda = any(event.device_type == torch.autograd.DeviceType.CUDA for event in events)
    seconds: dict[str, float] = defaultdict(float)
    for event in events:
        if cuda and event.device_type == torch.autograd.DeviceType.CUDA:
            seconds[family_of(event.key)] += event.self_device_time_total / 1e6
        elif not cuda:
            seconds[family_of(event.key)] += event.self_cpu_time_total / 1e6
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def family_of(name: str) -> str:
    """The family of one kernel name."""
    lowered = name.lower()
    return next((family for family, p in FAMILIES.items() if re.search(p, lowered)), "other")
