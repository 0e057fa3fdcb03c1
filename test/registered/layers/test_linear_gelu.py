"""The site of projection and GELU: which way it takes, and what its gate counts."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sglang.kernels.ops.diffusion.bitexact_gate import BitExactFusionGate
from sglang.kernels.ops.diffusion.linear_gelu_bitexact import linear_gelu_bitexact_reference
from sglang.multimodal_gen.runtime.layers import linear_gelu as layer
from sglang.multimodal_gen.runtime.layers.linear_gelu import linear_gelu, takes_linear_gelu
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

WORTH_IT = 4  # rows


@pytest.fixture
def calls(monkeypatch):
    """Stands in for the GPU: a predicate on rows, and a kernel that counts its calls."""
    made = []

    def kernel(*tensors):
        made.append(tensors[0].shape)
        return linear_gelu_bitexact_reference(*tensors)

    monkeypatch.setattr(
        layer, "can_use_linear_gelu_bitexact", lambda x, *_: x.shape[-2] >= WORTH_IT
    )
    monkeypatch.setattr(layer, "linear_gelu_bitexact_cuda", kernel)
    monkeypatch.setattr(layer, "_only_size_decides", lambda x: True)
    return made


@pytest.fixture
def gate():
    return BitExactFusionGate("test.linear_gelu", per_signature=True)


@torch.inference_mode()
def run(gate, linear, rows):
    x = torch.randn(1, rows, linear.in_features)
    out = linear_gelu(gate, nn.Module(), linear, x)
    assert torch.equal(out, F.gelu(linear(x), approximate="tanh"))


def test_few_rows_are_no_fallback(calls, gate):
    linear = nn.Linear(8, 16)
    run(gate, linear, WORTH_IT)
    run(gate, linear, WORTH_IT - 1)
    assert len(calls) == 1
    assert (gate.fused_calls, gate.eager_calls) == (1, 0)


def test_a_kernel_found_wrong_is_reported_by_every_request(calls, gate, monkeypatch):
    monkeypatch.setattr(layer, "linear_gelu_bitexact_cuda", lambda x, *_: torch.zeros(1, 1))
    linear = nn.Linear(8, 16)
    run(gate, linear, WORTH_IT)
    for _ in range(2):
        gate.reset_counters()
        run(gate, linear, WORTH_IT)
        run(gate, linear, WORTH_IT - 1)
        state = gate.state()
        assert (state.fused_calls, state.eager_calls) == (0, 1)
        assert "differs from the eager chain" in state.reason


def test_a_hooked_linear_and_one_without_bias_run_themselves(calls, gate):
    hooked, x = nn.Linear(8, 16), torch.randn(1, WORTH_IT, 8)
    hooked.register_forward_hook(lambda *_: None)
    for linear in (hooked, nn.Linear(8, 16, bias=False)):
        assert not takes_linear_gelu(gate, linear, x)
        run(gate, linear, WORTH_IT)
    assert not calls and not gate.eager_calls


def test_without_such_a_gpu_every_call_is_counted_with_its_reason(gate):
    run(gate, nn.Linear(8, 16), WORTH_IT)
    state = gate.state()
    assert (state.status, state.eager_calls) == ("eager", 1)
    assert state.reason == "the kernel does not take float32 [1, 4, 8] on cpu"
