"""Open-loop load on a server: Poisson arrivals of a fixed seed, latencies, errors, equal bytes.

    python benchmark/bench_serving.py --requests 50
    python benchmark/bench_serving.py --base-url http://127.0.0.1:30000 --rate 0.5 --kill-one
    python benchmark/bench_serving.py --serve "--model-path FLUX.1-dev --load-format dummy" \
        --json benchmark/results/h200/serving.json

Without --base-url a server of its own is started, with the flags of --serve. First each of the
--distinct requests is answered alone, twice: the second time is its reference, for the bytes of
every other answer to it, and for the default rate of 0.7 of what one request at a time allows.
`overhead` is the client's wall time less the engine's and the queue's, as Server-Timing has them;
`late` is the load generator's own delay. --kill-one sends SIGKILL to a worker once half of the
requests are sent, waits for the server's recovery and asks for each picture again. Exit code 1: an
answer was lost (no whole answer), wrong (other bytes), an error other than 429, 503 and 504, or
none was right.
"""

import argparse
import asyncio
import os
import shlex
import signal
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "benchmark")]

from environment import check_result_file  # noqa: E402
from results import merge_rows  # noqa: E402
from serving_load import Answer, Body, Client, arrivals  # noqa: E402
from serving_process import own_server  # noqa: E402
from serving_rows import Row, faults, load_row, print_row  # noqa: E402

PROMPTS = ("a red apple", "a blue fish", "a green tree", "a yellow car")
UTILISATION = 0.7  # of one request at a time, where no rate is given
RECOVERY_S = 300.0
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
KEY = ("model", "size", "steps", "quality", "requests", "rate", "killed", "response_format")


def parse_args(words: list[str] | None = None) -> argparse.Namespace:
    parser = build_parser()
    args = parser.parse_args(words)
    try:
        check(args)
    except ValueError as error:
        parser.error(str(error))
    return args


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flag = parser.add_argument
    flag("--requests", type=int, default=50)
    flag("--rate", type=float, help="arrivals a second; default: 0.7 of what one by one allows")
    flag("--base-url", help="a running server; default: one of its own")
    flag("--serve", default="", metavar="FLAGS", help="flags of `sglang serve` for its own server")
    flag("--start-s", type=float, default=1800, help="seconds until its own server must be ready")
    flag("--api-key", default=os.environ.get("SGLANG_DIFFUSION_API_KEY"))
    flag("--kill-one", action="store_true", help="SIGKILL a worker in mid-load")
    flag("--distinct", type=int, default=4, help="different requests among them")
    flag("--size", default="auto", help="WIDTHxHEIGHT; default: the model's")
    flag("--steps", type=int, help="default: the model's")
    flag("--quality", default="lossless", choices=("lossless", "high"))
    flag("--response-format", default="b64_json", choices=("b64_json", "url"))
    flag("--slo", type=float, help="seconds; goodput counts answers within them")
    flag("--timeout", type=float, default=900, help="seconds after which an answer counts as lost")
    flag("--seed", type=int, default=0, help="of the arrivals and of the order of requests")
    flag("--json", type=Path, help="merge the row into this result file")
    return parser


def check(args: argparse.Namespace) -> None:
    """Raise ValueError for what cannot be measured."""
    if args.kill_one and args.base_url and urlsplit(args.base_url).hostname not in LOCAL_HOSTS:
        raise ValueError(f"--kill-one: got {args.base_url}, expected a server on this machine")
    for name in ("requests", "distinct"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name}: got {getattr(args, name)}, expected at least 1")
    if args.rate is not None and args.rate <= 0:
        raise ValueError(f"--rate: got {args.rate}, expected more than 0")


def bodies_of(args: argparse.Namespace) -> list[Body]:
    """The distinct requests."""
    common = {
        "size": args.size,
        "num_inference_steps": args.steps,
        "quality": args.quality,
        "response_format": args.response_format,
    }
    return [{"prompt": PROMPTS[i % len(PROMPTS)], "seed": i} | common for i in range(args.distinct)]


def main() -> int:
    args = parse_args()
    if args.json:
        check_result_file(args.json)
    own = own_server(shlex.split(args.serve), args.start_s)
    try:
        with nullcontext(args.base_url) if args.base_url else own as base_url:
            row = asyncio.run(bench(base_url, args))
    except (RuntimeError, httpx.HTTPError) as error:
        print(f"failed: {type(error).__name__}: {error}")
        return 1
    print_row(row)
    if args.json:
        merge_rows(args.json, [row], key=KEY)
    failed = faults(row)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return int(bool(failed))


