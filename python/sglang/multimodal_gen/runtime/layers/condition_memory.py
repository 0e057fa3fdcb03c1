"""Keys and values of condition images: written by one forward each, read by every later one."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LayerMemory:
    """One layer's keys and values, [2, B, M, H, E] with M the tokens of all condition images."""

    rows: torch.Tensor
    writing: bool

    def exchange(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What attention reads for its own keys and values, [B, J, H, E].

        While writing: these, after a copy of them is kept. Else: the kept ones before them.
        """
        if self.writing:
            self.rows[0].copy_(k)
            self.rows[1].copy_(v)
            return k, v
        kept_k, kept_v = self.rows
        return torch.cat([kept_k, k], dim=1), torch.cat([kept_v, v], dim=1)


def layer_memory(memory: torch.Tensor | None, layer: int, *, writing: bool) -> LayerMemory | None:
    """A layer's part of a memory [layers, 2, B, M, H, E]; None where there is none."""
    return None if memory is None else LayerMemory(memory[layer], writing)
