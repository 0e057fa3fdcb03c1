"""The lossless gate: verdicts, permanent fallback, counters, capture, tracing, threads."""

import logging
import threading

import pytest
import torch

from sglang.kernels.ops.diffusion import bitexact_gate
from sglang.kernels.ops.diffusion.bitexact_gate import (
    UNVERIFIED_IN_CAPTURE,
    BitExactFusionGate,
    all_gates,
    fast_paths,
    fast_paths_enabled,
    set_fast_paths,
    tensors_equal,
)
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=15, suite="base-a-test-cpu")
register_cuda_ci(est_time=20, stage="base-b-kernel-unit", runner_config="1-gpu-large")

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn]


class Calls:
    """A function that counts its calls and returns or raises what it was given."""

    def __init__(self, result):
        self.result = result
        self.count = 0

    def __call__(self):
        self.count += 1
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


@pytest.fixture
def gate():
    return BitExactFusionGate("test_gate")


@pytest.fixture
def signature_gate():
    return BitExactFusionGate("test_signature_gate", per_signature=True)


def warnings_in(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# tensors_equal


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_bits_are_equal(dtype):
    x = torch.randn(7, 65).to(dtype)
    assert tensors_equal(x, x.clone())


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_ulp_is_a_difference(dtype):
    x = torch.ones(7, 65).to(dtype)
    y = x.clone()
    y.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])[
        3, 64
    ] += 1
    assert not tensors_equal(x, y)


def test_nan_equals_nan_of_any_payload_in_the_same_place():
    x = torch.tensor([1.0, float("nan"), float("inf")])
    y = x.clone()
    y.view(torch.int32)[1] ^= 1
    assert torch.isnan(y[1])
    assert tensors_equal(x, y)
    assert not tensors_equal(x, torch.tensor([float("nan"), 1.0, float("inf")]))
    assert not tensors_equal(x, torch.tensor([1.0, 2.0, float("inf")]))


def test_infinity_is_not_the_largest_number():
    largest = torch.finfo(torch.bfloat16).max
    x = torch.tensor([float("nan"), float("inf")], dtype=torch.bfloat16)
    y = torch.tensor([float("nan"), largest], dtype=torch.bfloat16)
    assert not tensors_equal(x, y)


def test_signed_zeros_differ():
    assert not tensors_equal(torch.tensor([0.0]), torch.tensor([-0.0]))


def test_shape_dtype_and_count_must_match():
    x = torch.zeros(2, 3)
    assert not tensors_equal(x, torch.zeros(3, 2))
    assert not tensors_equal(x, x.to(torch.bfloat16))
    assert not tensors_equal((x, x), (x,))
    assert not tensors_equal((x, x), (x, x + 1))
    assert tensors_equal((x, x), [x, x.clone()])
    assert tensors_equal(x, (x,))


def test_strides_do_not_matter():
    x = torch.randn(4, 6)
    assert tensors_equal(x.t(), x.t().contiguous())


def test_integers_compare():
    assert tensors_equal(torch.arange(4), torch.arange(4))
    assert not tensors_equal(torch.arange(4), torch.arange(1, 5))


# verdicts


def test_first_sight_verifies_and_later_runs_only_fused(gate):
    fused, reference = Calls(torch.ones(3)), Calls(torch.ones(3))
    assert gate.can_attempt_once() and not gate.is_verified()
    for _ in range(3):
        assert torch.equal(gate.run(fused, reference), torch.ones(3))
    assert (fused.count, reference.count) == (3, 1)
    assert gate.verified and gate.is_verified() and not gate.disabled
    state = gate.state()
    assert (state.status, state.fused_calls, state.eager_calls) == ("verified", 3, 0)


def test_mismatch_disables_for_good_and_warns_once(gate, caplog):
    fused, reference = Calls(torch.ones(3)), Calls(torch.zeros(3))
    for _ in range(3):
        assert torch.equal(gate.run(fused, reference), torch.zeros(3))
    assert (fused.count, reference.count) == (1, 3)
    assert gate.disabled and not gate.verified and not gate.can_attempt_once()
    assert len(warnings_in(caplog)) == 1
    assert "correctness is preserved" in warnings_in(caplog)[0]
    assert "test_gate" in warnings_in(caplog)[0] and "differs" in warnings_in(caplog)[0]
    state = gate.state()
    assert (state.status, state.fused_calls, state.eager_calls) == ("eager", 0, 3)
    assert "differs" in state.reason


