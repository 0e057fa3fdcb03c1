"""A stream of tokens between two blocks, with the gated sum that the next norm does on its way."""

from typing import NamedTuple

import torch


class Stream(NamedTuple):
    """The tokens ``x + gate * update``, not added up yet; without an update, x alone.

    A norm that reads them adds them up in the same kernel, which spares a pass over the tokens.
    """

    x: torch.Tensor  # [B, L, D]
    update: torch.Tensor | None = None  # [B, L, D]
    gate: torch.Tensor | None = None  # one row a batch entry, as the model's sites take it
