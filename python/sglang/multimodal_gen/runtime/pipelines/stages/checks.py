"""The check that no stage hands on NaN or infinity."""

import torch


class NonFiniteError(RuntimeError):
    """A stage produced NaN or infinity; no image is made of it."""


def require_finite(stage: str, what: str, tensor: torch.Tensor) -> None:
    """Raise `NonFiniteError` naming the stage when a value of `tensor` is NaN or infinite."""
    if torch.isfinite(tensor).all().item():
        return
    bad = int((~torch.isfinite(tensor)).sum().item())
    raise NonFiniteError(
        f"{stage}: {what} holds {bad} NaN or infinite of {tensor.numel()} values, expected none;"
        " check the checkpoint's weights and the precision (bf16 overflows later than fp16)"
    )
