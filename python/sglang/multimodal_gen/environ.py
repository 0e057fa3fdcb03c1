"""Every environment variable that this package reads, typed. A bad value raises when it is read."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class EnvironmentVariable(Generic[T]):
    """One variable: `get()` is its parsed value, or the default when it is unset or empty."""

    name: str
    default: T
    parse: Callable[[str], T]  # raises ValueError for a text that is not accepted
    accepted: str

    def get(self) -> T:
        """The value now. Raises ValueError naming the variable, what was got and is accepted."""
        text = os.environ.get(self.name, "")
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError:
            got = repr(text[:80])
            raise ValueError(
                f"environment variable {self.name}: got {got}, expected {self.accepted}"
            ) from None


def _one_of(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in words:
            raise ValueError(text)
        return text

    return parse


def _positive(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise ValueError(text)
    return seconds


PROGRESS: EnvironmentVariable[str] = EnvironmentVariable(
    "SGLANG_DIFFUSION_PROGRESS",
    default="auto",  # a bar on a terminal, plain lines otherwise
    parse=_one_of("auto", "bar", "plain", "off"),
    accepted="auto, bar, plain or off",
)
API_KEY: EnvironmentVariable[str | None] = EnvironmentVariable(
    "SGLANG_DIFFUSION_API_KEY",  # of `sglang serve`; unlike a flag, no process list shows it
    default=None,
    parse=str,
    accepted="visible ASCII characters",
)
COLLECTIVE_TIMEOUT: EnvironmentVariable[float] = EnvironmentVariable(
    "SGLANG_DIFFUSION_COLLECTIVE_TIMEOUT",  # of a step, where several ranks make a picture
    default=300.0,
    parse=_positive,
    accepted="seconds above 0",
)
ALL = (PROGRESS, API_KEY, COLLECTIVE_TIMEOUT)
RAY_DEFAULTS = {
    "RAY_COLOR_PREFIX": "0",  # replicas' lines in this server's log, plain and all of them
    "RAY_DEDUP_LOGS": "0",
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.25",  # of 0.1: half the CPU time of an idle cluster
}


def given_to_replicas() -> dict[str, str]:
    """This package's variables that are set here, for replicas on other machines; the API key is
    the front's alone."""
    names = [variable.name for variable in ALL if variable is not API_KEY]
    return {name: os.environ[name] for name in names if name in os.environ}


def set_for_ray() -> None:
    """Before Ray is imported: it reports to nobody; the rest only where the user chose nothing."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    for name, value in RAY_DEFAULTS.items():
        os.environ.setdefault(name, value)


def let_openmp_threads_sleep() -> None:
    """For this process and its children, before torch is imported; the user's choice wins.

    On two shared cores a picture took 7-29 s with spinning OpenMP threads and 1.3 s without; on
    idle ones it takes the same. The bytes are equal.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
