"""Choose the layout of a model's ranks, start the further ones, and meet them."""

import logging
from pathlib import Path

import torch

from sglang.multimodal_gen import environ
from sglang.multimodal_gen.configs.model_specs import ModelSpec, read_json
from sglang.multimodal_gen.configs.parallel_layout import (
    ModelTraits,
    ParallelLayout,
    choose_layout,
    explain,
)
from sglang.multimodal_gen.configs.server_args import ServerArgs
from sglang.multimodal_gen.configs.validation import rejected
from sglang.multimodal_gen.runtime.distributed.launch import RankProcesses
from sglang.multimodal_gen.runtime.distributed.parallel_state import ParallelState
from sglang.multimodal_gen.runtime.pipelines.rank_messages import StartRank

logger = logging.getLogger(__name__)

RANK_MODULE = "sglang.multimodal_gen.runtime.managers.rank_main"


def find_layout(args: ServerArgs, spec: ModelSpec, folder: Path) -> ParallelLayout:
    """The layout of the ranks that `args` ask for, checked against the model and logged.

    Reads configs only. Raises InvalidParameter naming the setting at fault.
    """
    traits = ModelTraits.of(spec, read_json(folder / "transformer" / "config.json"))
    layout = choose_layout(args, traits)
    if layout.world > 1:
        reason = explain(layout, traits)
        logger.info("num_gpus=%d: layout %s: %s", args.num_gpus, layout, reason)
    return layout


def check_devices(args: ServerArgs, device: torch.device) -> None:
    """Raise InvalidParameter where the machine has fewer GPUs than ranks."""
    if args.num_gpus == 1 or args.device == "cpu":
        return
    count = torch.cuda.device_count() if device.type == "cuda" else 0
    if args.num_gpus > count:
        advice = "device='cpu' runs that many processes on the CPU"
        raise rejected("num_gpus", args.num_gpus, f"at most the {count} GPUs here", advice)


def start_ranks(
    args: ServerArgs, layout: ParallelLayout, device: torch.device, folder: Path
) -> tuple[RankProcesses, ParallelState]:
    """Start ranks 1 and up and join them. They load while the caller does; `answers` waits."""
    ranks = RankProcesses(RANK_MODULE, layout.world - 1, environ.COLLECTIVE_TIMEOUT.get())
    try:
        ranks.answers()  # each has imported what it needs
        ranks.send(
            [
                StartRank(
                    rank=rank,
                    layout=layout,
                    device=str(_device_of(rank, device)),
                    folder=str(folder),
                    args=args,
                    store_file=ranks.store_file,
                    timeout_s=ranks.timeout_s,
                    threads=torch.get_num_threads(),
                )
                for rank in range(1, layout.world)
            ]
        )
        state = ranks.join(layout, device)
    except BaseException:
        ranks.close()
        raise
    return ranks, state


def await_loaded(ranks: RankProcesses) -> None:
    """Return when every further rank has loaded its part. Raises RankLost where one could not."""
    for answer in ranks.answers():
        if answer.failure:
            ranks.give_up(f"a rank could not load:\n{answer.failure}")
    ranks.check()


def _device_of(rank: int, first: torch.device) -> torch.device:
    if first.type == "cpu":
        return first
    return torch.device("cuda", (first.index + rank) % torch.cuda.device_count())
