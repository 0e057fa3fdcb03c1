"""Rotary position tables. Positions are float32, angles float64, the tables float32."""

import torch

Rope = tuple[torch.Tensor, torch.Tensor]


def rope_tables(ids: torch.Tensor, axes_dim: tuple[int, ...], theta: float = 10000.0) -> Rope:
    """Cosine and sine tables for multi-axis rotary embedding, each pair of channels interleaved.

    ids: [J, n_axes] positions. axes_dim: channels an axis takes; they sum to the head size E.
    Returns (cos, sin), each float32 [J, E]. The angle is formed in float64, as in training.
    """
    positions = ids.float()
    angles = [_axis_angles(positions[:, i], dim, theta) for i, dim in enumerate(axes_dim)]
    cos = torch.cat([_pairs(a.cos()) for a in angles], dim=-1)
    sin = torch.cat([_pairs(a.sin()) for a in angles], dim=-1)
    return cos, sin


def _axis_angles(positions: torch.Tensor, dim: int, theta: float) -> torch.Tensor:
    exponents = torch.arange(0, dim, 2, dtype=torch.float64, device=positions.device) / dim
    return torch.outer(positions, 1.0 / (theta**exponents))


def _pairs(table: torch.Tensor) -> torch.Tensor:
    return table.repeat_interleave(2, dim=1).float()
