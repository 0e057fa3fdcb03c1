"""How many engines stand behind one server, and where they run."""

import re
from dataclasses import dataclass
from typing import Any

from sglang.multimodal_gen.configs.fields import build_from_kwargs, normalise_fields, setting
from sglang.multimodal_gen.configs.rules import Integer, Text
from sglang.multimodal_gen.configs.validation import rejected

MAX_REPLICAS = 1024
_ADDRESS = re.compile(r"auto|(\[[0-9a-fA-F:]+\]|[A-Za-z0-9.-]+):\d{1,5}")


@dataclass(frozen=True)
class _Address(Text):
    """Where a Ray cluster's head listens."""

    max_bytes: int = 255
    optional: bool = True
    metavar: str = "HOST:PORT"

    def _check_one(self, name: str, value: object) -> str:
        text = super()._check_one(name, value)
        if not _ADDRESS.fullmatch(text):
            raise rejected(name, text, "host:port of a Ray cluster's head, or auto")
        return text


@dataclass(frozen=True, kw_only=True)
class ReplicaArgs:
    """Settings of `sglang serve` for several engines. Raises InvalidParameter for a bad value."""

    replicas: int | None = setting(
        None, Integer(1, MAX_REPLICAS, optional=True), "engines, on Ray Serve; default: one, no Ray"
    )
    max_replicas: int | None = setting(
        None, Integer(1, MAX_REPLICAS, optional=True), "most of them, under load; default: replicas"
    )
    replica_cpus: int = setting(1, Integer(1, 1024), "CPU cores and OpenMP threads of a replica")
    ray_address: str | None = setting(
        None, _Address(), "running Ray cluster, or auto; default: one of its own, here"
    )

    def __post_init__(self) -> None:
        normalise_fields(self)
        if self.most < self.least:
            expected = f"at least replicas={self.least}"
            raise rejected("max_replicas", self.max_replicas, expected)

    @classmethod
    def from_kwargs(cls, **values: Any) -> "ReplicaArgs":
        """Settings from keywords; an unknown one is an error that names the nearest valid one."""
        return build_from_kwargs(cls, values)

    @property
    def wanted(self) -> bool:
        """Whether the engines run on Ray Serve at all."""
        given = (self.replicas, self.max_replicas, self.ray_address)
        return any(value is not None for value in given)

    @property
    def least(self) -> int:
        """How many replicas always run."""
        return self.replicas or 1

    @property
    def most(self) -> int:
        """How many replicas run under load."""
        return self.max_replicas or self.least
