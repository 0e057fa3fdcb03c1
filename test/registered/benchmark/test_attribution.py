"""The attribution table: calls of a request told from two short ones, savings from timings."""

import attribution
import pytest
import torch
from attribution import SiteSaving, observed_calls, site_savings, table_rows

from sglang.kernels.ops.diffusion.bitexact_gate import BitExactFusionGate
from sglang.multimodal_gen.runtime.layers.fused_site import run_site
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")


@pytest.fixture
def generate():
    """A request with one site called once an image, one thrice a step, and one that is rejected."""
    once, each, never = (BitExactFusionGate(name) for name in ("once", "each", "never"))
    x = torch.ones(2, 3)

    def request(steps):
        run_site(once, torch.neg, torch.neg, x)
        for _ in range(3 * steps):
            run_site(each, torch.neg, torch.neg, x)
            run_site(never, None, torch.neg, x)

    return request


def test_calls_of_the_whole_request(generate):
    calls = {site.gate.name: site.calls for site in observed_calls(generate, 50)}
    assert calls == {"once": 1, "each": 150}


def test_savings_are_largest_first(generate, monkeypatch):
    times = iter([30.0, 10.0, 8.0, 2.0])  # eager, fused of each site
    monkeypatch.setattr(attribution, "time_us", lambda run, iterations: next(times))
    first, second = site_savings(generate, 50)
    assert first == SiteSaving("each", "2x3", 150, 8.0, 2.0)
    assert first.seconds == pytest.approx(150 * 6e-6) and second.seconds == pytest.approx(20e-6)
    assert table_rows([first]) == [["each", "2x3", "150", "8.0", "2.0", "0.001"]]
