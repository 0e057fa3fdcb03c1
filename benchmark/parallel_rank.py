"""A further rank of bench_denoise.py: its part of a case, run arm by arm as rank 0 says."""

import os
import signal
import time
import traceback
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

import torch
from bench_denoise import build_case, latents_md5
from denoise_arms import CaseSetup, DenoiseCase

from sglang.multimodal_gen.configs.parallel_layout import ParallelLayout
from sglang.multimodal_gen.runtime.distributed import parallel_state


@dataclass(frozen=True)
class StartCase:
    """Which rank a process is, and of which case."""

    rank: int
    layout: ParallelLayout
    model: str
    setup: CaseSetup
    store_file: str
    timeout_s: float
    threads: int


@dataclass(frozen=True)
class RunArm:
    """One denoising, by all ranks at once."""

    arm: str
    steps: int | None


@dataclass(frozen=True)
class Done:
    """A rank has started, or run an arm; with the md5 of its latents, or why not."""

    md5: str | None = None
    failure: str | None = None
    failed_at: float = 0.0  # seconds on this machine's clock


def main(descriptor: int) -> None:
    """Run what rank 0 asks for until it closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pipe = Connection(descriptor)
    pipe.send(Done())
    try:
        case = started(pipe.recv())
        pipe.send(Done())
        while True:
            wanted: RunArm = pipe.recv()
            pipe.send(Done(md5=latents_md5(case.run(wanted.arm, wanted.steps).latents)))
    except (EOFError, ConnectionError):
        parallel_state.leave()
        os._exit(0)
    except Exception:  # not swallowed: rank 0 raises it
        pipe.send(Done(failure=traceback.format_exc(), failed_at=time.monotonic()))
        os._exit(1)


def started(start: StartCase) -> DenoiseCase:
    """The case of this rank, which has joined the others."""
    torch.set_num_threads(start.threads)
    device = start.setup.device
    if device.type == "cuda":
        device = torch.device("cuda", start.rank)
        torch.cuda.set_device(device)
    state = parallel_state.join(start.rank, start.layout, device, start.store_file, start.timeout_s)
    return build_case(start.model, replace(start.setup, device=device, parallel=state))
