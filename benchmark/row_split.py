"""Where cutting a sequence keeps the bytes: every GEMM and attention of a step, whole and in parts.

    python benchmark/row_split.py --json benchmark/results/h200/row_split.json

One GPU is enough. For each linear of the three models at 1024x1024: the rows of one rank of 2, 4
and 8, computed alone, against the same rows of the whole product; and attention over some heads
against the same heads of all. `wrong_ppm` is how many elements in a million differ.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "benchmark")]

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from sglang.multimodal_gen.configs.model_specs import DUMMY_CONFIGS, read_json  # noqa: E402
from sglang.multimodal_gen.runtime.layers.attention import AttentionBackend  # noqa: E402

RANKS = (2, 4, 8)
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class SplitRow:
    """One row of row_split.json."""

    model: str
    op: str  # "linear" | "attention"
    shape: list[int]  # rows, inner, out | tokens, heads, head size
    bias: bool
    ranks: int
    equal: bool
    wrong_ppm: float
    largest_error: float


def linears(model: str) -> Iterator[tuple[tuple[int, int, int], bool]]:
    """((rows, inner, out), has bias) of every linear that runs on cut sequences."""
    folder = {"flux1-dev": "FLUX.1-dev", "ernie-image": "ERNIE-Image", "glm-image": "GLM-Image"}
    config = read_json(DUMMY_CONFIGS / folder[model] / "transformer" / "config.json")
    if model == "ernie-image":
        dim, ffn = config["hidden_size"], config["ffn_hidden_size"]
        for rows in (4216, 4097):
            for inner, out in ((dim, dim), (dim, 3 * dim), (dim, ffn), (dim, 2 * ffn), (ffn, dim)):
                yield (rows, inner, out), False
        return
    dim = config["num_attention_heads"] * config["attention_head_dim"]
    inners_and_outs = ((dim, dim), (dim, 3 * dim), (dim, 4 * dim), (4 * dim, dim))
    for rows in (4096, 512) if model == "flux1-dev" else (4096, 264, 1, 4360, 4097):
        for inner, out in inners_and_outs:
            yield (rows, inner, out), True
    if model == "flux1-dev":
        for inner, out in ((dim, 3 * dim), (dim, 4 * dim), (5 * dim, dim)):
            yield (4608, inner, out), True


ATTENTIONS = {
    "flux1-dev": [(4608, 24, 128)],
    "ernie-image": [(4216, 32, 128), (4097, 32, 128)],
    "glm-image": [(4360, 32, 128), (4097, 32, 128)],
}


def measure(model: str, device: torch.device, attention: str) -> Iterator[SplitRow]:
    """The rows of one model."""
    for shape, bias in linears(model):
        yield from split_linear(model, shape, bias, device)
    for shape in ATTENTIONS[model]:
        yield from split_attention(model, shape, device, AttentionBackend(attention))


def split_linear(
    model: str, shape: tuple[int, int, int], bias: bool, device: torch.device
) -> Iterator[SplitRow]:
    """One linear, in parts of its rows."""
    rows, inner, out = shape
    x, weight = _random(device, rows, inner), _random(device, out, inner) / inner**0.5
    offset = _random(device, out) if bias else None
    whole = F.linear(x, weight, offset)
    for ranks in RANKS:
        part = -(-rows // ranks)
        first = F.linear(x[:part].clone(), weight, offset)
        yield _compared(model, "linear", shape, bias, ranks, first, whole[:part])


def split_attention(
    model: str, shape: tuple[int, int, int], device: torch.device, attention: AttentionBackend
) -> Iterator[SplitRow]:
    """One attention, in parts of its heads."""
    tokens, heads, size = shape
    q, k, v = (_random(device, 1, tokens, heads, size) for _ in range(3))
    whole = attention(q, k, v).unflatten(2, (heads, size))
    for ranks in RANKS:
        own = slice(0, heads // ranks)
        first = attention(*(x[:, :, own].contiguous() for x in (q, k, v)))
        expected = whole[:, :, own].flatten(2)
        yield _compared(model, "attention", shape, False, ranks, first, expected)


def _compared(
    model: str,
    op: str,
    shape: tuple[int, ...],
    bias: bool,
    ranks: int,
    got: torch.Tensor,
    expected: torch.Tensor,
) -> SplitRow:
    error = (got.double() - expected.double()).abs()
    return SplitRow(
        model=model,
        op=op,
        shape=list(shape),
        bias=bias,
        ranks=ranks,
        equal=torch.equal(got, expected),
        wrong_ppm=1e6 * (error != 0).double().mean().item(),
        largest_error=error.max().item(),
    )


def _random(device: torch.device, *shape: int) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device=device, dtype=DTYPE)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write this result file")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("row_split: got no CUDA GPU, expected one; run it on a machine that has it")
        return 1
    from environment import check_result_file, write_result_file
    from results import print_table

    if args.json:
        check_result_file(args.json)
    device, rows = torch.device("cuda"), []
    for model in ATTENTIONS:
        found = [asdict(row) for row in measure(model, device, "cudnn")]
        print_table(found)
        rows += found
    if args.json:
        write_result_file(args.json, {"rows": rows}, num_gpus=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
