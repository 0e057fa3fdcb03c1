"""What each fused site should save in a request: its microbenchmark times its calls.

A request is observed with one step and with two, so that calls a step and calls an image are told
apart. Every site is then timed alone on the inputs that it met, fused and eager, L2 cold.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from timing import time_us

from sglang.multimodal_gen.runtime.layers.fused_site import SiteRecord, observe_sites

ITERATIONS = 50


@dataclass(frozen=True)
class SiteSaving:
    """One kind of site: an op at one input shape."""

    op: str
    shape: str
    calls: int  # in the whole request
    eager_us: float
    fused_us: float

    @property
    def seconds(self) -> float:
        return self.calls * (self.eager_us - self.fused_us) / 1e6


def site_savings(generate: Callable[[int], object], steps: int) -> list[SiteSaving]:
    """The savings of a request of `steps` steps, largest first. `generate` takes a step count."""
    sites = observed_calls(generate, steps)
    with torch.inference_mode():
        savings = [saving(site) for site in sites]
    return sorted(savings, key=lambda s: -s.seconds)


def observed_calls(generate: Callable[[int], object], steps: int) -> list[SiteRecord]:
    """The verified sites of a request of `steps` steps, each with its calls in all of it."""
    with observe_sites() as one:
        generate(1)
    with observe_sites() as two:
        generate(2)
    sites = []
    for key, record in two.items():
        first = one[key].calls if key in one else 0
        calls = first + (steps - 1) * (record.calls - first)
        if record.fused is not None and record.gate.is_verified(record.signature):
            sites.append(replace(record, calls=calls))
    return sites


def saving(site: SiteRecord) -> SiteSaving:
    """Time one site alone, eager and fused."""
    eager_us, fused_us = (
        time_us(partial(run, *site.args), iterations=ITERATIONS)
        for run in (site.reference, site.fused)
    )
    shape = "x".join(map(str, site.args[0].shape))
    return SiteSaving(site.gate.name, shape, site.calls, eager_us, fused_us)


def table_rows(savings: Sequence[SiteSaving]) -> list[list[str]]:
    """Texts of op, shape, calls, eager us, fused us, seconds saved."""
    return [
        [s.op, s.shape, str(s.calls), f"{s.eager_us:.1f}", f"{s.fused_us:.1f}", f"{s.seconds:.3f}"]
        for s in savings
    ]
