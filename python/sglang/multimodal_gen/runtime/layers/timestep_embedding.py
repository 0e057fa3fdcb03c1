"""Sinusoidal embedding of a scalar (timestep, guidance) and the two-layer projection after it."""

import math

import torch
from torch import nn

EMBEDDING_CHANNELS = 256
MAX_PERIOD = 10000


def sinusoidal_embedding(values: torch.Tensor, channels: int = EMBEDDING_CHANNELS) -> torch.Tensor:
    """[N] scalars -> float32 [N, channels], cosines first. `channels` must be even."""
    half = channels // 2
    exponent = -math.log(MAX_PERIOD) * torch.arange(half, dtype=torch.float32, device=values.device)
    angles = values[:, None].float() * torch.exp(exponent / half)[None, :]
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class SiluProjection(nn.Module):
    """linear_2(silu(linear_1(x))), the embedder of timesteps, guidance and pooled text."""

    def __init__(self, in_channels: int, hidden: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(in_channels, hidden)
        self.act = nn.SiLU()
        self.linear_2 = nn.Linear(hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear_2(self.act(self.linear_1(x)))
