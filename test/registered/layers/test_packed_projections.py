"""Linears of one input as one GEMM: same names, same values, same bits."""

import pytest
import torch
from torch import nn

from sglang.kernels.ops.diffusion.bitexact_gate import all_gates
from sglang.multimodal_gen.runtime.layers.packed_projections import (
    PACKED_PROJECTIONS,
    pack_projections,
    project,
)
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")
register_cuda_ci(est_time=20, stage="base-b-kernel-unit", runner_config="1-gpu-large")

# rows, K, N of each linear, bias
FLUX = [(4096, 3072, (3072,) * 3, True), (512, 3072, (3072,) * 3, True)]
SINGLE = [(4608, 3072, (3072,) * 3, True), (1536, 3072, (3072,) * 3, True)]
ERNIE = [(4216, 4096, (4096,) * 3, False), (4109, 4096, (4096,) * 3, False)]
GLM = [(4360, 4096, (4096,) * 3, True), (4097, 4096, (4096,) * 3, True)]
ODD = [(1, 64, (64, 128), True), (77, 96, (96, 32, 64), False), (300, 200, (40, 8), True)]


class Block(nn.Module):
    PACKED = (("a", "b", "c"), ("absent", "a"), ("a", "odd"))

    def __init__(self, k, sizes, bias=True):
        super().__init__()
        for name, n in zip("abc", sizes, strict=False):
            setattr(self, name, nn.Linear(k, n, bias=bias))
        self.odd = nn.Identity()

    def linears(self):
        return [getattr(self, name) for name in "abc" if hasattr(self, name)]


class HalfLinear(nn.Linear):
    """Stands for a linear that is not plain, such as a quantized one."""


def block(k=16, sizes=(8, 8, 4), bias=True, device="cpu", dtype=torch.float32):
    torch.manual_seed(0)
    return Block(k, sizes, bias).to(device, dtype).requires_grad_(False)


@pytest.mark.parametrize("bias", [True, False])
def test_packing_keeps_names_shapes_and_values_and_adds_no_memory(bias):
    module = block(bias=bias)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    pack_projections(module)
    after = module.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    storages = {p.untyped_storage().data_ptr() for p in module.parameters()}
    assert len(storages) == (2 if bias else 1), "weights share one storage, biases another"
    held = sum({p.untyped_storage().data_ptr(): p.untyped_storage().nbytes()
                for p in module.parameters()}.values())  # fmt: skip
    assert held == sum(p.numel() * p.element_size() for p in module.parameters())


def test_loading_into_packed_weights_reaches_every_linear():
    module, other = block(), block()
    for parameter in other.parameters():
        parameter.add_(1)
    pack_projections(module)
    module.load_state_dict(other.state_dict())
    x = torch.randn(3, 16)
    for got, expected in zip(project(x, *module.linears()), other.linears(), strict=True):
        assert torch.equal(got, expected(x))


@torch.inference_mode()
def test_a_group_with_another_kind_of_linear_stays_as_it_is():
    module = block()
    module.b = HalfLinear(16, 8).requires_grad_(False)
    pack_projections(module)
    assert len({p.untyped_storage().data_ptr() for p in module.parameters()}) == 6
    x = torch.randn(2, 5, 16)
    for got, linear in zip(project(x, *module.linears()), module.linears(), strict=True):
        assert torch.equal(got, linear(x))


@torch.inference_mode()
def test_on_the_cpu_linears_run_one_by_one():
    module = block()
    pack_projections(module)
    x = torch.randn(2, 5, 16)
    for got, linear in zip(project(x, *module.linears()), module.linears(), strict=True):
        assert torch.equal(got, linear(x))


@pytest.fixture
def fresh_gates():
    for gate in all_gates():
        gate.reset()


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", FLUX + SINGLE + ERNIE + GLM + ODD, ids=str)
@torch.inference_mode()
def test_one_gemm_equals_separate_ones_on_cuda(fresh_gates, case, dtype):
    rows, k, sizes, bias = case
    module = block(k, sizes, bias, "cuda", dtype)
    x = torch.randn(1, rows, k, device="cuda", dtype=dtype)
    expected = [linear(x) for linear in module.linears()]
    pack_projections(module)
    for _ in range(2):  # the call that verifies, and one after it
        got = project(x, *module.linears())
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    if case not in ODD:  # a small odd shape may take another kernel, and then runs separately
        state = PACKED_PROJECTIONS.state()
        assert (state.status, state.fused_calls) == ("verified", 2), state
        assert got[0].untyped_storage().data_ptr() == got[1].untyped_storage().data_ptr()


@pytest.mark.cuda
@torch.inference_mode()
def test_weights_that_lie_apart_run_one_by_one_on_cuda(fresh_gates):
    module = block(64, (64, 64, 64), device="cuda", dtype=torch.bfloat16)
    x = torch.randn(1, 7, 64, device="cuda", dtype=torch.bfloat16)
    for got, linear in zip(project(x, *module.linears()), module.linears(), strict=True):
        assert torch.equal(got, linear(x))
    assert PACKED_PROJECTIONS.state().eager_calls == 1
