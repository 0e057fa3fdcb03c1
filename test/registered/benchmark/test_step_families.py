"""Kernel families of a step: attribution, gaps and rates from hand-made launches."""

from collections import Counter
from types import SimpleNamespace

import pytest
import step_families
import torch
import torch.nn.functional as F
from op_counts import Attention, Gemm, OpCounts, tensor_bytes
from step_families import (
    Ceilings,
    FusedKernels,
    Kernel,
    busy_ms,
    family_ms,
    family_rates,
    fused_family,
    fused_kernels,
    gpu_kernels,
    kernel_family,
    observed_sites,
)
from tables import family_table

from sglang.kernels.ops.diffusion.bitexact_gate import BitExactFusionGate
from sglang.multimodal_gen.runtime.layers.fused_site import SiteRecord
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

CUDA, CPU = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU
CEILINGS = Ceilings(gemm_tflops=700.0, attention_tflops=600.0, copy_tbps=4.0)


def _event(name, start, end, device=CUDA, annotation=False):
    span = SimpleNamespace(start=start, end=end)
    return SimpleNamespace(
        name=name, time_range=span, device_type=device, is_user_annotation=annotation
    )


def test_only_launches_are_kernels():
    events = [
        _event("nvjet_tst", 0, 5),
        _event("aten::mm", 0, 5, CPU),
        _event("ProfilerStep#3", 0, 100),
        _event("my range", 0, 100, annotation=True),
    ]
    assert gpu_kernels(events) == [Kernel("nvjet_tst", 0, 5)]


def test_busy_time_counts_overlapping_kernels_once():
    kernels = [Kernel("b", 500, 1500), Kernel("a", 0, 1000), Kernel("c", 3000, 4000)]
    kernels.append(Kernel("inside", 3100, 3200))
    assert busy_ms(kernels) == pytest.approx(2.5)


def test_families_are_milliseconds_a_step_largest_first():
    kernels = [
        Kernel("nvjet_tst_128x256", 0, 8000),
        Kernel("new_op_kernel", 8000, 10000),
        Kernel("void at::native::vectorized_elementwise_kernel<gelu>", 10000, 11000),
    ]
    families = family_ms(kernels, 2, {"new_op_kernel": "new_op"})
    assert families == {"gemm": 4.0, "new_op": 1.0, "activation": 0.5}
    assert list(families) == ["gemm", "new_op", "activation"]


@pytest.mark.parametrize(
    ("kernel", "family"),
    [
        ("residual_gate_add_row_bf16", "residual_gate_add"),
        ("layernorm_modulate_kernel", "layernorm_modulate"),
        ("triton_poi_fused_addmm_gelu_view_3", "compiled"),
        ("triton_red_fused_native_layer_norm_0", "compiled"),
        ("triton_tem_fused_addmm_1", "gemm"),
    ],
)
def test_family_of_a_kernel(kernel, family):
    assert kernel_family(kernel, {}) == family


def test_names_lose_only_what_a_type_adds():
    assert fused_family("gelu_tanh_concat_bf16") == "gelu_tanh_concat"
    assert fused_family("row_sum") == "row_sum"


def _site(name, calls, args):
    gate = BitExactFusionGate(name)
    return SiteRecord(gate, (), torch.add, torch.add, args, calls=calls)


def test_a_fused_site_owns_its_kernels_and_moves_each_byte_once():
    x, gate = torch.zeros(4, 8), torch.zeros(1, 8).expand(4, 8)
    sites = [_site("a", 3, (x, gate)), _site("b", 1, (x, x))]
    kernels = ["void at::native::copy", "Memset (Device)", "nvjet_tst", "my_add_kernel"]
    fused = fused_kernels(sites, lambda site: (x, kernels))
    assert fused.family_of_kernel == {"my_add_kernel": "my_add"}
    a, b = (32 + 8 + 32) * 4, (32 + 32 + 32) * 4
    assert fused.family_bytes == {"my_add": 3 * a + b}
    assert not fused.family_flops


def test_a_fused_site_takes_the_gemms_of_its_eager_chain_along():
    x, weight = torch.zeros(4, 8), torch.zeros(16, 8)
    gate = BitExactFusionGate("linear")
    site = SiteRecord(gate, (), F.linear, F.linear, (x, weight), calls=3)
    fused = fused_kernels([site], lambda site: (x, ["my_linear_gelu_kernel"]))
    assert fused.family_flops == {"my_linear_gelu": 3 * 2 * 4 * 8 * 16}


