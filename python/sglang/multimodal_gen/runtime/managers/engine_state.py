"""What the engine says of itself."""

import enum
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from sglang.multimodal_gen.runtime.managers.messages import GenerateReply, WorkerReady


class EngineState(enum.StrEnum):
    """Where the engine is in its life. Only a ready one takes requests."""

    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"
    DRAINING = "draining"
    STOPPED = "stopped"


@dataclass(frozen=True)
class EngineSnapshot:
    """Figures for health, server info and metrics."""

    state: EngineState
    detail: str
    queue_depth: int  # requests that wait
    running: int  # 0 or 1
    restarts: int  # worker processes that came up after the first
    device: str | None  # "cpu", "cuda:0"; None before the first worker is ready
    sites: tuple[dict[str, Any], ...]  # rows of `report.fused_sites`, of the last request
    peak_memory_mb: float  # MiB, of the last request
    stage_seconds: dict[str, float]  # totals of the finished requests
    requests: dict[str, int]  # how they ended ("finished", "cancelled", ...) -> how many
    # Of replicas on Ray Serve; then `running` goes up to their number.
    replicas: dict[str, int] = field(default_factory=dict)  # "running", "starting", ... -> how many
    repeats: int = 0  # requests that were asked again because their replica died


class EngineTally:
    """Counts what the worker did, over all its restarts."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        self.stage_seconds: Counter[str] = Counter()
        self.device: str | None = None
        self.sites: tuple[dict[str, Any], ...] = ()
        self.peak_memory_mb = 0.0
        self.usual_seconds = 1.0  # of a request, lately

    def on_ready(self, ready: WorkerReady) -> None:
        """A worker came up."""
        self.device, self.sites = ready.device, ready.sites
        self.peak_memory_mb = ready.peak_memory_mb

    def on_finished(self, reply: GenerateReply) -> None:
        """A request ended with its images."""
        report = reply.reports[0]  # of its images, all but the pixels and seeds are the same
        self.stage_seconds.update(report["stage_seconds"])
        self.sites, self.peak_memory_mb = tuple(report["sites"]), report["peak_memory_mb"]
        self.usual_seconds += 0.3 * (reply.seconds - self.usual_seconds)
