"""The arms, comparisons and profile of `bench_prior.py`."""

import contextlib
import hashlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from results import Row

from sglang.kernels.ops.diffusion.bitexact_gate import fast_paths
from sglang.multimodal_gen.configs.model_specs import DUMMY_CONFIGS
from sglang.multimodal_gen.runtime.loader.component_loader import ComponentLoader
from sglang.multimodal_gen.runtime.loader.dummy_glm import GlmByteProcessor
from sglang.multimodal_gen.runtime.models import glm_image_ar
from sglang.multimodal_gen.runtime.models.glm_image_ar import (
    GLM_AR_GRAPH,
    GLM_AR_KERNELS,
    GlmImageDecoder,
    Grid,
)
from sglang.multimodal_gen.runtime.models.glm_image_ar_sampling import (
    NoiseRows,
    SamplingRule,
    exponential_noise,
)

PROMPT = "a shop sign that says 'OPEN', at night, in the rain"
RULE = SamplingRule(temperature=0.9, top_k=0, top_p=0.75)
WEIGHT_BYTES_READ = 2  # bfloat16
PROFILED_STEPS = 8


@dataclass
class PriorBench:
    """A prior of random weights and one picture to name. `few`: the first rows of the preview."""

    model: Any
    inputs: dict[str, torch.Tensor]
    grids: list[Grid]
    few: list[Grid]
    noise: torch.Tensor  # float32 [N, V]
    decoder: GlmImageDecoder

    @classmethod
    def load(cls, device: torch.device, height: int, width: int, tokens: int) -> "PriorBench":
        model = load_model(device)
        processor = GlmByteProcessor(model.config.image_start_token_id)
        size = {"target_h": height, "target_w": width, "return_tensors": "pt"}
        inputs = {k: v.to(device) for k, v in processor(text=[PROMPT], **size).items()}
        grids = [tuple(grid[1:]) for grid in inputs["image_grid_thw"].tolist()][::-1]
        few = [(-(-tokens // grids[0][1]), grids[0][1])]
        decoder = GlmImageDecoder(model, RULE)
        generator = torch.Generator().manual_seed(0)
        noise = exponential_noise(generator, count_of(grids), decoder.vocabulary).to(device)
        return cls(model, inputs, grids, few, noise, decoder)

    def graph(self, runs: int) -> Row:
        """All tokens, each step a replay of a proven graph."""
        GLM_AR_GRAPH.reset()  # what is verified anew has compiled before it is captured
        return self._row("graph", self.grids, runs, partial(self._named, self.grids))

    def eager(self) -> Row:
        """All tokens by the same loop with fast paths off."""
        with fast_paths(False):
            self._named(self.few)
            return self._row("eager", self.grids, 1, partial(self._named, self.grids), warm=False)

    def plain(self) -> Row:
        """Few tokens, aten operations alone, in a graph."""
        with aten_only():
            return self._row("plain graph", self.few, 1, partial(self._named, self.few))

    def transformers(self) -> Row:
        """Few tokens by the library, greedy."""
        return self._row("transformers", self.few, 1, lambda: self._library().sequences)

    def comparison(self, rows: list[Row]) -> dict[str, Any]:
        """What the arms say of each other; the library is compared on the greedy tokens."""
        md5 = {row["arm"]: row["md5"] for row in rows}
        same = "graph" in md5 and md5["graph"] == md5.get("eager")
        with fast_paths(False):
            ours = self._greedy()
        with aten_only():
            plain = self._greedy()
        out = self._library()
        tokens = out.sequences[0, self.inputs["input_ids"].shape[1] :]
        logits = torch.cat(list(out.logits)).float()
        step_bytes = WEIGHT_BYTES_READ * self._weights_a_token()
        return {
            "graph and eager name the same tokens": same,
            "floor at 4.24 TB/s, ms a token": round(step_bytes / 4.24e9, 3),
            "step": self._step(),
            "graph gate": str(GLM_AR_GRAPH.state()),
            **_versus("generate", ours, (tokens, logits)),
            **_versus("the aten step", ours, plain),
            **_versus("generate, aten step", plain, (tokens, logits)),
        }

    def families(self) -> list[Row]:
        """Kernels of one step by name: launches, microseconds and share."""
        ids = self.inputs["input_ids"]
        with glm_image_ar.sdpa(ids.device):
            state = self.decoder.start(ids, self.grids, self.noise)
            self.decoder.advance(state)
            graph = glm_image_ar._capture(partial(self.decoder.advance, state))
            for _ in range(700):  # a cache that is half full
                graph.replay()
            torch.cuda.synchronize()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
                for _ in range(PROFILED_STEPS):
                    graph.replay()
                torch.cuda.synchronize()
        return _by_name(seen.key_averages())

    def _named(self, grids: list[Grid]) -> torch.Tensor:
        ids, count = self.inputs["input_ids"], count_of(grids)
        generator = torch.Generator().manual_seed(0)
        noise = NoiseRows(generator, count, self.decoder.vocabulary, ids.device)
        return self.decoder.generate(ids, grids, noise)

    def _library(self) -> Any:
        return self.model.generate(
            **self.inputs,
            max_new_tokens=count_of(self.few),
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )

    def _step(self) -> str:
        ids = self.inputs["input_ids"]
        with glm_image_ar.sdpa(ids.device):
            fused = self.decoder.start(ids, self.few, None).fused
        return "kernels" if fused else f"aten operations: {GLM_AR_KERNELS.state().reason}"

    def _greedy(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens [n], logits [n, V]) of the loop without a graph."""
        ids = self.inputs["input_ids"]
        with glm_image_ar.sdpa(ids.device):
            state = self.decoder.start(ids, self.few, None)
            logits = [state.logits.clone()]
            for _ in range(count_of(self.few) - 1):
                self.decoder.advance(state)
                logits.append(state.logits.clone())
        return state.tokens, torch.cat(logits)

    def _row(
        self,
        arm: str,
        grids: list[Grid],
        runs: int,
        call: Callable[[], torch.Tensor],
        warm: bool = True,
    ) -> Row:
        seconds, tokens = median_seconds(call, runs, warm)
        count, total = count_of(grids), count_of(self.grids) + 1  # the reference also names an end
        return {
            "model": "glm-image",
            "arm": arm,
            "tokens": count,
            "seconds": round(seconds, 4),
            "ms_per_token": round(1e3 * seconds / count, 4),
            f"seconds_of_{total}": round(seconds * total / count, 3),
            "md5": hashlib.md5(tokens.cpu().numpy().tobytes()).hexdigest(),
        }

    def _weights_a_token(self) -> int:
        layers = sum(p.numel() for p in self.decoder.text.layers.parameters())
        return layers + self.decoder.lm_head.weight.numel()


def load_model(device: torch.device) -> Any:
    """The text model of the published size in bfloat16, with random weights."""
    from transformers import GlmImageForConditionalGeneration

    loader = ComponentLoader(DUMMY_CONFIGS / "GLM-Image", dummy=True, device=device)
    return loader.transformers_model(
        "vision_language_encoder", GlmImageForConditionalGeneration, torch.bfloat16, device
    )


@contextlib.contextmanager
def aten_only() -> Iterator[None]:
    """Steps of aten operations in the block, whatever the kernels could take."""
    original = glm_image_ar.unfused_reason
    glm_image_ar.unfused_reason = lambda *arguments: "measured without"
    try:
        yield
    finally:
        glm_image_ar.unfused_reason = original
        GLM_AR_KERNELS.reset()


def count_of(grids: list[Grid]) -> int:
    return sum(rows * columns for rows, columns in grids)


def median_seconds(
    call: Callable[[], torch.Tensor], runs: int, warm: bool
) -> tuple[float, torch.Tensor]:
    """(median of `runs`, the last answer); a run before is dropped when `warm`."""
    times, answer = [], torch.empty(0)
    for _ in range(runs + warm):
        torch.cuda.synchronize()
        start = time.perf_counter()
        answer = call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times[warm:])[runs // 2], answer


def _versus(
    name: str,
    ours: tuple[torch.Tensor, torch.Tensor],
    theirs: tuple[torch.Tensor, torch.Tensor],
) -> dict[str, Any]:
    """Greedy tokens and logits: comparable up to the first token that differs."""
    differing = (ours[0] != theirs[0]).nonzero().flatten().tolist()
    shared = differing[0] + 1 if differing else len(ours[0])
    largest = (ours[1][:shared] - theirs[1][:shared]).abs().max()
    return {
        f"first token that differs from {name}": differing[0] if differing else None,
        f"largest logit difference to {name}": round(float(largest), 4),
        f"largest logit beside {name}": round(float(theirs[1].abs().max()), 3),
    }


def _by_name(events: Any) -> list[Row]:
    micros: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for event in events:
        if event.device_type == torch.autograd.DeviceType.CUDA:
            name = event.key.removeprefix("void ")[:60]
            micros[name] += event.self_device_time_total
            calls[name] += event.count
    total = sum(micros.values()) or 1.0
    return [
        {
            "kernel": name,
            "launches": calls[name] / PROFILED_STEPS,
            "us_per_step": round(us / PROFILED_STEPS, 1),
            "us_per_launch": round(us / calls[name], 2),
            "share": round(100 * us / total, 1),
        }
        for name, us in sorted(micros.items(), key=lambda item: -item[1])
    ]


def print_families(rows: list[Row]) -> None:
    """The kernels of one step and their sum."""
    for row in rows:
        print(
            f"{row['us_per_step']:9.1f} us {row['share']:5.1f} % {row['launches']:6.1f} x"
            f" {row['us_per_launch']:7.2f} us  {row['kernel']}"
        )
    print(f"{sum(row['us_per_step'] for row in rows):9.1f} us in all", flush=True)
