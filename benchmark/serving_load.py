"""Open-loop load on the images API: requests leave at their times, however slow the answers are."""

import asyncio
import base64
import hashlib
import json
import random
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx

GENERATIONS = "/v1/images/generations"
Body = dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """What came back for one request. Seconds; None where the server did not say."""

    index: int  # of the body among the distinct ones
    sent_s: float  # since the load began
    late_s: float  # behind its time: the load generator's own delay
    wall_s: float  # until the last byte of the answer
    status: int = 0  # 0: lost, no whole answer came
    code: str = ""  # of the error, or what was lost
    picture: str = ""  # sha256 of the files
    engine_s: float | None = None
    queue_s: float | None = None

    @property
    def overhead_s(self) -> float | None:
        """What neither the engine nor the queue took."""
        if self.engine_s is None or self.queue_s is None:
            return None
        return self.wall_s - self.engine_s - self.queue_s


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """`count` times in seconds of a Poisson process with `rate` arrivals a second."""
    rng, now, times = random.Random(seed), 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate)
        times.append(now)
    return times


class Client:
    """Sends requests to one server, each on its own task."""

    def __init__(self, base_url: str, api_key: str | None, timeout_s: float) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        unbounded = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(
            base_url=base_url, headers=headers, timeout=timeout_s, limits=unbounded
        )

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._http.aclose()

    async def get(self, path: str) -> httpx.Response:
        """A GET. Raises httpx.HTTPError when there is no answer."""
        return await self._http.get(path)

    async def ask(self, body: Body, index: int, sent_s: float = 0.0, late_s: float = 0.0) -> Answer:
        """Ask for a picture and wait for the whole answer. Never raises for a lost one."""
        begin = time.perf_counter()
        try:
            response = await self._http.post(GENERATIONS, json=body)
        except httpx.HTTPError as error:
            wall = time.perf_counter() - begin
            return Answer(index, sent_s, late_s, wall, code=type(error).__name__)
        answer = Answer(index, sent_s, late_s, time.perf_counter() - begin, response.status_code)
        if response.status_code != 200:
            return replace(answer, code=error_code(response.content))
        timing = response.headers.get("Server-Timing", "")
        engine_s, queue_s = _timed(timing, "engine"), _timed(timing, "queue")
        try:
            picture = await self._hash(response)
        except httpx.HTTPError as error:  # the picture behind a url
            return replace(answer, status=0, code=f"content: {error}")
        except (ValueError, KeyError):  # no JSON of this API: a wrong answer
            picture = ""
        return replace(answer, picture=picture, engine_s=engine_s, queue_s=queue_s)

    async def _hash(self, response: httpx.Response) -> str:
        """sha256 of the files of an answer, in order; those behind a url are fetched.

        Raises httpx.HTTPError when one is not there.
        """
        digest = hashlib.sha256()
        for item in response.json()["data"]:
            if "b64_json" in item:
                digest.update(base64.b64decode(item["b64_json"]))
            else:
                path = re.sub(r"^https?://[^/]+", "", item["url"])
                digest.update((await self.get(path)).raise_for_status().content)
        return digest.hexdigest()

    async def load(
        self,
        bodies: Sequence[Body],
        times: Sequence[float],
        seed: int,
        at_half: Callable[[], Awaitable[None]] | None = None,
    ) -> tuple[list[Answer], float]:
        """Send one of `bodies`, drawn with `seed`, at each of `times`; `at_half` runs once half of
        them are sent. Returns the answers in the order of sending, and the seconds to the last."""
        chosen = random.Random(seed + 1).choices(range(len(bodies)), k=len(times))
        begin, tasks = time.perf_counter(), []
        extra: asyncio.Task[None] | None = None
        for number, (at, index) in enumerate(zip(times, chosen, strict=True)):
            await asyncio.sleep(max(0.0, at - (time.perf_counter() - begin)))
            now = time.perf_counter() - begin
            tasks.append(asyncio.create_task(self.ask(bodies[index], index, now, now - at)))
            if at_half is not None and number == len(times) // 2:
                extra = asyncio.create_task(at_half())
        answers = list(await asyncio.gather(*tasks))
        seconds = time.perf_counter() - begin
        if extra is not None:
            await extra
        return answers, seconds


def error_code(content: bytes) -> str:
    """The code of an error in the API's one shape, or "no_error_shape"."""
    try:
        error = json.loads(content)["error"]
        return (
            error["code"]
            if {"message", "type", "param", "code"} <= set(error)
            else "no_error_shape"
        )
    except (ValueError, KeyError, TypeError):
        return "no_error_shape"


def _timed(header: str, name: str) -> float | None:
    """Seconds of an entry of a Server-Timing header."""
    found = re.search(rf"\b{name};dur=([\d.]+)", header)
    return float(found[1]) / 1e3 if found else None
