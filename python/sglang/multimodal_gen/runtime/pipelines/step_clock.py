"""Seconds a denoising step takes, on the device's own clock, with no synchronisation inside."""

import time

import torch


class StepClock:
    """`tick()` after each step; `seconds()` once at the end (it waits for the device)."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks = [self._now()]

    def tick(self) -> None:
        self._marks.append(self._now())

    def seconds(self) -> list[float]:
        """One entry a tick."""
        pairs = zip(self._marks[:-1], self._marks[1:], strict=True)
        if not self._cuda:
            return [b - a for a, b in pairs]
        self._marks[-1].synchronize()
        return [a.elapsed_time(b) / 1000 for a, b in pairs]

    def _now(self) -> "float | torch.cuda.Event":
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
