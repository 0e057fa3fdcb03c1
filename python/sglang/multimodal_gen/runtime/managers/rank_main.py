"""A further rank of a picture: a process that holds its part of the transformer and follows rank 0.

Started by `distributed/launch.py`, which closes the pipe, or dies, to end it.
"""

import logging
import os
import signal
import threading
import time
import traceback
from contextlib import nullcontext, suppress
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from sglang.kernels.ops.diffusion.bitexact_gate import all_gates, fast_paths
from sglang.multimodal_gen.configs.model_specs import read_model_spec
from sglang.multimodal_gen.report import fused_sites
from sglang.multimodal_gen.runtime.distributed import parallel_state
from sglang.multimodal_gen.runtime.loader.component_loader import ComponentLoader
from sglang.multimodal_gen.runtime.managers.numeric_switches import numeric_switches
from sglang.multimodal_gen.runtime.pipelines.parallel_denoising import JobAbandoned
from sglang.multimodal_gen.runtime.pipelines.rank_messages import (
    Answer,
    DenoiseJob,
    Outline,
    StartRank,
    image_of,
)
from sglang.multimodal_gen.runtime.pipelines.registry import DENOISING
from sglang.multimodal_gen.runtime.pipelines.stages.checks import NonFiniteError
from sglang.multimodal_gen.runtime.pipelines.stages.state import BatchState, ConditionState

PARENT_CHECK_S = 0.5


def main(descriptor: int) -> None:
    """Follow rank 0 until it closes the pipe. A failure is told before the process ends with 1."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides; the key reaches all of them
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    pipe = Connection(descriptor)
    try:
        rank = FollowingRank(pipe)
        while True:
            rank.follow()
    except (EOFError, ConnectionError):  # rank 0 has closed the pipe
        parallel_state.leave()
        os._exit(0)  # torch's own end takes seconds
    except Exception:
        with suppress(OSError):  # rank 0, which raises it, may be gone
            pipe.send(Answer(failure=traceback.format_exc(), failed_at=time.monotonic()))
        os._exit(1)  # at once: rank 0 may wait in a collective that only our end breaks


class FollowingRank:
    """One rank's transformer, and the jobs that it takes part in."""

    def __init__(self, pipe: Connection) -> None:
        """Join the others and load. Raises EOFError when rank 0 has gone."""
        self._pipe = pipe
        pipe.send(Answer())  # the imports are done
        start: StartRank = pipe.recv()
        self._start = start
        self.device = torch.device(start.device)
        _set_up(start, self.device)
        state = parallel_state.join(
            start.rank, start.layout, self.device, start.store_file, start.timeout_s
        )
        folder = Path(start.folder)
        spec = read_model_spec(folder)
        loader = ComponentLoader(folder, start.args.load_format == "dummy", self.device, state)
        with numeric_switches(self.device):
            self._stage = DENOISING[spec.pipeline_class](loader, spec, start.args)
        pipe.send(Answer())

    def follow(self) -> None:
        """Take part in the next job. Raises EOFError when rank 0 wants no more."""
        job: DenoiseJob = self._pipe.recv()
        for gate in all_gates():
            gate.reset_counters()
        allowed = nullcontext() if self._start.args.fast_paths else fast_paths(False)
        with torch.inference_mode(), numeric_switches(self.device), allowed:
            batch = self._receive(job)
            try:
                self._stage(batch)
            except (JobAbandoned, NonFiniteError):
                pass  # rank 0 has the same reason, and tells its caller
        self._pipe.send(Answer(sites=fused_sites(batch.mounted)))

    def _receive(self, job: DenoiseJob) -> BatchState:
        images = [image_of(request, self._tensors(outline)) for request, outline in job.images]
        conditions = [
            ConditionState(size=size, **self._tensors(outline)) for size, outline in job.conditions
        ]
        return BatchState(job.params, images, self._wait, job.true_cfg, conditions)

    def _tensors(self, outline: Outline) -> dict[str, torch.Tensor]:
        return {
            path: parallel_state.broadcast(torch.empty(shape, dtype=dtype, device=self.device))
            for path, (shape, dtype) in outline.items()
        }

    def _wait(self, label: str, done: int, total: int) -> None:
        """After each step: rank 0's word."""
        if not self._pipe.recv().proceed:
            raise JobAbandoned(f"{label}: step {done} of {total}")


def _set_up(start: StartRank, device: torch.device) -> None:
    logging.basicConfig(format=f"%(levelname)s rank {start.rank}: %(message)s")
    quiet = max(logging.WARNING, getattr(logging, start.args.log_level.upper()))
    logging.getLogger("sglang").setLevel(quiet)  # rank 0 tells what all do alike
    torch.set_num_threads(start.threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _end_with_parent(parent: int) -> None:
    """End this process soon after rank 0's, whatever it waits for."""
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_S)
    os._exit(1)
