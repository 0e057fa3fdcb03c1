"""Wall-clock budgets: a stage ends at its time whatever the machine's speed."""

import math
import time
from pathlib import Path


class Stage:
    """One training stage with a wall-clock budget in seconds."""

    def __init__(self, name: str, seconds: float, log: Path, max_steps: int = 0) -> None:
        self.name, self.log_path, self.max_steps = name, log, max_steps
        self.start = time.monotonic()
        self.end = self.start + seconds
        self.step = 0
        self.last_log = self.start
        self.last_step = 0

    def done(self) -> bool:
        """True when the budget, or the optional number of steps, is used up."""
        return time.monotonic() >= self.end or 0 < self.max_steps <= self.step

    def fraction(self) -> float:
        """Elapsed part of the budget, 0..1."""
        return min(1.0, (time.monotonic() - self.start) / max(1e-6, self.end - self.start))

    def learning_rate(self, peak: float, warmup_steps: int = 200) -> float:
        """Linear warm-up in steps, then a cosine in elapsed time down to 1 % of the peak."""
        warm = min(1.0, (self.step + 1) / warmup_steps)
        return peak * warm * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * self.fraction())))

    def log_due(self, every: float = 10.0) -> bool:
        """True once every `every` seconds."""
        return time.monotonic() - self.last_log >= every

    def log(self, text: str) -> None:
        """One line to the terminal and the log file, with the pace since the last line."""
        now = time.monotonic()
        steps, seconds = self.step - self.last_step, now - self.last_log
        pace = f"{1000 * seconds / steps:.1f} ms/step" if steps else "-"
        write_log(
            self.log_path, f"[{self.name}] {now - self.start:.0f} s step {self.step} {pace} {text}"
        )
        self.last_log, self.last_step = now, self.step


def write_log(path: Path, text: str) -> None:
    """Print and append one line."""
    print(text, flush=True)
    with path.open("a") as file:
        file.write(text + "\n")
