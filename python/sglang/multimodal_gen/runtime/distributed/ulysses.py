"""Ulysses sequence parallelism: each rank holds some tokens of every head, except in attention.

Around attention an all-to-all turns "some tokens, all heads" into "all tokens, some heads" and
back. Streams (text, image) are cut one by one into equal parts; the last parts are filled up with
copies of the last token. After the exchange the copies are dropped and the tokens stand in the
order that one rank has them in, so attention computes what it does on one rank, for fewer heads:
no mask, no other order of sums.

Shape legend: B batch, P ranks, J joint tokens, L local tokens with fillers, H heads, h = H / P,
E head size.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from sglang.multimodal_gen.runtime.distributed.parallel_state import Axis

WORD = torch.complex128  # only copied, never computed with
MAX_SHARES = 32  # kept lengths; a request has one or two


class WholeSequence:
    """The share of the only rank: everything, as it is."""

    def local(self, x: torch.Tensor, stream: int = 0, dim: int = 1) -> torch.Tensor:
        """`x` itself."""
        return x

    def whole(self, x: torch.Tensor, stream: int = 0) -> torch.Tensor:
        """`x` itself."""
        return x


WHOLE = WholeSequence()


@dataclass
class SequenceShare(WholeSequence):
    """One rank's part of streams of the given lengths, which attention sees one after another."""

    axis: Axis
    lengths: tuple[int, ...]
    device: torch.device
    _indices: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.parts = [-(-length // self.axis.size) for length in self.lengths]

    def local(self, x: torch.Tensor, stream: int = 0, dim: int = 1) -> torch.Tensor:
        """This rank's rows of `x`, whose axis `dim` has the stream's length."""
        return x.index_select(dim, self._index("local", stream, self._local_rows))

    def whole(self, x: torch.Tensor, stream: int = 0) -> torch.Tensor:
        """[B, part, ...] on every rank -> [B, length, ...] on every rank."""
        return torch.cat(self.axis.all_gather(x), dim=1)[:, : self.lengths[stream]]

    def heads(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """q, k, v of local tokens, [B, L, H, E] -> of all tokens in order, [B, J, h, E]."""
        return self._in_order(self.axis.all_to_all(self._by_rank(q, k, v)))

    def begin_heads(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> Callable[[], tuple[torch.Tensor, ...]]:
        """`heads`, whose result comes from the call."""
        send = self._by_rank(q, k, v)
        finish = self.axis.begin_all_to_all(send)
        return lambda: self._in_order(finish())

    def _by_rank(self, *rows: torch.Tensor) -> torch.Tensor:
        """q, k, v [B, L, H, E] -> [P, 3, B, L, h, E], what each rank gets. One copy of each."""
        b, tokens, heads, head_size = rows[0].shape
        ranks = self.axis.size
        send = rows[0].new_empty(ranks, len(rows), b, tokens, heads // ranks, head_size)
        to, *parts = _as_words(send, *rows)
        torch.stack([x.unflatten(2, (ranks, -1)) for x in parts], out=to.movedim(0, 3))
        return send

    def _in_order(self, received: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[P, 3, B, L, h, E] -> q, k, v of all tokens."""
        blocks, b = received.shape[1:3]
        rows = _select(received.flatten(0, 3), self._joint_index(blocks * b))
        return rows.view(blocks, b, -1, *rows.shape[1:]).unbind(0)

    def tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Attention's output of all tokens, [B, J, h E] -> of local tokens, [B, L, H E]."""
        b, ranks = x.shape[0], self.axis.size
        rows = _select(x.reshape(-1, x.shape[-1]), self._local_index(b))
        received = self.axis.all_to_all(rows.view(ranks, b, -1, x.shape[-1]))
        (words,) = _as_words(received)
        return words.movedim(0, 2).flatten(2).contiguous().view(x.dtype)

    def _index(self, kind: str, number: int, make: Callable[[int], torch.Tensor]) -> torch.Tensor:
        key = (kind, number)
        if key not in self._indices:
            self._indices[key] = make(number).to(self.device)
        return self._indices[key]

    def _local_rows(self, stream: int) -> torch.Tensor:
        return self._rows_of(self.axis.rank, stream)

    def _rows_of(self, rank: int, stream: int) -> torch.Tensor:
        part = self.parts[stream]
        first = rank * part
        return torch.arange(first, first + part).clamp(max=self.lengths[stream] - 1)

    def _joint_index(self, blocks: int) -> torch.Tensor:
        """Rows of [P, blocks, L] that are [blocks, J]: true tokens in order, no fillers."""
        return self._index("joint", blocks, self._joint_rows)

    def _joint_rows(self, blocks: int) -> torch.Tensor:
        per_rank, first, rows = sum(self.parts), 0, []
        for length, part in zip(self.lengths, self.parts, strict=True):
            token = torch.arange(length)
            rank, position = token // max(part, 1), first + token % max(part, 1)
            rows.append(torch.stack([rank, position]))
            first += part
        rank, position = torch.cat(rows, dim=1)
        block = torch.arange(blocks)[:, None]
        return ((rank * blocks + block) * per_rank + position).flatten()

    def _local_index(self, batch: int) -> torch.Tensor:
        """Rows of [B, J] that are [P, B, L]: every rank's tokens, fillers included."""
        return self._index("tokens", batch, self._rows_for_ranks)

    def _rows_for_ranks(self, batch: int) -> torch.Tensor:
        offsets = [sum(self.lengths[:i]) for i in range(len(self.lengths))]
        rows = [
            torch.cat([off + self._rows_of(rank, i) for i, off in enumerate(offsets)])
            for rank in range(self.axis.size)
        ]
        first = torch.arange(batch)[:, None] * sum(self.lengths)
        return (torch.stack(rows)[:, None] + first).flatten()


class UlyssesAttention:
    """An attention backend over sequences that are cut into parts.

    Stands in for the model's shared `AttentionBackend`. `share` must be called with the lengths of
    the joint sequence's streams before the blocks of a forward run.
    """

    def __init__(self, attention: Callable[..., torch.Tensor], axis: Axis) -> None:
        self._attention = attention
        self._axis = axis
        self._shares: dict[tuple[torch.device, tuple[int, ...]], SequenceShare] = {}
        self._share: SequenceShare | None = None

    @property
    def name(self) -> str:
        """The backend that runs on each rank."""
        return self._attention.name

    @property
    def parts(self) -> int:
        """Ranks that the heads are shared out to."""
        return self._axis.size

    def share(self, device: torch.device, *lengths: int) -> SequenceShare:
        """This rank's share of the coming forward, whose joint sequence has these streams."""
        key = (device, lengths)
        if key not in self._shares:
            if len(self._shares) >= MAX_SHARES:
                self._shares.clear()
            self._shares[key] = SequenceShare(self._axis, lengths, device)
        self._share = self._shares[key]
        return self._share

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *more: Any
    ) -> torch.Tensor:
        """Softmax attention without a mask. q, k, v: [B, L, H, E]; returns [B, L, H * E].

        `more` goes to the backend, which sees all tokens and this rank's heads.
        """
        share = self._current()
        return share.tokens(self._attention(*share.heads(q, k, v), *more))

    def begin(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> Callable[[], torch.Tensor]:
        """The same; attention runs in the call, and what is launched before overlaps with the
        exchange that comes first."""
        share = self._current()
        finish = share.begin_heads(q, k, v)
        return lambda: share.tokens(self._attention(*finish()))

    def _current(self) -> SequenceShare:
        assert self._share is not None, "share() comes before the first block"
        return self._share


def _select(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """rows[index] of contiguous rows [N, ...]."""
    (words,) = _as_words(rows.flatten(1))
    return words.index_select(0, index).view(rows.dtype).view(-1, *rows.shape[1:])


def _as_words(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors as words of 16 bytes, where all of them are made of such: a copy that is not
    contiguous takes one element a thread, and bf16 would move two bytes in each."""
    if all(map(_made_of_words, tensors)):
        return tuple(x.view(WORD) for x in tensors)
    return tensors


def _made_of_words(x: torch.Tensor) -> bool:
    a_word = WORD.itemsize // x.element_size()
    steps = (x.shape[-1], x.storage_offset(), *x.stride()[:-1])
    return x.stride(-1) == 1 and not any(step % a_word for step in steps)
