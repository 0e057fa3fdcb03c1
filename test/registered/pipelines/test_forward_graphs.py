"""A forward as a CUDA graph: eager on other devices; equal, counted and evicted on the GPU."""

import pytest
import torch

from sglang.kernels.ops.diffusion.bitexact_gate import BitExactFusionGate, fast_paths
from sglang.multimodal_gen.runtime.layers.fused_site import observe_sites
from sglang.multimodal_gen.runtime.pipelines import forward_graphs
from sglang.multimodal_gen.runtime.pipelines.forward_graphs import FORWARD_GRAPH, ForwardGraphs
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")
register_cuda_ci(est_time=20, stage="base-b-kernel-unit", runner_config="1-gpu-large")

SITE = BitExactFusionGate("test.site_in_a_graph")


class Forward:
    """Many small launches, which a graph saves; counts how often Python ran it."""

    def __init__(self, launches=200):
        self.calls, self.launches = 0, launches

    def __call__(self, x, pair, optional=None):
        self.calls += 1
        y = SITE.run(lambda: x + 1, lambda: x + 1)
        for _ in range(self.launches):
            y = y * 1.01 + pair[0]
        return y if optional is None else y - optional


@pytest.fixture
def always_captured(monkeypatch):
    """Forwards this small: what launching takes of their time is a matter of chance."""
    monkeypatch.setattr(forward_graphs, "HOST_BOUND", 0.0)


@pytest.fixture
def graphs(always_captured):
    FORWARD_GRAPH.reset()
    SITE.reset()
    return ForwardGraphs(Forward())


def arguments(seed, rows=8, device="cuda"):
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(rows, 16, generator=generator).to(device) for _ in range(2))
    return x, (y, 3)


def eager(*args):
    with fast_paths(False):
        return Forward()(*args)


@torch.inference_mode()
def test_on_the_cpu_every_call_is_eager(graphs):
    for seed in range(4):
        args = arguments(seed, device="cpu")
        assert torch.equal(graphs("plain", *args), eager(*args))
    assert graphs._forward.calls == 4 and FORWARD_GRAPH.state().status == "unseen"


class FakeGpu:
    """Stands for a GPU in the decisions: a forward takes `launch` seconds of the host and `total`
    in all; replays take a tenth of the launches."""

    def __init__(self, monkeypatch, launch, total):
        self.now, self.launch, self.total, self.captures, self.replays = 0.0, launch, total, 0, 0
        self.busy_until = 0.0
        monkeypatch.setattr(forward_graphs, "_capturable", lambda leaves: True)
        monkeypatch.setattr(forward_graphs, "CapturedForward", self.capture)
        monkeypatch.setattr(forward_graphs.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)

    def synchronize(self):
        self.now = max(self.now, self.busy_until)

    def forward(self, x):
        self.busy_until = self.now + self.total
        self.now += self.launch
        return x + 1

    def capture(self, forward, args):
        self.captures += 1
        return self

    def replay(self, args):
        self.replays += 1
        self.busy_until = self.now + max(self.total - 0.9 * self.launch, 0.1 * self.launch)
        return args[0] + 1


@pytest.mark.parametrize(
    "launch,total,captures,kept",
    [(0.050, 0.051, 1, 1), (0.050, 0.060, 1, 1), (0.030, 0.120, 0, 0)],
    ids=["host-bound", "nearly", "busy GPU"],
)
@torch.inference_mode()
def test_only_a_host_bound_forward_is_captured(monkeypatch, launch, total, captures, kept):
    FORWARD_GRAPH.reset()
    gpu = FakeGpu(monkeypatch, launch, total)
    graphs, x = ForwardGraphs(gpu.forward), torch.zeros(3)
    for _ in range(6):
        assert torch.equal(graphs("plain", x), x + 1)
    assert gpu.captures == captures
    assert sum(graph is not None for graph in graphs._graphs.values()) == kept
    assert (gpu.replays > 3) == bool(kept)
    FORWARD_GRAPH.reset()


@torch.inference_mode()
def test_kinds_without_end_are_forgotten(monkeypatch):
    monkeypatch.setattr(forward_graphs, "MAX_KINDS", 4)
    FORWARD_GRAPH.reset()
    graphs = ForwardGraphs(FakeGpu(monkeypatch, 0.03, 0.12).forward)
    for length in range(1, 40):
        for _ in range(3):
            graphs("plain", torch.zeros(length))
    assert len(graphs._visits) <= 4 and len(graphs._graphs) <= 4
    FORWARD_GRAPH.reset()