def test_exception_at_first_sight_disables(gate, caplog):
    fused, reference = Calls(RuntimeError("no kernel image")), Calls(torch.zeros(3))
    assert torch.equal(gate.run(fused, reference), torch.zeros(3))
    assert torch.equal(gate.run(fused, reference), torch.zeros(3))
    assert (fused.count, reference.count) == (1, 2)
    assert gate.disabled and gate.fallback_reason == "RuntimeError: no kernel image"
    assert len(warnings_in(caplog)) == 1


def test_exception_after_verification_disables(gate, caplog):
    reference = Calls(torch.zeros(3))
    gate.run(Calls(torch.zeros(3)), reference)
    assert gate.verified
    fused = Calls(RuntimeError("launch failed"))
    assert torch.equal(gate.run(fused, reference), torch.zeros(3))
    assert gate.disabled and not gate.verified
    assert len(warnings_in(caplog)) == 1


def test_exception_of_the_reference_propagates(gate):
    with pytest.raises(ValueError, match="bad input"):
        gate.run(Calls(torch.zeros(3)), Calls(ValueError("bad input")))
    assert not gate.disabled and not gate.verified


def test_interrupt_is_not_a_verdict(gate):
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gate.run(interrupted, Calls(torch.zeros(3)))
    assert not gate.disabled


def test_out_of_memory_is_not_a_verdict(gate, caplog):
    full, reference = Calls(torch.cuda.OutOfMemoryError("full")), Calls(torch.zeros(3))
    assert torch.equal(gate.run(full, reference), torch.zeros(3))
    assert not gate.disabled and not gate.verified
    assert gate.state().status == "eager" and "full" in gate.state().reason
    gate.run(Calls(torch.zeros(3)), reference)
    assert gate.verified
    assert torch.equal(gate.run(full, reference), torch.zeros(3))
    assert gate.verified and not warnings_in(caplog)


def test_accept_or_fallback_returns_the_one_to_use(gate):
    fused, reference = torch.ones(2), torch.ones(2)
    assert gate.accept_or_fallback(fused, reference) is fused
    assert gate.verified
    assert gate.accept_or_fallback(torch.zeros(2), reference) is reference
    assert gate.disabled
    assert gate.accept_or_fallback(fused, reference) is reference


def test_every_tensor_of_a_tuple_counts(gate):
    reference = Calls((torch.zeros(2), torch.ones(2)))
    output = gate.run(Calls((torch.zeros(2), torch.zeros(2))), reference)
    assert gate.disabled and torch.equal(output[1], torch.ones(2))


# signatures


def test_each_signature_is_verified_once(signature_gate):
    fused, reference = Calls(torch.ones(3)), Calls(torch.ones(3))
    for sig in [(1, 4096), (1, 512), (1, 4096), (1, 512)]:
        signature_gate.run(fused, reference, sig=sig)
    assert (fused.count, reference.count) == (4, 2)
    assert signature_gate.verified_sigs == {(1, 4096), (1, 512)}
    assert signature_gate.is_verified((1, 512)) and not signature_gate.is_verified((1, 17))
    assert signature_gate.state().signatures == 2


def test_a_mismatch_on_one_signature_disables_the_whole_gate(signature_gate, caplog):
    signature_gate.run(Calls(torch.ones(3)), Calls(torch.ones(3)), sig="a")
    signature_gate.run(Calls(torch.ones(3)), Calls(torch.zeros(3)), sig="b")
    assert signature_gate.disabled and not signature_gate.is_verified("a")
    fused = Calls(torch.ones(3))
    signature_gate.run(fused, Calls(torch.ones(3)), sig="a")
    assert fused.count == 0
    assert len(warnings_in(caplog)) == 1 and "at b" in warnings_in(caplog)[0]


# capture and tracing


def test_an_unverified_gate_runs_the_reference_in_capture(gate, monkeypatch):
    fused, reference = Calls(torch.ones(3)), Calls(torch.ones(3))
    monkeypatch.setattr(bitexact_gate, "_capturing", lambda: True)
    assert not gate.can_attempt_once()
    gate.run(fused, reference)
    assert gate.accept_or_fallback(fused.result, reference.result) is reference.result
    assert fused.count == 0 and not gate.verified and not gate.disabled
    assert gate.state().status == "eager" and gate.state().reason == UNVERIFIED_IN_CAPTURE


