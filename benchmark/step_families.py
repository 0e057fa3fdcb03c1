"""Where the milliseconds of a denoising step go: kernel families, gaps, and how near each family
comes to its ceiling.

GEMMs and attentions are rated in TFLOP/s, everything else in GB/s: bytes that must be read and
written once, over the time the family's kernels took. The kernels of a fused site are told by
running the site alone, and its GEMMs by running its eager chain, so that a new kernel needs no
entry in a list here.
"""

import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from denoise_arms import DenoiseCase
from op_counts import OpCounter, OpCounts, per_step, tensor_bytes
from tables import GAPS
from torch.utils._pytree import tree_leaves

from sglang.multimodal_gen.runtime.layers.fused_site import SiteRecord, observe_sites
from sglang.multimodal_gen.runtime.profiling import family_of

WARM_STEPS = 6  # the chip settles at the clocks that a long run has
PROFILED_STEPS = 5
FUSED = "fused (this package)"
# what a type or a layout adds to the name of a fused op's kernel
KERNEL_SUFFIX = re.compile(r"(_kernel|_row|_full|_bf16|_fp16|_fp32|_half|_float|_\d+)+$")
# Inductor names a kernel after all ops in it; a template (`tem`) is a GEMM
COMPILED = re.compile(r"triton_(poi|red|per)_")


@dataclass(frozen=True)
class Kernel:
    """One launch as the profiler saw it; times in microseconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class FusedKernels:
    """Which kernels belong to fused sites, and what a step asks of each family: bytes, and the
    GEMMs that its kernels do themselves."""

    family_of_kernel: Mapping[str, str]
    family_bytes: Counter[str]
    family_flops: Counter[str]


@dataclass(frozen=True)
class Ceilings:
    """What this machine reaches: timing.py's ceilings."""

    gemm_tflops: float
    attention_tflops: float
    copy_tbps: float


def profile_arm(
    case: DenoiseCase, arm: str, ceilings: Ceilings
) -> tuple[dict[str, float], dict[str, dict[str, Any]]]:
    """(family -> milliseconds a step with `gaps`, family -> rate) of one arm on a GPU."""
    # fused, captured or compiled steps do the GEMMs and attentions of the plain ones
    plain = per_step(case, "diffusers" if arm.startswith("diffusers") else "eager")
    moved = Counter() if arm == "diffusers-compile" else per_step(case, arm).family_bytes
    fused = FusedKernels({}, Counter(), Counter())
    if arm in ("lossless", "high", "without"):
        fused = fused_kernels(observed_sites(case, arm))
    kernels, step_ms = profiled_steps(case, arm)
    families = family_ms(kernels, len(step_ms), fused.family_of_kernel)
    families[GAPS] = statistics.median(step_ms) - busy_ms(kernels) / len(step_ms)
    moved += fused.family_bytes
    return families, family_rates(families, plain, moved, fused.family_flops, ceilings)


def profiled_steps(case: DenoiseCase, arm: str) -> tuple[list[Kernel], list[float]]:
    """The kernels of PROFILED_STEPS steps after some warm ones, and the steps' milliseconds."""
    schedule = torch.profiler.schedule(wait=0, warmup=WARM_STEPS, active=PROFILED_STEPS, repeat=1)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, schedule=schedule) as profile:

        def on_step(done: int) -> None:
            if done in (WARM_STEPS, WARM_STEPS + PROFILED_STEPS):
                torch.cuda.synchronize()  # no kernel of a step before or after is caught
            profile.step()

        run = case.run(arm, WARM_STEPS + PROFILED_STEPS, on_step)
    return gpu_kernels(profile.events()), [1e3 * s for s in run.step_seconds[WARM_STEPS:]]


