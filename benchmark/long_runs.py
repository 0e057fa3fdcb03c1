"""What keeps a long measurement alive: one part that raises is reported, the others go on."""

import gc
import traceback
from collections.abc import Callable, Sequence
from typing import Any


def attempt(what: str, failed: list[str], action: Callable[[], Any]) -> Any:
    """What `action` returns; None where it raises: the traceback is printed and `what` appended to
    `failed`, which makes the exit code 1."""
    try:
        return action()
    except Exception:
        traceback.print_exc()
        failed.append(what)
        return None


def exit_code(failed: Sequence[str]) -> int:
    """1, after a line that says what failed; 0 where nothing did."""
    if failed:
        print(f"failed: {', '.join(failed)}")
    return int(bool(failed))


def names_of(text: str, known: Sequence[str]) -> list[str]:
    """A comma list of known names. Raises ValueError naming the unknown ones and those known."""
    names = text.split(",")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"got {unknown}, expected names of {list(known)}")
    return names


def free_memory() -> None:
    """Give the GPU back what the last model held."""
    import torch

    torch._dynamo.reset()  # compiled graphs hold the weights
    gc.collect()
    torch.cuda.empty_cache()