def test_a_verified_gate_runs_fused_in_capture(gate, monkeypatch):
    fused, reference = Calls(torch.ones(3)), Calls(torch.ones(3))
    gate.run(fused, reference)
    monkeypatch.setattr(bitexact_gate, "_capturing", lambda: True)
    assert gate.can_attempt_once()
    gate.run(fused, reference)
    assert (fused.count, reference.count) == (2, 1)


@pytest.mark.parametrize("verified", [False, True])
def test_tracing_always_takes_the_reference(gate, verified):
    if verified:
        gate.run(Calls(torch.ones(3)), Calls(torch.ones(3)))
    before = gate.state()

    @torch.compile(backend="eager", fullgraph=True)
    def site(x):
        return gate.run(lambda: x * 0 + 7, lambda: x + 1)

    assert torch.equal(site(torch.ones(3)), torch.full((3,), 2.0))
    assert gate.state() == before


# counters, registry, the process-wide switch


def test_counters_reset_and_verdicts_stay(gate):
    gate.run(Calls(torch.ones(3)), Calls(torch.ones(3)))
    gate.note_eager("not on CUDA")
    assert gate.state().reason == "not on CUDA" and gate.state().eager_calls == 1
    gate.reset_counters()
    state = gate.state()
    assert (state.status, state.reason, state.fused_calls, state.eager_calls) == (
        "verified",
        None,
        0,
        0,
    )


def test_a_disabled_gate_keeps_its_reason(gate):
    gate.run(Calls(torch.ones(3)), Calls(torch.zeros(3)))
    gate.note_eager("not on CUDA")
    gate.reset_counters()
    assert gate.state().status == "eager" and "differs" in gate.state().reason


def test_reset_makes_it_new(gate):
    gate.run(Calls(torch.ones(3)), Calls(torch.zeros(3)))
    gate.reset()
    assert gate.state().status == "unseen" and gate.can_attempt_once()
    gate.run(Calls(torch.ones(3)), Calls(torch.ones(3)))
    assert gate.verified


def test_living_gates_are_listed_by_name():
    gates = [BitExactFusionGate("test_zz"), BitExactFusionGate("test_aa")]
    names = [gate.name for gate in all_gates()]
    assert names == sorted(names) and set(gates) <= set(all_gates())
    del gates
    assert not {"test_zz", "test_aa"} & {gate.name for gate in all_gates()}


def test_fast_paths_off_runs_the_reference_and_touches_nothing(gate):
    fused, reference = Calls(torch.ones(3)), Calls(torch.zeros(3))
    with fast_paths(False):
        assert not fast_paths_enabled() and not gate.can_attempt_once()
        assert torch.equal(gate.run(fused, reference), torch.zeros(3))
    assert fast_paths_enabled() and fused.count == 0
    assert gate.state().status == "unseen"


def test_set_fast_paths_returns_the_previous_setting():
    assert set_fast_paths(False) is True
    assert set_fast_paths(True) is False


def test_fast_paths_are_restored_after_an_error():
    with pytest.raises(RuntimeError, match="inside"), fast_paths(False):
        raise RuntimeError("inside")
    assert fast_paths_enabled()


def test_many_threads_reach_one_verdict_and_one_warning(gate, caplog):
    barrier = threading.Barrier(8)
    outputs = []

    def call():
        barrier.wait()
        outputs.append(gate.run(lambda: torch.ones(3), lambda: torch.zeros(3)))

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outputs) == 8 and all(torch.equal(out, torch.zeros(3)) for out in outputs)
    assert gate.disabled and len(warnings_in(caplog)) == 1


# on a GPU


@pytest.mark.cuda
def test_verdicts_form_before_capture_and_replay_runs_fused(gate):
    x = torch.randn(64, 64, device="cuda")
    out = torch.zeros_like(x)

    def site():
        out.copy_(gate.run(lambda: x * 2, lambda: x + x))

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        site()
    assert not gate.verified and not gate.disabled and gate.state().reason == UNVERIFIED_IN_CAPTURE
    site()
    assert gate.verified
    fused_calls = gate.fused_calls
    fused_graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(fused_graph):
        site()
    assert gate.fused_calls == fused_calls + 1
    for captured in (graph, fused_graph):
        out.zero_()
        captured.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, x * 2)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_gpu_mismatch_in_the_last_element_is_seen(dtype):
    x = torch.randn(4096, 3072, device="cuda", dtype=dtype)
    x[17] = float("nan")
    y = x.clone()
    assert tensors_equal(x, y)
    y[-1, -1] += 1
    assert not tensors_equal(x, y)
