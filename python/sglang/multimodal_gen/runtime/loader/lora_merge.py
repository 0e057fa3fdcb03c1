"""The LoRAs that are merged into a transformer at the moment."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from sglang.multimodal_gen.runtime.loader.lora import Update, read_lora


@dataclass(frozen=True)
class Lora:
    """One LoRA: weight name -> update, and how strongly it acts."""

    nickname: str
    path: str
    strength: float
    updates: dict[str, Update]

    def describe(self) -> dict[str, Any]:
        """JSON-able, for reports and `list_loras`."""
        shown = {"nickname": self.nickname, "path": self.path, "strength": self.strength}
        return shown | {"weights": len(self.updates)}


class MergedLoras:
    """Each merged weight is its original plus the updates of all LoRAs, summed in fp32 and rounded
    once, so that their order and history leave no trace. Originals wait in host memory.
    """

    def __init__(self, transformer: torch.nn.Module) -> None:
        self._weights = transformer.state_dict()  # shares memory with the parameters
        self._originals: dict[str, torch.Tensor] = {}
        self._loras: dict[str, Lora] = {}

    def __iter__(self) -> Iterator[Lora]:
        return iter(self._loras.values())

    def merge(self, nickname: str, path: str, strength: float) -> None:
        """Add a LoRA, or replace the one of that nickname. Raises what `read_lora` does, and then
        nothing has changed."""
        updates = read_lora(path, self._weights)
        before = self._loras.get(nickname)
        self._loras[nickname] = Lora(nickname, path, strength, updates)
        self._write(updates.keys() | (before.updates.keys() if before else set()))

    def clear(self) -> None:
        """Take all LoRAs away; the weights have their original bytes again."""
        self._loras.clear()
        self._write(set(self._originals))

    @torch.no_grad()
    def _write(self, names: set[str]) -> None:
        for name in sorted(names):
            weight = self._weights[name]
            original = self._originals.setdefault(name, weight.to("cpu", copy=True))
            acting = [lora for lora in self if name in lora.updates and lora.strength]
            if not acting:
                weight.copy_(self._originals.pop(name))
                continue
            total = original.to(weight.device, torch.float32, copy=True)
            for lora in sorted(acting, key=lambda lora: lora.nickname):
                total += lora.strength * lora.updates[name].delta(weight.device)
            weight.copy_(total)
