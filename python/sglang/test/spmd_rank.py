"""A rank of a test world: loads a transformer's part in layout after layout, and denoises.

The world's processes are started once, by `sglang.multimodal_gen.runtime.distributed.launch`, and
sent one case after another with images that are ready to be denoised.
"""

import copy
import os
import pickle
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch

from sglang.multimodal_gen.configs.model_specs import read_model_spec
from sglang.multimodal_gen.configs.parallel_layout import ParallelLayout
from sglang.multimodal_gen.configs.server_args import ServerArgs
from sglang.multimodal_gen.runtime.distributed import parallel_state
from sglang.multimodal_gen.runtime.loader.component_loader import ComponentLoader
from sglang.multimodal_gen.runtime.managers.numeric_switches import numeric_switches
from sglang.multimodal_gen.runtime.pipelines.registry import DENOISING
from sglang.multimodal_gen.runtime.pipelines.stages.state import BatchState

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """Batches to be denoised by one model in one layout; `store_file` is new for each case."""

    rank: int
    layout: ParallelLayout
    folder: Path
    batches: bytes  # pickled: a pipe would share a tensor's memory instead of sending it
    store_file: str


def main(descriptor: int) -> None:
    """Answer cases with latents until the pipe is closed; a failure is answered by its text."""
    torch.set_num_threads(1)
    pipe = Connection(descriptor)
    pipe.send("ready")
    for case in _cases(pipe):
        if case is None:  # a smaller layout does without this rank
            pipe.send(None)
            continue
        try:
            state = parallel_state.join(case.rank, case.layout, CPU, case.store_file, 60.0)
            pipe.send(denoised(case.folder, pickle.loads(case.batches), state))
        except Exception:  # not swallowed: the test raises it
            pipe.send(traceback.format_exc())
        finally:
            parallel_state.leave()
    os._exit(0)  # torch's own end takes seconds


def denoised(
    folder: Path,
    batches: list[BatchState],
    state: parallel_state.ParallelState = parallel_state.SINGLE,
) -> list[np.ndarray]:
    """The denoised latents of every image. The batches stay as they are."""
    spec = read_model_spec(folder)
    loader = ComponentLoader(folder, False, CPU, state)
    with torch.inference_mode(), numeric_switches(CPU):
        stage = DENOISING[spec.pipeline_class](loader, spec, ServerArgs(device="cpu"))
        copies = copy.deepcopy(batches)
        for batch in copies:
            stage(batch)
    return [image.latents.numpy() for batch in copies for image in batch.images]


def silent(label: str, done: int, total: int) -> None:
    """A progress callback that can be pickled."""


def _cases(pipe: Connection) -> Iterator[Case | None]:
    try:
        while True:
            yield pipe.recv()
    except (EOFError, ConnectionError):
        return
