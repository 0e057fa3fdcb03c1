"""Attention of one token over a static cache: cache bits, accuracy, and the same bits each time."""

import pytest
import torch
from elementwise_checks import HALF_DTYPES, assert_same_bits, poison
from torch._subclasses.fake_tensor import FakeTensorMode

from sglang.kernels.ops.diffusion.triton import decode_attention as module
from sglang.kernels.ops.diffusion.triton.decode_attention import (
    CHUNK,
    can_use_decode_attention,
    decode_attention,
    decode_attention_reference,
)
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")
register_cuda_ci(est_time=60, stage="base-b-kernel-unit", runner_config="1-gpu-large")

BF16 = torch.bfloat16
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
NAMES = ("qkv", "cos", "sin", "partner", "keys", "values", "slot")
# query heads, key heads, head size: GLM-Image's first
HEADS = [(32, 2, 128), (4, 2, 16), (6, 2, 32), (3, 3, 64), (16, 1, 128), (5, 1, 256)]


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture
def any_device(monkeypatch):
    monkeypatch.setattr(module, "triton_runs_on", lambda device: True)


def inputs(heads, slots, slot, dtype=BF16, device="cuda"):
    """Tensors by name; the cache holds `slot` keys and values, and zeros after them."""
    queries, keys, size = heads
    generator = torch.Generator(device=device).manual_seed(slots + slot)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device=device)

    angles = normal(slots, size // 4).repeat(1, 2) * 3
    still = torch.ones(slots, size // 2, device=device)
    sin = torch.cat([-angles[:, : size // 4].sin(), angles[:, size // 4 :].sin()], dim=1)
    partner = torch.arange(size, device=device)
    partner[: size // 2] = partner[: size // 2].roll(size // 4)
    filled = torch.arange(slots, device=device)[:, None] < slot
    cache = [(normal(1, keys, slots, size) * filled).to(dtype) for _ in range(2)]
    cos = torch.cat([angles.cos(), still], dim=1)
    values = (
        normal(1, 1, (queries + 2 * keys) * size).to(dtype),
        cos.to(dtype),
        torch.cat([sin, 0 * still], dim=1).to(dtype),
        partner,
        *cache,
        torch.tensor([slot], device=device),
    )
    return dict(zip(NAMES, values, strict=True))


def copies(given):
    return {name: tensor.clone() for name, tensor in given.items()}


def check(given):
    """Cache bits equal eager's; the output is within rounding of exact attention."""
    fused, eager = copies(given), copies(given)
    assert can_use_decode_attention(**fused)
    decode_attention_reference(**eager)
    size = given["keys"].shape[3]
    poison(1, 1, given["qkv"].numel() - 2 * given["keys"].shape[1] * size, dtype=given["qkv"].dtype)
    out = decode_attention(**fused)
    for name in ("keys", "values"):
        assert_same_bits(fused[name], eager[name])
    exact, bound = exact_attention(given, eager)
    error = (out.double().view_as(exact) - exact).abs()
    assert bool((error <= bound).all()), f"error {float((error - bound).max())} above the bound"


def exact_attention(given, eager):
    """(float64 attention of the rotated query [Q, E], the error that the contract allows).

    UNIT is half a last place, relative. A weight is rounded to the dtype once, and the result
    once; 2^-12 covers the fp32 scores, whose errors here are below 1e-5, and exp2's.
    """
    keys, slot = eager["keys"][0].double(), int(given["slot"])
    count, _, size = keys.shape
    q = given["qkv"].view(-1, size)[: -2 * count]
    cos, sin = given["cos"][slot], given["sin"][slot]
    q = (q * cos + q[:, given["partner"]] * sin).double().view(count, -1, size)
    filled = slice(0, slot + 1)
    values = eager["values"][0, :, filled].double()
    weights = torch.softmax(q @ keys[:, filled].transpose(1, 2) * size**-0.5, dim=-1)
    exact, unit = weights @ values, UNIT[given["qkv"].dtype]
    return exact, (unit + 2.0**-12) * (weights @ values.abs()) + unit * exact.abs()


# --- without a GPU -------------------------------------------------------------------------------


def test_reference_writes_the_cache_and_attends_to_the_filled_slots():
    given = inputs((4, 2, 16), 64, 5, torch.float32, "cpu")
    eager = copies(given)
    out = decode_attention_reference(**eager)
    exact, _ = exact_attention(given, eager)
    torch.testing.assert_close(out.double().view_as(exact), exact, rtol=1e-5, atol=1e-6)
    changed = (eager["keys"] != given["keys"]).any(dim=-1)[0]
    assert changed.nonzero()[:, 1].tolist() == [5, 5]
    assert torch.equal(eager["values"][0, :, 5], given["qkv"].view(-1, 16)[-2:])
    assert out.shape == (1, 1, 64)


def test_predicate(any_device):
    given = inputs((4, 2, 16), 128, 5, device="cpu")
    fits = can_use_decode_attention
    assert fits(**given)
    qkv, keys = given["qkv"], given["keys"]
    assert not fits(**given | {"qkv": qkv.half()})
    assert not fits(**{n: t.float() if t.dtype == BF16 else t for n, t in given.items()})
    assert not fits(**given | {"qkv": qkv[..., :-8].clone()})
    assert not fits(**given | {"qkv": qkv[..., : 4 * 16].clone()})  # no query
    assert not fits(**given | {"qkv": torch.zeros(1, 1, (34 + 4) * 16, dtype=BF16)})  # 17 a key
    assert not fits(**given | {"qkv": qkv.expand(2, 1, -1).contiguous()})
    assert not fits(**given | {"values": keys[..., :8].clone()})
    odd = torch.zeros(1, 2, 96, 16, dtype=BF16)
    assert 96 % CHUNK and not fits(**given | {"keys": odd, "values": odd})
    two = keys.expand(2, -1, -1, -1).contiguous()
    assert not fits(**given | {"keys": two, "values": two})
    assert not fits(**given | {"slot": given["slot"].int()})
    assert not fits(**given | {"partner": given["partner"][:8]})
    assert not fits(**given | {"cos": given["cos"][:, :8]})


def test_cpu_tensors_are_rejected_with_advice():
    with pytest.raises(ValueError, match=r"decode_attention got qkv bfloat16.*expected CUDA"):
        decode_attention(**inputs((4, 2, 16), 64, 5, device="cpu"))


def test_fake():
    given = inputs((4, 2, 16), 64, 5, device="cpu")
    with FakeTensorMode() as mode:
        fakes = {name: mode.from_tensor(tensor) for name, tensor in given.items()}
        assert decode_attention(**fakes).shape == (1, 1, 64)


# --- on the GPU ----------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("heads", HEADS, ids=lambda h: "x".join(map(str, h)))
@pytest.mark.parametrize("slot", (0, 1, 62, 63, 64, 200, 255))
def test_heads_and_slots(heads, slot, dtype):
    check(inputs(heads, 256, slot, dtype))


@pytest.mark.cuda
@pytest.mark.parametrize("slots,slot", [(1536, 56), (1536, 1337), (1536, 1535), (5120, 5000)])
def test_sizes_of_a_picture(slots, slot):
    check(inputs((32, 2, 128), slots, slot))


@pytest.mark.cuda
def test_the_size_of_the_cache_changes_no_bit():
    given = inputs((32, 2, 128), 256, 201)
    longer = copies(given)
    for name in ("keys", "values"):
        longer[name] = torch.nn.functional.pad(longer[name], (0, 0, 0, 2048))
    assert_same_bits(decode_attention(**longer), decode_attention(**copies(given)))


@pytest.mark.cuda
def test_slots_past_the_filled_ones_change_nothing():
    given = inputs((32, 2, 128), 256, 100)
    expected = decode_attention(**copies(given))
    for name in ("keys", "values"):
        given[name][:, :, 101:] = float("nan")
    assert_same_bits(decode_attention(**given), expected)


@pytest.mark.cuda
def test_a_graph_follows_the_slot():
    given = inputs((32, 2, 128), 512, 60)
    eager = copies(given)
    decode_attention(**copies(given))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode_attention(**given)
    for slot in range(60, 300, 7):
        for tensors in (given, eager):
            tensors["slot"].fill_(slot)
        graph.replay()
        assert_same_bits(out, decode_attention(**eager))
    assert_same_bits(given["keys"], eager["keys"])
