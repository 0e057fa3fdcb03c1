"""Prometheus metrics: what HTTP saw, counted here, and what the engine says at each scrape."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sglang.multimodal_gen.runtime.managers.engine_state import EngineSnapshot, EngineState

if TYPE_CHECKING:
    from sglang.multimodal_gen.runtime.managers.engine import Engine

SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)


class ServerMetrics:
    """The registry of one server; several may live in one process."""

    def __init__(self, engine: "Engine") -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(engine))
        ProcessCollector(namespace="sglang", registry=self.registry)
        self.answers = Counter(
            "sglang_http_requests",
            "HTTP requests by route and status",
            ("method", "route", "status"),
            registry=self.registry,
        )
        self.latency = Histogram(
            "sglang_request_seconds",
            "seconds from a request for pictures to the end of its answer",
            ("route", "status"),
            buckets=SECONDS,
            registry=self.registry,
        )
        self.images = Counter(
            "sglang_images", "pictures handed out", ("format",), registry=self.registry
        )

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    def __init__(self, engine: "Engine") -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """The engine's figures of this moment."""
        now = self._engine.snapshot()
        for name, text, value in _gauges(now):
            yield GaugeMetricFamily(name, text, value=value)
        yield CounterMetricFamily("sglang_worker_restarts", "worker starts", value=now.restarts)
        counter = CounterMetricFamily
        yield _labelled(counter, "sglang_requests", "ended requests", "status", now.requests)
        yield _labelled(
            counter, "sglang_stage_seconds", "seconds in each stage", "stage", now.stage_seconds
        )
        yield CounterMetricFamily("sglang_repeats", "requests asked again", value=now.repeats)
        yield _labelled(GaugeMetricFamily, "sglang_replicas", "replicas", "state", now.replicas)
        yield _memory(now)
        yield _state(now)
        yield from _sites(now)


def _gauges(now: EngineSnapshot) -> list[tuple[str, str, float]]:
    return [
        ("sglang_queue_depth", "requests that wait", now.queue_depth),
        ("sglang_requests_running", "requests at work", now.running),
    ]


def _labelled(
    kind: type[Metric], name: str, text: str, label: str, values: dict[str, float]
) -> Metric:
    family = kind(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _memory(now: EngineSnapshot) -> Metric:
    text = "peak memory of the last request: of the GPU, on a CPU of the worker process"
    family = GaugeMetricFamily("sglang_engine_peak_memory_bytes", text, labels=["device"])
    family.add_metric([now.device or "none"], now.peak_memory_mb * 2**20)
    return family


def _state(now: EngineSnapshot) -> Metric:
    family = GaugeMetricFamily("sglang_engine_state", "1 for the current state", labels=["state"])
    for state in EngineState:
        family.add_metric([state.value], float(state is now.state))
    return family


def _sites(now: EngineSnapshot) -> Iterator[Metric]:
    state = GaugeMetricFamily(
        "sglang_fused_site", "1 for the state of a kind of fused site", labels=["op", "status"]
    )
    calls = GaugeMetricFamily(
        "sglang_fused_site_calls", "calls in the last request", labels=["op", "path"]
    )
    for row in {row["op"]: row for row in now.sites}.values():  # a label set may come only once
        state.add_metric([row["op"], row["status"]], 1)
        for path in ("fused", "eager"):
            if f"{path}_calls" in row:
                calls.add_metric([row["op"], path], row[f"{path}_calls"])
    yield from (state, calls)
