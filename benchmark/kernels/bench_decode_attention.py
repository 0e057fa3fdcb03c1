"""One token's rotation, cache write and attention, against the eager chain, at GLM-Image's prior.

python benchmark/kernels/bench_decode_attention.py

`equal` says no by design: the attention is the kernel's own definition (its cache is bit-equal).
Eager reads all slots of the cache, the kernel the filled ones; bytes count the filled ones.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from timing import BenchRow, bench_row  # noqa: E402

from sglang.kernels.ops.diffusion.triton.decode_attention import (  # noqa: E402
    decode_attention,
    decode_attention_reference,
)

QUERIES, KEYS, HEAD_DIM, SLOTS = 32, 2, 128, 1536
FILLED = (63, 700, 1337)


def row(slot: int) -> BenchRow:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    qkv = normal(1, 1, (QUERIES + 2 * KEYS) * HEAD_DIM)
    tables = normal(SLOTS, HEAD_DIM), normal(SLOTS, HEAD_DIM)
    partner = torch.arange(HEAD_DIM, device="cuda").roll(32)
    cache = normal(1, KEYS, SLOTS, HEAD_DIM), normal(1, KEYS, SLOTS, HEAD_DIM)
    arguments = (qkv, *tables, partner, *cache, torch.tensor([slot], device="cuda"))
    return bench_row(
        "decode_attention",
        (slot + 1, QUERIES, KEYS, HEAD_DIM),
        torch.bfloat16,
        lambda: decode_attention_reference(*arguments),
        lambda: decode_attention(*arguments),
        2 * HEAD_DIM * (2 * KEYS * (slot + 1) + 2 * (QUERIES + KEYS)),
    )


def rows() -> Iterator[BenchRow]:
    """One row a filling of the cache."""
    with torch.no_grad():
        yield from map(row, FILLED)


if __name__ == "__main__":
    for line in rows():
        print(line)
