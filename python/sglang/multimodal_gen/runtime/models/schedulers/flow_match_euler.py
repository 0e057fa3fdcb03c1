"""Flow-match Euler sampling as pure functions over a frozen configuration.

Same tables and same step as `diffusers.FlowMatchEulerDiscreteScheduler` 0.42.1.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np
import torch

from sglang.multimodal_gen.configs.json_config import checked_fields


@dataclass(frozen=True, kw_only=True)
class FlowMatchEulerConfig:
    """The fields of `scheduler_config.json` that act here."""

    num_train_timesteps: int = 1000
    shift: float = 1.0
    use_dynamic_shifting: bool = False
    base_shift: float = 0.5
    max_shift: float = 1.15
    base_image_seq_len: int = 256
    max_image_seq_len: int = 4096
    time_shift_type: str = "exponential"  # of dynamic shifting; or "linear"

    @classmethod
    def from_dict(cls, config: Mapping[str, object]) -> "FlowMatchEulerConfig":
        """Read a scheduler config; an option that would change the schedule and that is not
        implemented here raises instead of being ignored."""
        known = {f.name for f in fields(cls)}
        for key, value in config.items():
            accepted = _ACCEPTED.get(key, (None, False))
            known_value = key in known - _ACCEPTED.keys() or value in accepted
            if not known_value and not key.startswith("_"):
                raise ValueError(
                    f"scheduler_config.json: got {key}={value!r}, which this sampler does not have;"
                    f" expected it absent or one of {accepted}"
                )
        given = {k: v for k, v in config.items() if k in known and v is not None}
        return cls(**checked_fields(cls, given, "scheduler_config.json"))

    def __post_init__(self) -> None:
        for name, sound, expected in (
            ("shift", self.shift > 0, "above 0"),
            ("num_train_timesteps", self.num_train_timesteps > 0, "above 0"),
            (
                "max_image_seq_len",
                self.max_image_seq_len != self.base_image_seq_len,
                "unlike base_image_seq_len",
            ),
        ):
            if not sound:
                got = f"{name}={getattr(self, name)}"
                raise ValueError(f"scheduler_config.json: got {got}, expected it {expected}")


# Options with few values. An option of other samplers is accepted where it is None or False.
_ACCEPTED = {"time_shift_type": (None, "exponential", "linear")}


def image_shift(config: FlowMatchEulerConfig, image_tokens: int) -> float:
    """The shift parameter mu: linear in the number of image tokens."""
    slope = (config.max_shift - config.base_shift) / (
        config.max_image_seq_len - config.base_image_seq_len
    )
    return image_tokens * slope + (config.base_shift - slope * config.base_image_seq_len)


def make_sigmas(config: FlowMatchEulerConfig, num_steps: int, image_tokens: int) -> torch.Tensor:
    """float32 [num_steps + 1] noise levels on the CPU, from 1 down to the terminal 0.

    The order of numpy float64 and float32 operations is the reference's, so the tables are equal.
    """
    sigmas = np.linspace(1.0, 1 / num_steps, num_steps).astype(np.float32)
    return shift_sigmas(config, sigmas, image_shift(config, image_tokens))


def shift_sigmas(config: FlowMatchEulerConfig, sigmas: np.ndarray, mu: float) -> torch.Tensor:
    """float32 [N + 1] of float32 levels [N]: shifted by `mu` or the fixed shift, then 0."""
    if config.use_dynamic_shifting:
        weight = mu if config.time_shift_type == "linear" else math.exp(mu)
        sigmas = weight / (weight + (1 / sigmas - 1) ** 1.0)
    else:
        sigmas = config.shift * sigmas / (1 + (config.shift - 1) * sigmas)
    return torch.cat([torch.from_numpy(sigmas).to(torch.float32), torch.zeros(1)])


def make_timesteps(config: FlowMatchEulerConfig, sigmas: torch.Tensor) -> torch.Tensor:
    """float32 [num_steps] timesteps in 0..num_train_timesteps, one for each forward."""
    return sigmas[:-1] * config.num_train_timesteps


def euler_step(
    sample: torch.Tensor, velocity: torch.Tensor, sigma: torch.Tensor, sigma_next: torch.Tensor
) -> torch.Tensor:
    """One Euler step. `dt * velocity` is rounded to the model dtype, then added in float32.

    sample, velocity: [B, S, C] of one dtype; sigma, sigma_next: 0-dim float32 on the same device
    (a host float would not be rounded the same way). Returns [B, S, C] in that dtype.
    """
    dt = sigma_next - sigma
    return (sample.float() + dt * velocity).to(velocity.dtype)
