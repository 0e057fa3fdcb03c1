"""How the kernels of whole rows spread them over programs."""

import functools
from typing import NamedTuple

import torch


class RowLaunch(NamedTuple):
    """A launch of a kernel that norms rows; it decides about time, never about a bit.

    A program with `ahead` has the loads of its next rows under way while it works on these;
    one with `hold` has the broadcast rows in registers from the start, else it reads them again
    for every row. `per_sm` is the programs that share the rows on each multiprocessor; 0 starts
    one for every `rows` rows.
    """

    rows: int = 1
    warps: int = 4
    per_sm: int = 0
    ahead: bool = False
    hold: bool = False

    def programs(self, sequence: int, batch: int, device: torch.device) -> int:
        """Programs for each of `batch` entries of `sequence` rows, about the same work for each."""
        blocks = -(-sequence // self.rows)
        if not self.per_sm:
            return blocks
        passes = -(-blocks * batch // (self.per_sm * _multiprocessors(device)))
        return -(-blocks // passes)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
