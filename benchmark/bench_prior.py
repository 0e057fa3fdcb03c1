"""Milliseconds a token of GLM-Image's prior at its published size, on random weights.

    python benchmark/bench_prior.py --width 1024 --height 1024

Arms: `graph` names a whole picture's tokens, `eager` the same loop without the graph and
`transformers` the library's `generate` name --tokens of them. The last lines say whether graph and
eager loop name the same tokens, and which greedy token is the first to differ from `generate`'s,
whose growing cache rounds otherwise.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "benchmark")]

PROMPT = "a shop sign that says 'OPEN', at night, in the rain"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--height", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=64, help="tokens of the slow arms")
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    import torch

    if not torch.cuda.is_available():
        print("bench_prior: got no CUDA GPU, expected one; run it on a machine that has it")
        return 1
    from sglang.multimodal_gen.runtime.managers.numeric_switches import numeric_switches

    device = torch.device("cuda")
    with torch.inference_mode(), numeric_switches(device):
        run(load_model(device), args, device)
    return 0


def load_model(device: Any) -> Any:
    """The text model of the published size in bfloat16, with random weights."""
    import torch
    from transformers import GlmImageForConditionalGeneration

    from sglang.multimodal_gen.configs.model_specs import DUMMY_CONFIGS
    from sglang.multimodal_gen.runtime.loader.component_loader import ComponentLoader

    loader = ComponentLoader(DUMMY_CONFIGS / "GLM-Image", dummy=True, device=device)
    return loader.transformers_model(
        "vision_language_encoder", GlmImageForConditionalGeneration, torch.bfloat16, device
    )


def run(model: Any, args: argparse.Namespace, device: Any) -> None:
    """Measure the arms and print the table and the comparisons."""
    import torch

    from sglang.kernels.ops.diffusion.bitexact_gate import fast_paths
    from sglang.multimodal_gen.runtime.loader.dummy_glm import GlmByteProcessor
    from sglang.multimodal_gen.runtime.models.glm_image_ar import (
        GLM_AR_GRAPH,
        GlmImageDecoder,
        SamplingRule,
        exponential_noise,
    )

    processor = GlmByteProcessor(model.config.image_start_token_id)
    size = {"target_h": args.height, "target_w": args.width, "return_tensors": "pt"}
    inputs = {name: value.to(device) for name, value in processor(text=[PROMPT], **size).items()}
    ids = inputs["input_ids"]
    grids = [tuple(grid[1:]) for grid in inputs["image_grid_thw"].tolist()][::-1]
    columns = grids[0][1]
    few = [(-(-args.tokens // columns), columns)]  # the first rows of the preview
    few_count = few[0][0] * columns
    decoder = GlmImageDecoder(model, SamplingRule(temperature=0.9, top_k=0, top_p=0.75))
    count = sum(rows * columns for rows, columns in grids)
    generator = torch.Generator().manual_seed(0)
    noise = exponential_noise(generator, count, decoder.vocabulary).to(device)

    def named(grids: list, noise: torch.Tensor | None, fast: bool) -> torch.Tensor:
        with fast_paths(fast):
            return decoder.generate(ids, grids, noise)

    def library() -> torch.Tensor:
        out = model.generate(**inputs, max_new_tokens=few_count, do_sample=False)
        return out[0, ids.shape[1] :]

    arms = {
        "graph": (count, lambda: named(grids, noise, True)),
        "eager": (few_count, lambda: named(few, noise[:few_count], False)),
        "transformers": (few_count, library),
    }
    for name, (tokens, arm) in arms.items():
        seconds = median_seconds(arm)
        print(
            f"{name:13} {tokens:5} tokens {seconds:8.3f} s {1e3 * seconds / tokens:8.3f} ms/token"
        )
    sampled = (named(few, noise[:few_count], fast) for fast in (True, False))
    print("graph and eager loop name the same tokens:", torch.equal(*sampled))
    differing = (library() != named(few, None, False)).nonzero().flatten().tolist()
    print("first greedy token that differs from generate's:", differing[0] if differing else None)
    print(GLM_AR_GRAPH.state())


def median_seconds(arm: Callable[[], Any], runs: int = 3) -> float:
    """Median of `runs` after one that is dropped."""
    import torch

    times = []
    for _ in range(runs + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        arm()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[runs // 2]


if __name__ == "__main__":
    sys.exit(main())
