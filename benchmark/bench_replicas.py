"""Throughput of two replicas, each on cores of its own, against one replica on as many.

    python benchmark/bench_replicas.py --rounds 5 --cores 2

One server after the other, as an idle Ray takes a seventh of a core. Pictures a second, the median
of the rounds; only a machine with nothing else to do gives a true ratio, as other work moves to the
cores that one replica leaves free. Linux, cores for two replicas, the extra `ray`.
"""

import argparse
import json
import os
import statistics
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "test" / "registered" / "entrypoints"))

from live_server import LiveServer  # noqa: E402
from process_tree import children_of  # noqa: E402
from results import merge_rows, print_table  # noqa: E402

BODY = {"prompt": "a red apple", "size": "256x256", "num_inference_steps": 20}
WAITING = 4  # requests at once for each replica


def main() -> None:
    """Measure and print; with --json also into a result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=12, help="of each replica in a round")
    parser.add_argument("--cores", type=int, default=1, help="of each replica")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = len(os.sched_getaffinity(0))
    if not 1 <= given.cores <= found // 2:
        parser.error(
            f"--cores: got {given.cores}, expected 1 to {found // 2}, half of this machine"
        )
    rounds = [measure(n, given.cores, given.rounds, given.requests) for n in (1, 2)]
    rows = rows_of(rounds, given.cores)
    print_table(rows)
    if given.json is not None:
        merge_rows(given.json, rows, ("replicas", "cores"), num_gpus=0)


def measure(replicas: int, cores: int, rounds: int, requests: int) -> list[float]:
    """Pictures a second of a server, in each round after a first that warms up."""
    flags, threads = ("--replicas", str(replicas), "--log-level", "warning"), str(cores)
    with LiveServer(*flags, env={"OMP_NUM_THREADS": threads}) as server:
        pin(server.wait_ready(), replicas, cores)
        return [throughput(server, replicas, requests) for _ in range(rounds + 1)][1:]


def pin(server: LiveServer, replicas: int, cores: int) -> None:
    """Tie each worker process, with all its threads, to cores of its own."""
    workers = children_of(server.process.pid, "ray::ServeReplica", "spawn_main")
    assert len(workers) == replicas, f"expected {replicas} workers, found {workers}"
    available = sorted(os.sched_getaffinity(0))
    for i, worker in enumerate(sorted(workers)):
        for thread in Path(f"/proc/{worker}/task").iterdir():
            os.sched_setaffinity(int(thread.name), available[i * cores : (i + 1) * cores])


def throughput(server: LiveServer, replicas: int, requests: int) -> float:
    """Pictures a second."""
    begin = time.perf_counter()
    with ThreadPoolExecutor(WAITING * replicas) as pool:
        shas = list(pool.map(lambda _: ask(server), range(requests * replicas)))
    assert len(set(shas)) == 1, "replicas made different pictures"
    return len(shas) / (time.perf_counter() - begin)


def ask(server: LiveServer) -> str:
    """The hash of a picture."""
    request = urllib.request.Request(
        f"{server.url}/v1/images/generations",
        json.dumps(BODY).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.load(answer)["data"][0]["report"]["sha256"]


def rows_of(rounds: list[list[float]], cores: int) -> list[dict[str, Any]]:
    """One row for each number of replicas; `load` is the machine's, over the last minute."""
    one = statistics.median(rounds[0])
    return [
        {
            "replicas": n,
            "cores": cores,
            "pictures_per_s": statistics.median(values),
            "least": min(values),
            "most": max(values),
            "against_one": statistics.median(values) / one,
            "load": os.getloadavg()[0],
        }
        for n, values in enumerate(rounds, start=1)
    ]


if __name__ == "__main__":
    main()
