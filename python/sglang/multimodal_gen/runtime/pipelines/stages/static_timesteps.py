"""One noise schedule for every size."""

from dataclasses import dataclass

import torch

from sglang.multimodal_gen.runtime.models.schedulers.flow_match_euler import (
    FlowMatchEulerConfig,
    shift_sigmas,
)
from sglang.multimodal_gen.runtime.pipelines.stages.state import ImageState
from sglang.multimodal_gen.runtime.pipelines.stages.timestep_preparation import (
    TimestepPreparationStage,
)


@dataclass
class StaticTimestepPreparationStage(TimestepPreparationStage):
    """Equal steps from 1 to 0, then the scheduler's fixed shift."""

    def __post_init__(self) -> None:
        if self.scheduler.use_dynamic_shifting:
            raise ValueError(
                "scheduler_config.json: got use_dynamic_shifting=True, expected False: this model's"
                " schedule does not depend on the size"
            )

    def sigmas(self, num_steps: int, image: ImageState) -> torch.Tensor:
        """float32 [num_steps + 1] on the CPU, from 1 down to 0."""
        return static_sigmas(self.scheduler, num_steps)


def static_sigmas(config: FlowMatchEulerConfig, num_steps: int) -> torch.Tensor:
    """float32 [num_steps + 1]. Spaced by torch in float32: numpy's float64 gives other bits."""
    levels = torch.linspace(1.0, 0.0, num_steps + 1, dtype=torch.float32)[:-1]
    return shift_sigmas(config, levels.numpy(), mu=0.0)
