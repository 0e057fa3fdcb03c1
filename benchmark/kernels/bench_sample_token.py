"""A token drawn from GLM-Image's vocabulary, against the eager chain with its sort.

python benchmark/kernels/bench_sample_token.py

Each call names the same token again: step and slot are set back, which costs both arms the same.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from timing import BenchRow, bench_row  # noqa: E402

from sglang.kernels.ops.diffusion.triton.sample_token import (  # noqa: E402
    sample_token,
    sample_token_reference,
)

VOCABULARY, TOKENS = 16384, 8
RULES = ((0.9, 0, 0.75), (1.0, 50, 1.0))  # GLM-Image's rule, and the library's default


def row(rule: tuple[float, int, float]) -> BenchRow:
    logits = torch.randn(1, 1, VOCABULARY, device="cuda", dtype=torch.bfloat16)
    noise = torch.empty(TOKENS, VOCABULARY, device="cuda").exponential_()
    wide = torch.empty(1, VOCABULARY, device="cuda")
    tokens, token, step, slot = (
        torch.zeros(shape, device="cuda", dtype=torch.int64)
        for shape in ((TOKENS,), (1, 1), (1,), (1,))
    )

    def call(function: Callable[..., None]) -> torch.Tensor:
        step.zero_()
        function(logits, noise, wide, tokens, token, step, slot, *rule)
        return token

    return bench_row(
        "sample_token",
        (VOCABULARY,),
        torch.bfloat16,
        lambda: call(sample_token_reference).clone(),
        lambda: call(sample_token),
        (2 + 4 + 4) * VOCABULARY,
    )


def rows() -> Iterator[BenchRow]:
    """One row a rule."""
    with torch.no_grad():
        yield from map(row, RULES)


if __name__ == "__main__":
    for line in rows():
        print(line)