def gpu_kernels(events: Iterable[Any]) -> list[Kernel]:
    """The launches among a profile's events; annotations span others and are left out."""
    return [
        Kernel(event.name, event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == torch.autograd.DeviceType.CUDA
        and not getattr(event, "is_user_annotation", False)
        and not event.name.startswith("ProfilerStep")
    ]


def family_ms(
    kernels: Sequence[Kernel], steps: int, fused_families: Mapping[str, str]
) -> dict[str, float]:
    """Family -> milliseconds a step, largest first."""
    us: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        us[kernel_family(kernel.name, fused_families)] += kernel.end - kernel.start
    return {name: t / steps / 1e3 for name, t in sorted(us.items(), key=lambda item: -item[1])}


def kernel_family(name: str, fused_families: Mapping[str, str]) -> str:
    """A fused site's family where one was seen to launch this kernel, else that of its name."""
    if name in fused_families:
        return fused_families[name]
    if COMPILED.match(name):
        return "compiled"
    family = family_of(name)
    return fused_family(name) if family == FUSED else family


def fused_family(kernel: str) -> str:
    """The name of a kernel of this package without what its type adds."""
    return KERNEL_SUFFIX.sub("", kernel)


def busy_ms(kernels: Sequence[Kernel]) -> float:
    """Milliseconds in which at least one kernel ran."""
    busy, reached = 0.0, float("-inf")
    for kernel in sorted(kernels, key=lambda k: k.start):
        busy += max(0.0, kernel.end - max(kernel.start, reached))
        reached = max(reached, kernel.end)
    return busy / 1e3


def observed_sites(case: DenoiseCase, arm: str) -> list[SiteRecord]:
    """Every kind of fused site of one step, with its first inputs and its number of calls.

    Two steps are observed and halved: what a step does is in both.
    """
    with observe_sites() as sites:
        case.run(arm, 2)
    for record in sites.values():
        record.calls //= 2
    return [s for s in sites.values() if s.fused and s.gate.is_verified(s.signature)]


def fused_kernels(
    sites: Sequence[SiteRecord],
    launched: Callable[[SiteRecord], tuple[Any, list[str]]] | None = None,
) -> FusedKernels:
    """Run every site alone to learn its kernels and bytes. `launched` gives output and names."""
    family_of_kernel: dict[str, str] = {}
    family_bytes: Counter[str] = Counter()
    family_flops: Counter[str] = Counter()
    for site in sites:
        output, names = (launched or run_alone)(site)
        own = [name for name in names if is_own(name)]
        if not own:
            continue
        family = fused_family(own[0])
        family_of_kernel |= dict.fromkeys(own, family)
        family_bytes[family] += site.calls * sum(map(tensor_bytes, tensors((site.args, output))))
        family_flops[family] += site.calls * gemm_flops(site)
    return FusedKernels(family_of_kernel, family_bytes, +family_flops)


def gemm_flops(site: SiteRecord) -> int:
    """Of the GEMMs in the site's eager chain."""
    with torch.inference_mode(), OpCounter() as counter:
        site.reference(*site.args)
    return counter.counts.gemm_flops


def is_own(kernel: str) -> bool:
    """Whether a kernel that a fused site launched is none of torch's or of a library's."""
    library = "at::" in kernel or kernel.startswith(("Memcpy", "Memset"))
    return not library and family_of(kernel) not in ("gemm", "attention")


def run_alone(site: SiteRecord) -> tuple[Any, list[str]]:
    """(output, kernel names) of one call of a site's fused op."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode())
        profile = stack.enter_context(torch.profiler.profile(activities=activities))
        output = site.fused(*site.args)
        torch.cuda.synchronize()
    return output, [kernel.name for kernel in gpu_kernels(profile.events())]


def family_rates(
    families: Mapping[str, float],
    counts: OpCounts,
    family_bytes: Mapping[str, int],
    family_flops: Mapping[str, int],
    ceilings: Ceilings,
) -> dict[str, dict[str, Any]]:
    """Family -> {value, unit, pct_of_ceiling}, for the families whose work is known."""
    tflops = {family: (flops, ceilings.gemm_tflops) for family, flops in family_flops.items()}
    tflops |= {
        "gemm": (counts.gemm_flops - sum(family_flops.values()), ceilings.gemm_tflops),
        "attention": (counts.attention_flops, ceilings.attention_tflops),
    }
    rates = {}
    for name, ms in families.items():
        if not ms or name == GAPS:
            continue
        if name in tflops:
            flops, ceiling = tflops[name]
            rates[name] = _rate(flops / ms / 1e9, "TFLOP/s", ceiling)
        elif family_bytes.get(name):
            rates[name] = _rate(family_bytes[name] / ms / 1e6, "GB/s", 1e3 * ceilings.copy_tbps)
    return rates


def _rate(value: float, unit: str, ceiling: float) -> dict[str, Any]:
    return {
        "value": round(value, 1),
        "unit": unit,
        "pct_of_ceiling": round(100 * value / ceiling, 1),
    }


def tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors anywhere in nested containers."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
