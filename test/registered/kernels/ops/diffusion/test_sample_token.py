"""A token drawn without a sort: the token of the eager chain, in place."""

import pytest
import torch
from elementwise_checks import HALF_DTYPES
from torch._subclasses.fake_tensor import FakeTensorMode

from sglang.kernels.ops.diffusion.triton import sample_token as module
from sglang.kernels.ops.diffusion.triton.sample_token import (
    MAX_VOCABULARY,
    can_use_sample_token,
    choose_reference,
    sample_token,
    sample_token_reference,
)
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")
register_cuda_ci(est_time=110, stage="base-b-kernel-unit", runner_config="1-gpu-large")

BF16 = torch.bfloat16
NAMES = ("logits", "noise", "wide", "tokens", "token", "step", "slot")
# temperature, top_k, top_p
RULES = [(0.9, 0, 0.75), (1.0, 50, 1.0), (1.3, 5, 0.9), (1.0, 1, 1.0), (0.7, 0, 0.3)]
RULES += [(1.0, 0, 1.0), (1.0, 0, 0.999), (1.0, 0, 0.0), (1.0, 3, 0.0), (1.0, 10**6, 0.5)]


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture
def any_device(monkeypatch):
    monkeypatch.setattr(module, "triton_runs_on", lambda device: True)


def inputs(size, dtype=BF16, device="cuda", seed=0, scale=1.0, rows=4, step=1, noise=True):
    """Tensors by name."""
    generator = torch.Generator(device=device).manual_seed(seed)
    integers = {"device": device, "dtype": torch.int64}
    draws = torch.empty(rows, size, device=device).exponential_(generator=generator)
    values = (
        (torch.randn(1, 1, size, generator=generator, device=device) * scale).to(dtype),
        draws if noise else None,
        torch.full((1, size), float("nan"), device=device),
        torch.full((rows,), -1, **integers),
        torch.full((1, 1), -1, **integers),
        torch.tensor([step], **integers),
        torch.tensor([7], **integers),
    )
    return dict(zip(NAMES, values, strict=True))


def copies(given):
    return {n: None if tensor is None else tensor.clone() for n, tensor in given.items()}


def named(function, given, rule=(1.0, 0, 1.0)):
    """The written tensors after the call."""
    after = copies(given)
    function(*after.values(), *rule)
    return [after[name] for name in NAMES[2:]]


def settled(given, rule):
    """Whether the answer does not hang on the last roundings: in float64, cumulative masses stay
    clear of 1 - top_p, and the best score of the second."""
    temperature, top_k, top_p = rule
    logits = given["logits"].double().flatten() / temperature
    if 0 < top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
    ascending, order = logits.sort(stable=True)
    cumulative = ascending.softmax(0).cumsum(0)
    removed = (cumulative <= 1 - top_p) & (top_p < 1)
    removed[-1] = False
    clear = top_p in (0.0, 1.0) or (cumulative - (1 - top_p)).abs().min() > 2e-6
    kept = logits.masked_fill(removed.scatter(0, order, removed), -torch.inf)
    scores = (kept.softmax(0) / given["noise"][given["step"]].double()[0]).topk(2).values
    return bool(clear and scores[0] > scores[1] * (1 + 1e-5))


# --- without a GPU -------------------------------------------------------------------------------


def test_reference_writes_in_place():
    given = inputs(64, device="cpu")
    wide, tokens, token, step, slot = named(sample_token_reference, given, RULES[0])
    logits = given["logits"].float().view(1, -1)
    chosen = choose_reference(logits, given["noise"][1:2], *RULES[0])
    assert torch.equal(wide, logits)
    assert tokens.tolist() == [-1, int(chosen), -1, -1] and token.tolist() == [[int(chosen)]]
    assert step.tolist() == [2] and slot.tolist() == [8]


def test_a_top_k_of_the_whole_vocabulary_is_none():
    given = inputs(64, device="cpu")
    logits = given["logits"].float().view(1, -1)
    for row in given["noise"][:, None]:
        tokens = {int(choose_reference(logits, row, 0.9, k, 0.75)) for k in (0, 64, 1000)}
        assert len(tokens) == 1


def test_predicate(any_device):
    given = inputs(64, device="cpu")
    assert can_use_sample_token(**given)
    assert can_use_sample_token(**inputs(64, device="cpu", noise=False))
    assert can_use_sample_token(**inputs(MAX_VOCABULARY, device="cpu", rows=2))
    assert not can_use_sample_token(**inputs(MAX_VOCABULARY + 1, device="cpu", rows=2))
    wrong = {
        "logits": given["logits"].float(),
        "noise": given["noise"][:3],
        "wide": given["wide"][:, :8],
        "tokens": given["tokens"].int(),
        "token": given["token"][0],
        "step": given["step"].int(),
        "slot": given["slot"][None],
    }
    for name, tensor in wrong.items():
        assert not can_use_sample_token(**given | {name: tensor}), name
    assert not can_use_sample_token(**given | {"noise": given["noise"].t().contiguous().t()})


def test_cpu_tensors_are_rejected_with_advice():
    with pytest.raises(ValueError, match=r"sample_token got logits bfloat16.*expected CUDA"):
        sample_token(**inputs(64, device="cpu"))


def test_fake():
    given = inputs(64, device="cpu")
    with FakeTensorMode() as mode:
        assert sample_token(*(mode.from_tensor(tensor) for tensor in given.values())) is None


# --- on the GPU ----------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("size", (1, 64, 1000, 16384, 16512, MAX_VOCABULARY))
def test_the_token_is_eagers(size, rule):
    compared = 0
    for seed in range(12):
        for scale in (0.05, 1.0, 5.0):
            given = inputs(size, HALF_DTYPES[seed % 2], seed=seed, scale=scale, rows=3)
            again = named(sample_token, given, rule)
            assert all(map(torch.equal, again, named(sample_token, given, rule)))
            if size > 1 and not settled(given, rule):
                continue
            expected = named(sample_token_reference, given, rule)
            assert all(map(torch.equal, again, expected)), (seed, scale)
            compared += 1
    assert compared >= 12


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_greedy(dtype):
    for seed in range(20):
        given = inputs(16384, dtype, seed=seed, noise=False)
        given["logits"][..., seed * 7] = given["logits"].max() + 1
        assert all(map(torch.equal, named(sample_token, given),
                       named(sample_token_reference, given)))  # fmt: skip


@pytest.mark.cuda
def test_equal_logits_at_the_edge_go_in_order():
    given = inputs(64, rows=2)
    given["logits"].zero_()
    given["noise"].fill_(1.0)
    for left_out in (0, 1, 31, 63):
        rule = (1.0, 0, 1 - (left_out + 0.5) / 64)
        assert named(sample_token, given, rule)[2].item() == left_out


@pytest.mark.cuda
def test_a_temperature_that_is_not_positive_is_refused():
    with pytest.raises(ValueError, match="temperature 0.0"):
        sample_token(**inputs(64), temperature=0.0)


@pytest.mark.cuda
def test_a_graph_names_one_token_after_another():
    given = inputs(16384, rows=40, step=0)
    expected = copies(given)
    sample_token(**copies(given), temperature=0.9, top_p=0.75)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sample_token(**given, temperature=0.9, top_p=0.75)
    for _ in range(40):
        graph.replay()
        sample_token(**expected, temperature=0.9, top_p=0.75)
    assert torch.equal(given["tokens"], expected["tokens"])
    assert given["step"].item() == 40 and given["tokens"].unique().numel() > 20
