"""What a worker process costs: the same pictures in this process and through the engine.

    python benchmark/bench_engine.py --model flux1-dev,bundled \
        --json benchmark/results/h200/engine.json

A row a model. `local_s` and `served_s` are medians of whole requests at the default size, measured
in turns; `overhead_ms` is the median wall time of a served request that the worker did not use
itself; `preview_ms` what one preview adds; `cancel_ms` the longest of five times from a cancel
to a free worker, beside `step_ms`; `ready_s` from the start to a warm worker; `died_ms` from a
SIGKILL of the worker to the error of its request. `equal` says that local, served, previewed and
after-a-cancel pictures had one sha256. A part that raises is reported, the others still run, and
the exit code is 1.
"""

import argparse
import asyncio
import os
import signal
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "benchmark")]

from bench_generate import MODELS, load_format  # noqa: E402
from environment import check_result_file  # noqa: E402
from long_runs import attempt, exit_code, free_memory, names_of  # noqa: E402
from results import merge_rows, print_table  # noqa: E402

from sglang.multimodal_gen import DiffGenerator, SamplingParams  # noqa: E402
from sglang.multimodal_gen.configs.server_args import ServerArgs  # noqa: E402
from sglang.multimodal_gen.runtime.managers.engine_client import EngineClient  # noqa: E402
from sglang.multimodal_gen.runtime.managers.errors import (  # noqa: E402
    RequestCancelled,
    WorkerDied,
)
from sglang.multimodal_gen.runtime.managers.messages import GenerateReply  # noqa: E402

PROMPT = "a lighthouse on a cliff at dusk, long exposure"
PREVIEWS = 3
CANCELS = 5


@dataclass
class EngineRow:
    """One model's figures."""

    model: str
    width: int
    height: int
    steps: int
    local_s: float
    served_s: float
    overhead_ms: float
    preview_ms: float
    step_ms: float
    cancel_ms: float
    ready_s: float
    died_ms: float
    equal: bool


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="bundled", help=f"comma list of {', '.join(MODELS)}")
    parser.add_argument("--runs", type=int, default=5, help="of each kind; medians count")
    parser.add_argument("--steps", type=int, help="default: the model's")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path, help="merge the rows into this result file")
    args = parser.parse_args()
    if args.json:
        check_result_file(args.json)
    failed: list[str] = []
    for model in names_of(args.model, list(MODELS)):
        row = attempt(model, failed, lambda model=model: asyncio.run(bench(model, args)))
        if row is not None:
            print_table([asdict(row)])
            if args.json:
                merge_rows(args.json, [asdict(row)], key=("model", "width", "height", "steps"))
        free_memory()
    return exit_code(failed)


async def bench(model: str, args: argparse.Namespace) -> EngineRow:
    """Measure one model, loaded here and in a worker at the same time."""
    settings = dict(load_format=load_format(model), device=args.device, log_level="warning")
    server_args = ServerArgs(model_path=MODELS[model], **settings)
    engine = EngineClient(server_args, max_queue=4, request_timeout=600)
    begin = time.perf_counter()
    await engine.start()
    try:
        await engine.wait_ready()
        ready_s = time.perf_counter() - begin
        with DiffGenerator(server_args) as local:
            return await EngineBench(model, args, engine, local).measure(ready_s)
    finally:
        await engine.close()


@dataclass
class EngineBench:
    """One model's requests."""

    model: str
    args: argparse.Namespace
    engine: EngineClient
    local: DiffGenerator

    async def measure(self, ready_s: float) -> EngineRow:
        """All parts, the fatal one last."""
        params = self.params()
        shas, local_s, served, walls = set(), [], [], []
        for _ in range(self.args.runs + 1):
            result = self.local.generate(prompt=PROMPT, num_inference_steps=self.args.steps)
            wall, reply = await timed(self.ask)
            local_s.append(result.generation_time)
            walls.append(wall - reply.seconds)
            served.append(reply.seconds)
            shas |= {result.report["sha256"], reply.reports[0]["sha256"]}
        previewed = [await self.ask(PREVIEWS) for _ in range(self.args.runs)]
        plain_s = statistics.median(served[1:])
        preview_s = statistics.median(reply.seconds for reply in previewed) - plain_s
        cancel_s = max([await self.cancel_after(i + 1) for i in range(CANCELS)])
        last = await self.ask()
        shas |= {reply.reports[0]["sha256"] for reply in (*previewed, last)}
        return EngineRow(
            model=self.model,
            width=params.width,
            height=params.height,
            steps=params.num_inference_steps,
            local_s=statistics.median(local_s[1:]),
            served_s=plain_s,
            overhead_ms=1e3 * statistics.median(walls[1:]),
            preview_ms=1e3 * preview_s / PREVIEWS,
            step_ms=1e3 * statistics.median(last.reports[0]["step_seconds"]),
            cancel_ms=1e3 * cancel_s,
            ready_s=ready_s,
            died_ms=1e3 * await self.kill(),
            equal=len(shas) == 1,
        )

    def params(self, **changes: int) -> SamplingParams:
        """The request of every part."""
        asked = {"num_inference_steps": self.args.steps, **changes}
        return SamplingParams(prompt=PROMPT, **asked).fit(self.engine.spec)

    async def ask(self, previews: int = 0) -> GenerateReply:
        """One picture through the engine."""
        return await self.engine.submit(self.params(), request_id="x", previews=previews).result()

    async def cancel_after(self, step: int) -> float:
        """Cancel a request after that step. Returns the seconds until the worker is free."""
        params = self.params(num_inference_steps=1000)
        handle = self.engine.submit(params, request_id="cancelled")
        async for event in handle.events():
            if event.label.startswith("denoise") and event.done == step:
                break
        begin = time.perf_counter()
        handle.cancel()
        try:
            await handle.result()
        except RequestCancelled:
            while self.engine.snapshot().running:
                await asyncio.sleep(0.0005)
            return time.perf_counter() - begin
        raise RuntimeError("a cancelled request has a result")

    async def kill(self) -> float:
        """Kill the worker in mid-request. Returns the seconds until the request's error."""
        handle = self.engine.submit(self.params(num_inference_steps=1000), request_id="killed")
        async for event in handle.events():
            if event.label.startswith("denoise"):
                break
        begin = time.perf_counter()
        os.kill(self.engine.worker_pid, signal.SIGKILL)
        try:
            await handle.result()
        except WorkerDied:
            return time.perf_counter() - begin
        raise RuntimeError("a killed worker has answered")


async def timed(
    action: Callable[[], Awaitable[GenerateReply]],
) -> tuple[float, GenerateReply]:
    """The wall seconds of a request, and its reply."""
    begin = time.perf_counter()
    reply = await action()
    return time.perf_counter() - begin, reply


if __name__ == "__main__":
    sys.exit(main())
