"""Annotations of each step as the learner makes them: chosen, collected, written by rank 0."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from areal_hpc.recipe.sections.trainer import TrainerConfig
from areal_hpc.rundir.checkpoints import TrainerState, UntrainedBatchPart
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.telemetry.token_annotations import AnnotationWriter, StepAnnotations
from areal_hpc.trainer.batch.packing import TrainingRow
from areal_hpc.trainer.batch.token_annotator import (
    TokenAnnotator,
    choose_rows_to_annotate,
    describe_skipped_step,
    split_trained_and_left_out_rows,
)
from areal_hpc.trainer.batch.training_rows import (
    ADVANTAGE_CHANNEL,
    BEHAVIOR_LOGPROBS_CHANNEL,
    PROXIMAL_CHANNEL,
)
from areal_hpc.trainer.objective.token_measures import measure_token_ratios_and_bounds
from areal_hpc.trainer.step import MicroBatch
from areal_hpc.wire.ledger import BatchManifest
from areal_hpc.wire.trajectory import TrajectoryRow


class StepAnnotator:
    """What one rank does for `trainer.annotate`. Every method may be called with it off."""

    def __init__(self, config: TrainerConfig, paths: RunPaths) -> None:
        self._config = config
        self._writer = AnnotationWriter(paths)
        self._tokens: TokenAnnotator | None = None
        self._rows_of_batch = 0

    def begin_step(
        self,
        batch: Sequence[TrajectoryRow],
        rows: Sequence[TrainingRow],
        minibatch_count: int,
        state: TrainerState,
    ) -> None:
        """Choose the rows of a batch that `state` is about to be trained on, in minibatches."""
        chosen = choose_rows_to_annotate(
            batch, self._config.annotate, (state.seed << 32) + state.step
        )
        self._tokens = TokenAnnotator(batch, rows, chosen, minibatch_count) if chosen else None
        self._rows_of_batch = len(batch)

    def note_token_measures(
        self,
        minibatch_index: int,
        batch: MicroBatch,
        current_logprobs_N: torch.Tensor,
        proximal_N: torch.Tensor,
    ) -> None:
        """Take what a pass found, before the loss is made of it. A collective where that is one."""
        if self._tokens is None:
            return
        found = measure_token_ratios_and_bounds(
            current_logprobs_N,
            proximal_N,
            batch.channels_N[BEHAVIOR_LOGPROBS_CHANNEL],
            batch.channels_N[ADVANTAGE_CHANNEL],
            batch.rows,
            self._config.objective,
        )
        logprobs_N = batch.channels_N.get(PROXIMAL_CHANNEL, current_logprobs_N)
        self._tokens.note_measures(
            minibatch_index,
            batch.flat_token_indices_N,
            logprobs_N,
            found.ratios_N,
            found.outside_N,
            found.clipped_N,
        )

    def note_entropies(
        self, minibatch_index: int, batch: MicroBatch, entropies_N: torch.Tensor
    ) -> None:
        if self._tokens is not None:
            self._tokens.note_entropies(minibatch_index, batch.flat_token_indices_N, entropies_N)

    def gather_and_write_step(
        self,
        manifest: BatchManifest,
        untrained: Sequence[UntrainedBatchPart],
        norms: Sequence[float],
        generation: int,
        critic_warms_up: bool = False,
    ) -> None:
        """Gather what all ranks took, and have rank 0 write it. A collective."""
        if self._tokens is None:
            return
        is_first_copy = parallel_state.get_tensor_model_parallel_rank() == 0
        measures = self._tokens.gather(is_first_copy=is_first_copy)
        if dist.get_rank() == 0:
            names, left_out = split_trained_and_left_out_rows(manifest, untrained)
            untaken = [describe_skipped_step(norm, critic_warms_up) for norm in norms]
            rows = self._tokens.build_row_annotations(
                measures, names, untaken, self._config.objective
            )
            self._writer.start_write_or_skip(
                StepAnnotations(
                    step=manifest.step,
                    generation=generation,
                    rows_of_batch=self._rows_of_batch + len(left_out),
                    rows=rows + left_out,
                )
            )
        self._tokens = None

    def close(self) -> None:
        self._writer.close()
