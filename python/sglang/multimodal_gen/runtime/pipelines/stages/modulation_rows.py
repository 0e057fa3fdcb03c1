"""FLUX.1's modulation rows of several steps at once: their weights are read once, not every step.

A step's rows depend on timestep, guidance and pooled text alone. One step reads 6.4 GB of weights
for them (2.1 ms on an H200); eight steps in one GEMM take as long as one.
"""

from collections.abc import Iterator

import torch

from sglang.kernels.ops.diffusion.bitexact_gate import BitExactFusionGate
from sglang.multimodal_gen.runtime.layers.fused_site import run_site

FLUX_MODULATION_ROWS = BitExactFusionGate("flux.modulation_rows", per_signature=True)
STEPS_A_GEMM = 8


def modulation_rows(
    transformer: torch.nn.Module,
    timesteps: torch.Tensor,
    guidance: torch.Tensor | None,
    pooled: torch.Tensor,
) -> Iterator[torch.Tensor]:
    """Yields [1, R] for each of `timesteps` [N] (0..1, the model's dtype), as
    `transformer.modulation_rows` gives it for that timestep alone; guidance [1] or None, pooled
    [1, P]. Computed when asked for, eight at a time."""

    def one_by_one(steps: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        rows = [transformer.modulation_rows(t, guidance, pooled) for t in steps.split(1)]
        return torch.cat(rows)

    def at_once(steps: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        vecs = [transformer.conditioning(t, guidance, pooled) for t in steps.split(1)]
        return transformer.rows_of(torch.cat(vecs))

    for steps in timesteps.split(STEPS_A_GEMM):
        missing = STEPS_A_GEMM - len(steps)  # always the same shape, so one verdict
        padded = torch.cat([steps, steps[-1:].expand(missing)])
        rows = run_site(FLUX_MODULATION_ROWS, at_once, one_by_one, padded, pooled)
        yield from rows[: len(steps)].split(1)