async def bench(base_url: str, args: argparse.Namespace) -> Row:
    """The whole measurement against one server."""
    async with Client(base_url, args.api_key, args.timeout) as client:
        return await ServingBench(client, args, bodies_of(args)).measure()


@dataclass
class ServingBench:
    """One load. `references`: an answer to each of `bodies`, made alone."""

    client: Client
    args: argparse.Namespace
    bodies: list[Body]
    references: list[Answer] = field(default_factory=list)
    recovery_s: float | None = None  # from a kill to a ready server

    async def measure(self) -> Row:
        """Alone, under load, and after a kill. Raises RuntimeError for a server that is not fit."""
        head = self.head(await self.info())
        first, self.references = await self.alone(), await self.alone()
        args, rate = self.args, self.args.rate or self.default_rate()
        print(f"{args.requests} requests, {rate:.3f} a second", flush=True)
        times = arrivals(args.requests, rate, args.seed)
        kill = self.kill if args.kill_one else None
        answers, seconds = await self.client.load(self.bodies, times, args.seed, kill)
        last = await self.alone() if args.kill_one else []
        pictures = [answer.picture for answer in self.references]
        about = {
            "used_rate": rate,
            "alone_s": self.alone_s(),
            "wrong_alone": sum(a.picture != pictures[a.index] for a in [*first, *last]),
            "recovery_s": self.recovery_s,
        }
        return head | about | load_row(answers, pictures, seconds, args.slo)

    def head(self, info: dict[str, Any]) -> Row:
        """What is measured."""
        args, defaults = self.args, info["defaults"]
        default_size = f"{defaults['width']}x{defaults['height']}"
        return {
            "model": info["model"],
            "size": default_size if args.size == "auto" else args.size,
            "steps": args.steps or defaults["num_inference_steps"],
            "quality": args.quality,
            "requests": args.requests,
            "rate": args.rate,  # None: the default, which the machine decides
            "killed": args.kill_one,
            "response_format": args.response_format,
            "distinct": args.distinct,
            "seed": args.seed,
            "slo_s": args.slo,
        }

    async def info(self) -> dict[str, Any]:
        """/server_info."""
        response = await self.client.get("/server_info")
        if response.status_code != 200:
            raise RuntimeError(f"/server_info: {response.status_code} {response.text[:200]}")
        return response.json()

    async def ask_alone(self) -> list[Answer]:
        """Every distinct request, one after another."""
        return [await self.client.ask(body, i) for i, body in enumerate(self.bodies)]

    async def alone(self) -> list[Answer]:
        """`ask_alone`, where each must succeed."""
        answers = await self.ask_alone()
        for answer in answers:
            if answer.status != 200:
                raise RuntimeError(f"request {answer.index} alone: {answer.status} {answer.code}")
        return answers

    def alone_s(self) -> float:
        """Mean seconds of a request alone."""
        return sum(answer.wall_s for answer in self.references) / len(self.references)

    def default_rate(self) -> float:
        """Arrivals a second that keep one worker busy for UTILISATION of the time."""
        return UTILISATION / self.alone_s()

    async def kill(self) -> None:
        """SIGKILL a worker, and wait until the server is ready with another."""
        pid = (await self.info())["engine"]["worker_pid"]
        if pid is None:
            raise RuntimeError("--kill-one: the server names no worker; is it restarting?")
        print(f"SIGKILL to the worker {pid}", flush=True)
        os.kill(pid, signal.SIGKILL)
        begin = time.perf_counter()
        while not await self.is_ready_without(pid):
            if time.perf_counter() - begin > RECOVERY_S:
                raise RuntimeError(f"the server has not recovered within {RECOVERY_S:g} s")
            await asyncio.sleep(0.1)
        self.recovery_s = time.perf_counter() - begin

    async def is_ready_without(self, pid: int) -> bool:
        """Whether another worker than this dead one is ready."""
        engine = (await self.info())["engine"]
        return engine["worker_pid"] not in (pid, None) and engine["state"] == "ready"


if __name__ == "__main__":
    sys.exit(main())
