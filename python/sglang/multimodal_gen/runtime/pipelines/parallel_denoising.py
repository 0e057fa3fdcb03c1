"""The denoising stage of several ranks: rank 0 leads, the others follow step by step.

Rank 0 alone encodes prompts, draws noise and decodes. When a batch is ready to be denoised it
sends the job, broadcasts the tensors, and runs the ordinary stage, as the others then do. After
each step rank 0 says whether to go on, so that a cancelled request leaves no rank in a collective.
"""

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang.kernels.ops.diffusion.bitexact_gate import all_gates
from sglang.multimodal_gen.runtime.distributed.launch import RankProcesses
from sglang.multimodal_gen.runtime.distributed.parallel_state import broadcast
from sglang.multimodal_gen.runtime.pipelines.base import Pipeline
from sglang.multimodal_gen.runtime.pipelines.rank_messages import (
    Answer,
    DenoiseJob,
    StepDone,
    condition_tensors,
    tensors_of,
)
from sglang.multimodal_gen.runtime.pipelines.stages.checks import NonFiniteError
from sglang.multimodal_gen.runtime.pipelines.stages.denoising import DenoisingStage
from sglang.multimodal_gen.runtime.pipelines.stages.state import (
    BatchState,
    ProgressCallback,
)

logger = logging.getLogger(__name__)


class JobAbandoned(Exception):
    """A further rank was told to leave the job; nothing is wrong with it."""


@dataclass
class LeadingDenoisingStage:
    """Rank 0's denoising stage: the ordinary one, with every other rank in step."""

    stage: DenoisingStage
    ranks: RankProcesses

    @property
    def name(self) -> str:
        """Of the ordinary stage."""
        return self.stage.name

    @property
    def transformer(self) -> torch.nn.Module:
        """This rank's."""
        return self.stage.transformer

    def __call__(self, batch: BatchState) -> None:
        self.ranks.send_all(DenoiseJob.of(batch))
        pacer = _Pacer(self.ranks, batch.on_progress)
        try:
            _broadcast(batch)
            batch.on_progress = pacer.on_progress
            self.stage(batch)
        except BaseException as error:
            self._end_job(error, pacer)
            raise
        finally:
            batch.on_progress = pacer.progress
        answers = self.ranks.answers()
        for answer in answers:
            if answer.failure:
                self.ranks.give_up(answer.failure)
        self.ranks.check()
        _warn_of_fallbacks(answers)

    def _end_job(self, error: BaseException, pacer: "_Pacer") -> None:
        """Bring the ranks back to where they wait for a job; where that cannot be, end them.

        Raises RankLost from `error` where a lost rank is what lies behind it.
        """
        if isinstance(error, NonFiniteError):
            self.ranks.answers()  # every rank has the same latents, and so the same error
        elif pacer.between_steps:
            self.ranks.send_all(StepDone(proceed=False))
            self.ranks.answers()
        else:
            self._lose(error)

    def _lose(self, error: BaseException) -> None:
        if isinstance(error, Exception):
            self.ranks.wait_for_loss()
        self.ranks.give_up(f"rank 0 left a step: {type(error).__name__}: {error}")


def lead_ranks(pipeline: Pipeline, ranks: RankProcesses) -> None:
    """Have every rank take part in the pipeline's denoising."""
    pipeline.stages = tuple(
        LeadingDenoisingStage(stage, ranks) if isinstance(stage, DenoisingStage) else stage
        for stage in pipeline.stages
    )


class _Pacer:
    """Tells the other ranks after each step of rank 0 that they may go on."""

    def __init__(self, ranks: RankProcesses, progress: ProgressCallback) -> None:
        self.progress = progress
        self.between_steps = False
        self._ranks = ranks

    def on_progress(self, label: str, done: int, total: int) -> None:
        """The caller's callback, which may raise to cancel; then the word to the ranks."""
        self._ranks.check()
        self.between_steps = True
        self.progress(label, done, total)
        self.between_steps = False
        self._ranks.send_all(StepDone(proceed=True))


def _warn_of_fallbacks(answers: Sequence[Answer]) -> None:
    """A fused site that ran eager on another rank, where this one's report says it did not."""
    here = {gate.name for gate in all_gates() if gate.eager_calls}
    for rank, answer in enumerate(answers, start=1):
        for site in answer.sites:
            if site.get("eager_calls") and site["op"] not in here:
                logger.warning("rank %d ran %s eagerly: %s", rank, site["op"], site["reason"])


def _broadcast(batch: BatchState) -> None:
    """Everything that `FollowingRank` receives, in its order."""
    found = [tensors_of(image) for image in batch.images]
    found += [condition_tensors(condition) for condition in batch.conditions]
    for _, tensor in itertools.chain(*found):
        broadcast(tensor.contiguous())