@pytest.mark.cuda
@torch.inference_mode()
def test_replays_equal_eager_whatever_the_values(graphs):
    for seed in (0, 1, 2, 3, 2, 0):  # A, B, ..., A gives A
        args = arguments(seed)
        assert torch.equal(graphs("plain", *args), eager(*args))
    before = graphs._forward.calls
    first, second = arguments(7), arguments(8)
    kept = graphs("plain", *first)
    graphs("plain", *second)
    assert torch.equal(kept, eager(*first)), "an output must not change with the next replay"
    assert graphs._forward.calls == before, "a replay runs no Python"
    assert FORWARD_GRAPH.state().status == "verified"


@pytest.mark.cuda
@torch.inference_mode()
def test_every_kind_of_input_has_its_own_graph(graphs):
    for _ in range(4):
        for rows in (8, 9):
            for variant in ("plain", "high"):
                args = arguments(rows, rows)
                assert torch.equal(graphs(variant, *args), eager(*args))
                optional = torch.ones(rows, 16, device="cuda")
                got = graphs(variant, *args, optional)
                assert torch.equal(got, eager(*args, optional))
    assert len(FORWARD_GRAPH.verified_sigs) == 8
    kept = [graph for graph in graphs._graphs.values() if graph is not None]
    assert len(kept) <= forward_graphs.MAX_GRAPHS


@pytest.mark.cuda
@torch.inference_mode()
def test_gates_count_one_call_for_each_forward_asked_for(graphs):
    for seed in range(5):
        graphs("plain", *arguments(seed))
    assert (SITE.fused_calls, SITE.eager_calls) == (5, 0)
    assert FORWARD_GRAPH.fused_calls == 3, "all but the first two"


@pytest.mark.cuda
@torch.inference_mode()
def test_a_graph_that_saves_nothing_is_dropped(graphs, monkeypatch):
    monkeypatch.setattr(forward_graphs, "WORTHWHILE", 0.0)
    for seed in range(4):
        args = arguments(seed)
        assert torch.equal(graphs("plain", *args), eager(*args))
    assert list(graphs._graphs.values()) == [None]


@pytest.mark.cuda
@torch.inference_mode()
def test_dropped_graphs_are_captured_anew(graphs):
    for _ in range(2):
        for seed in range(4):
            args = arguments(seed)
            assert torch.equal(graphs("plain", *args), eager(*args))
        assert len(graphs._graphs) == 1
        forward_graphs.drop_all_graphs()
        assert not graphs._graphs


@pytest.mark.cuda
@torch.inference_mode()
def test_fast_paths_off_and_observed_runs_are_eager(graphs):
    for seed in range(4):
        graphs("plain", *arguments(seed))
    before = graphs._forward.calls
    with fast_paths(False):
        graphs("plain", *arguments(1))
    with observe_sites():
        graphs("plain", *arguments(1))
    assert graphs._forward.calls == before + 2


@pytest.mark.cuda
@torch.inference_mode()
def test_a_forward_whose_replay_differs_runs_eagerly_for_good(always_captured, caplog):
    FORWARD_GRAPH.reset()
    state = {"calls": 0}

    def forgetful(x):
        state["calls"] += 1  # a replay does not see this change
        return x + state["calls"]

    graphs, x = ForwardGraphs(forgetful), torch.zeros(4, device="cuda")
    results = [float(graphs("plain", x)[0]) for _ in range(4)]
    assert FORWARD_GRAPH.disabled and results == sorted(results)
    assert "correctness is preserved" in caplog.text
    FORWARD_GRAPH.reset()


@pytest.mark.cuda
@torch.inference_mode()
def test_a_forward_that_cannot_be_captured_runs_eagerly(always_captured):
    FORWARD_GRAPH.reset()

    def reads_back(x):
        return x * float(x.sum())  # a synchronization, which a capture forbids

    graphs, x = ForwardGraphs(reads_back), torch.ones(4, device="cuda")
    for _ in range(4):
        assert graphs("plain", x).tolist() == [4.0] * 4
    assert FORWARD_GRAPH.disabled
    FORWARD_GRAPH.reset()
