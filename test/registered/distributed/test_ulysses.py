"""Cut sequences: every length and rank count, order kept, fillers dropped, bytes unchanged."""

import pytest
import torch

from sglang.multimodal_gen.runtime.distributed.ulysses import (
    WHOLE,
    SequenceShare,
    UlyssesAttention,
)
from sglang.multimodal_gen.runtime.layers.attention import AttentionBackend, make_attention
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.thread_axis import on_every_rank

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

CPU = torch.device("cpu")
LENGTHS = [(16,), (1,), (17,), (3, 15), (1, 7), (13, 64), (512, 30), (2, 3, 5)]


def numbered(batch, length, *rest, dtype=torch.float32):
    """Values that tell apart every element."""
    count = batch * length * torch.Size(rest).numel()
    return torch.arange(count).reshape(batch, length, *rest).to(dtype)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_cut_and_gathered_a_sequence_is_what_it_was(lengths, ranks):
    streams = [numbered(2, length, 5) for length in lengths]

    def run(axis):
        share = SequenceShare(axis, lengths, CPU)
        parts = [share.local(x, i) for i, x in enumerate(streams)]
        tables = [share.local(x[0], i, dim=0) for i, x in enumerate(streams)]
        return parts, tables, [share.whole(part, i) for i, part in enumerate(parts)]

    for parts, tables, wholes in on_every_rank(ranks, run):
        for i, length in enumerate(lengths):
            assert parts[i].shape == (2, -(-length // ranks), 5)
            assert torch.equal(tables[i], parts[i][0])
            assert torch.equal(wholes[i], streams[i])


@pytest.mark.parametrize(
    ("dtype", "size"),
    [(torch.float32, 4), (torch.bfloat16, 8), (torch.bfloat16, 6), (torch.float16, 3)],
)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("batch", [1, 2])
def test_heads_meet_in_the_order_of_one_rank_and_go_back(batch, lengths, ranks, dtype, size):
    """The exchange alone, with an "attention" that returns q: every element is where it was,
    whether heads are made of 16-byte words or not, and whether v is a view of packed rows or not.
    """
    heads = 12
    q, k, v = (
        [i * 1000 + numbered(batch, length, heads, size, dtype=dtype) for length in lengths]
        for i in (1, 2, 3)
    )
    own = heads // ranks

    def run(axis):
        share = SequenceShare(axis, lengths, CPU)
        local = [torch.cat([share.local(s, i) for i, s in enumerate(x)], 1) for x in (q, k, v)]
        packed = torch.cat([local[1], local[2]], dim=2)
        met = share.heads(local[0], local[1], packed[:, :, heads:])
        for got, sent in zip(met, (q, k, v), strict=True):
            mine = torch.cat(sent, dim=1)[:, :, axis.rank * own : (axis.rank + 1) * own]
            assert torch.equal(got, mine) and got.is_contiguous()
        back = share.tokens(met[0].flatten(2))
        parts = back.split(share.parts, dim=1)
        return [share.whole(part, i) for i, part in enumerate(parts)]

    for wholes in on_every_rank(ranks, run):
        assert all(torch.equal(w, s.flatten(2)) for w, s in zip(wholes, q, strict=True))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("lengths", [(3, 15), (13, 64), (1, 35)], ids=str)
def test_attention_over_cut_sequences_has_the_bytes_of_one_rank(lengths, ranks):
    generator = torch.Generator().manual_seed(0)
    total = sum(lengths)
    q, k, v = (torch.randn(1, total, 8, 32, generator=generator) for _ in range(3))
    expected = AttentionBackend("flash")(q, k, v)

    def run(axis):
        attention = make_attention("flash", axis)
        assert isinstance(attention, UlyssesAttention) and attention.name == "flash"
        share = attention.share(CPU, *lengths)
        assert attention.share(CPU, *lengths) is share
        streams = [x.split(lengths, dim=1) for x in (q, k, v)]
        local = (torch.cat([share.local(s, i) for i, s in enumerate(x)], 1) for x in streams)
        local = list(local)
        out = attention(*local)
        assert torch.equal(attention.begin(*local)(), out)
        parts = out.split(share.parts, dim=1)
        return torch.cat([share.whole(part, i) for i, part in enumerate(parts)], dim=1)

    for got in on_every_rank(ranks, run):
        assert torch.equal(got, expected)


def test_any_bits_survive_the_words():
    """Negative zeros, infinities and NaNs with payloads, as a complex number or not."""
    bits = torch.tensor(
        [0, 1, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x8000, 0x0080] * 6, dtype=torch.int32
    )
    x = bits.to(torch.int16).view(torch.bfloat16).reshape(1, 3, 2, 8)

    def run(axis):
        share = SequenceShare(axis, (6,), CPU)
        q, _, _ = share.heads(x, x, x)
        return q.view(torch.int16), share.tokens(q.flatten(2)).view(torch.int16)

    for rank, (met, back) in enumerate(on_every_rank(2, run)):
        expected = x.view(torch.int16)
        assert torch.equal(met, torch.cat([expected[:, :, rank : rank + 1]] * 2, dim=1))
        assert torch.equal(back, expected.flatten(2))


def test_one_rank_has_the_plain_backend_and_the_same_tensors():
    from sglang.multimodal_gen.runtime.distributed.parallel_state import Axis

    attention, x = make_attention("math", Axis()), torch.ones(1, 3)
    assert type(attention) is AttentionBackend
    assert attention.share(CPU, 3, 4) is WHOLE
    assert WHOLE.local(x, 0) is x and WHOLE.whole(x, 1) is x


def test_the_shares_of_many_lengths_are_not_kept_for_ever():
    def run(axis):
        attention = UlyssesAttention(AttentionBackend("math"), axis)
        for length in range(1, 100):
            attention.share(CPU, length)
        return len(attention._shares)

    assert max(on_every_rank(2, run)) <= 32