def test_a_site_that_launches_only_torch_s_kernels_is_no_family():
    fused = fused_kernels([_site("a", 1, ())], lambda site: (None, ["void at::native::cat"]))
    assert fused == FusedKernels({}, Counter(), Counter())


def test_tensor_bytes_of_views():
    x = torch.zeros(2, 3, dtype=torch.bfloat16)
    assert tensor_bytes(x.t()) == tensor_bytes(x) == 12
    assert tensor_bytes(x[:1].expand(5, 3)) == 6
    assert tensor_bytes(x[:0]) == 0


def test_rates_stand_against_the_right_ceiling():
    counts = OpCounts(
        Counter({Gemm(1000, 1000, 1000, True): 350}), Counter({Attention(1, 1, 1000, 1000, 75): 1})
    )
    families = {"gemm": 1.0, "attention": 0.5, "norm": 0.001, "other": 1.0, "gaps": 2.0}
    rates = family_rates(families, counts, {"norm": 2_000_000}, {}, CEILINGS)
    assert rates == {
        "gemm": {"value": 700.0, "unit": "TFLOP/s", "pct_of_ceiling": 100.0},
        "attention": {"value": 0.6, "unit": "TFLOP/s", "pct_of_ceiling": 0.1},
        "norm": {"value": 2000.0, "unit": "GB/s", "pct_of_ceiling": 50.0},
    }


def test_gemms_of_fused_kernels_are_not_those_of_the_library():
    counts = OpCounts(Counter({Gemm(1000, 1000, 1000, True): 350}))
    rates = family_rates(
        {"gemm": 0.5, "linear_gelu": 1.0}, counts, {}, {"linear_gelu": 350 * 10**9}, CEILINGS
    )
    assert rates == {
        "gemm": {"value": 700.0, "unit": "TFLOP/s", "pct_of_ceiling": 100.0},
        "linear_gelu": {"value": 350.0, "unit": "TFLOP/s", "pct_of_ceiling": 50.0},
    }


def test_sites_of_a_step_are_observed_once_each(cases):
    """On the CPU no predicate lets a fused op through, so none is left to profile."""
    assert observed_sites(cases["glm-image"], "lossless") == []


def test_the_table_has_one_column_an_arm_and_the_gaps_last():
    rate = {"value": 690.4, "unit": "TFLOP/s", "pct_of_ceiling": 98.6}
    rows = [
        {
            "arm": "eager",
            "ms_per_step": 12.0,
            "families": {"gemm": 8.0, "norm": 1.0, "gaps": 3.0},
            "family_rates": {"gemm": rate},
        },
        {"arm": "lossless", "ms_per_step": 8.5, "families": {"gemm": 8.5}, "family_rates": None},
    ]
    assert family_table(rows).splitlines() == [
        "| ms a step | eager | lossless |",
        "| --- | --- | --- |",
        "| gemm | 8.00 (690 TFLOP/s, 99 %) | 8.50 |",
        "| norm | 1.00 |  |",
        "| gaps | 3.00 |  |",
        "| GPU busy | 75.0 % | 100.0 % |",
        "| **step** | **12.00** | **8.50** |",
    ]


def test_one_arm_s_profile(cases, monkeypatch):
    """The whole of it on the CPU, but for the profiler's launches."""
    launches = [
        Kernel("nvjet_tst", 0, 4000),
        Kernel("flash_fwd", 4000, 5000),
        Kernel("void at::native::elementwise_kernel", 5000, 6000),
    ]
    monkeypatch.setattr(step_families, "profiled_steps", lambda case, arm: (launches, [7.0]))
    for arm in ("eager", "lossless", "diffusers", "diffusers-compile"):
        families, rates = step_families.profile_arm(cases["flux1-dev"], arm, CEILINGS)
        assert families == {"gemm": 4.0, "attention": 1.0, "elementwise": 1.0, "gaps": 1.0}
        rated = {"gemm", "attention"} | ({"elementwise"} if arm != "diffusers-compile" else set())
        assert rates.keys() == rated
