"""Annotations of a step, made from the loss's own tensors; rank 0 writes them for viewing."""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from areal_hpc.recipe.sections.objective import ObjectiveConfig
from areal_hpc.recipe.sections.trainer import TrainerConfig
from areal_hpc.rundir.checkpoints import TrainerState, UntrainedBatchPart
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.telemetry.token_annotations import (
    UNTRAINED_TOKEN_REASONS,
    AnnotationWriter,
    RowAnnotation,
    StepAnnotations,
)
from areal_hpc.trainer.batch.packing import Channel, TrainingRow
from areal_hpc.trainer.batch.training_rows import build_loss_mask_without_cut_replies
from areal_hpc.trainer.batch.untrained import is_optimizer_step_taken
from areal_hpc.trainer.objective.policy_loss import PolicyLoss
from areal_hpc.trainer.step import MicroBatch
from areal_hpc.wire.ledger import BatchManifest
from areal_hpc.wire.trajectory import TrajectoryRow

AnnotateMode = Literal["off", "sampled", "all"]
MAX_ROWS_IN_SAMPLED_MODE = 64
"""Rows of a step that mode `sampled` annotates, in whole groups."""
CUT, UNTRAINABLE, OUT_OF_BOUNDS, CLIPPED = (
    UNTRAINED_TOKEN_REASONS.index(name)
    for name in ("cut reply", "untrainable reply", "weight out of bounds", "clipped")
)
TOKEN_MEASURE_NAMES = ("logprob", "entropy", "ratio", "outside", "clipped", "seen")

FloatArray = npt.NDArray[np.float32]


class StepAnnotator:
    """One rank's part in `trainer.annotate`. Every method may be called while it is off.

    The chosen rows lie one after another in a table of tokens; each micro-batch fills its columns.
    """

    def __init__(self, config: TrainerConfig, paths: RunPaths) -> None:
        self._config = config
        self._writer = AnnotationWriter(paths)
        self._batch: Sequence[TrajectoryRow] = ()
        self._rows: Sequence[TrainingRow] = ()
        self._starts: dict[int, int] = {}
        self._noted: list[tuple[npt.NDArray[np.int64], torch.Tensor]] = []
        self._columns: list[npt.NDArray[np.int64]] = []

    def begin_step(
        self,
        batch: Sequence[TrajectoryRow],
        rows: Sequence[TrainingRow],
        minibatch_count: int,
        state: TrainerState,
    ) -> None:
        """Choose the rows to annotate in a batch on which `state` is about to be trained."""
        chosen = choose_rows_to_annotate(
            batch, self._config.annotate, (state.seed << 32) + state.step
        )
        self._batch, self._rows, self._noted = batch, rows, []
        lengths = [len(rows[index].input_ids_T) for index in chosen]
        starts = np.cumsum([0, *lengths])[:-1].tolist()
        self._starts = dict(zip(chosen, starts, strict=True))
        self._columns = [
            self._map_tokens_to_columns(range(first, len(rows), minibatch_count))
            for first in range(minibatch_count)
        ]

    def _map_tokens_to_columns(self, row_indices: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return the column of each token of these rows; -1 if the row is not annotated."""
        columns = [np.empty(0, np.int64)]
        for index in row_indices:
            size, start = len(self._rows[index].input_ids_T), self._starts.get(index)
            columns.append(np.full(size, -1) if start is None else np.arange(start, start + size))
        return np.concatenate(columns)

    def note_tokens(
        self,
        minibatch_index: int,
        batch: MicroBatch,
        logprobs_N: torch.Tensor,
        entropy_N: torch.Tensor,
        loss: PolicyLoss,
    ) -> None:
        """Keep the loss's values of a micro-batch's annotated tokens; copy none to the host."""
        if not self._starts:
            return
        columns_N = self._columns[minibatch_index][batch.flat_token_indices_N]
        kept_K = np.flatnonzero(columns_N >= 0)
        kept = torch.from_numpy(kept_K).to(logprobs_N.device, non_blocking=True)
        values = (logprobs_N, entropy_N, loss.ratio_N, loss.outside_N, loss.clipped_N)
        measured = torch.stack([values_N.detach()[kept].float() for values_N in values])
        self._noted.append((columns_N[kept_K], measured))

    def finish_step(
        self,
        manifest: BatchManifest,
        untrained: Sequence[UntrainedBatchPart],
        norms: Sequence[float],
        generation: int,
        critic_warms_up: bool = False,
    ) -> None:
        """Gather the notes of all ranks, and let rank 0 write them. A collective."""
        if not self._starts:
            return
        measures = self._gather_measures()
        if dist.get_rank() == 0:
            names, left_out = split_rows_by_outcome(manifest, untrained)
            reasons = [describe_skipped_step(norm, critic_warms_up) for norm in norms]
            rows = [
                annotate_row(
                    names[index],
                    self._batch[index],
                    self._rows[index],
                    measures[:, start : start + len(self._rows[index].input_ids_T)],
                    self._config.objective,
                    reasons[index % len(reasons)],
                )
                for index, start in self._starts.items()
            ]
            self._writer.start_write(
                StepAnnotations(
                    step=manifest.step,
                    generation=generation,
                    rows_of_batch=len(self._batch) + len(left_out),
                    rows=rows + left_out,
                )
            )
        self._batch, self._rows, self._starts, self._noted = (), (), {}, []

    def _gather_measures(self) -> FloatArray:
        """Gather all ranks' measures by column, ordered as `TOKEN_MEASURE_NAMES`. A collective.

        0 for tokens that no pass saw. Only the first tensor-parallel rank counts: all agree.
        """
        size = sum(len(self._rows[index].input_ids_T) for index in self._starts)
        values = torch.zeros(len(TOKEN_MEASURE_NAMES), size)
        if parallel_state.get_tensor_model_parallel_rank() == 0:
            for columns, measured in self._noted:
                targets = torch.from_numpy(columns)
                values[:-1, targets] = measured.cpu()
                values[-1, targets] = 1.0
        if dist.get_world_size() > 1:
            dist.all_reduce(values)
        measures: FloatArray = values.numpy()
        return measures

    def close(self) -> None:
        self._writer.close()


def choose_rows_to_annotate(
    batch: Sequence[TrajectoryRow], mode: AnnotateMode, seed: int
) -> list[int]:
    """Return the indices of the rows to annotate: all, or whole groups drawn by `seed`. Pure.

    The first group drawn is chosen at any size, others while all fit into
    `MAX_ROWS_IN_SAMPLED_MODE`.
    """
    if mode == "off":
        return []
    if mode == "all":
        return list(range(len(batch)))
    groups: dict[tuple[int, int], list[int]] = {}
    for index, row in enumerate(batch):
        groups.setdefault((row.ticket_id, row.attempt), []).append(index)
    keys = list(groups)
    chosen: list[int] = []
    for number in np.random.default_rng(seed).permutation(len(keys)):
        group = groups[keys[number]]
        if not chosen or len(chosen) + len(group) <= MAX_ROWS_IN_SAMPLED_MODE:
            chosen += group
    return sorted(chosen)


def split_rows_by_outcome(
    manifest: BatchManifest, untrained: Sequence[UntrainedBatchPart]
) -> tuple[list[tuple[str, int]], list[RowAnnotation]]:
    """Return shard and number of each trained row, in batch order, and the other rows. Pure.

    The others are complete annotations: they have nothing but their outcome.
    """
    reasons = {ticket: part.reason for part in untrained for ticket in part.tickets}
    trained, untrained_rows = [], []
    for ticket in manifest.tickets:
        reason = reasons.get(ticket.ref.ticket_id)
        for row in ticket.rows:
            if reason is None:
                trained.append((ticket.shard, row))
            else:
                untrained_rows.append(RowAnnotation(shard=ticket.shard, row=row, outcome=reason))
    return trained, untrained_rows


def describe_skipped_step(norm: float, critic_warms_up: bool) -> str:
    """Return why the policy's step was not taken although rows have advantages; empty if it was."""
    if critic_warms_up:
        return "the critic warmed up: the policy was not trained"
    if not math.isfinite(norm):
        return "the gradient was not finite: the step was not taken"
    if not is_optimizer_step_taken(norm):  # for example when all tokens are clipped
        return "the gradient was zero: the step was not taken"
    return ""


def annotate_row(
    shard_and_row: tuple[str, int],
    trajectory: TrajectoryRow,
    row: TrainingRow,
    measures: FloatArray,
    objective: ObjectiveConfig,
    skip_reason: str,
) -> RowAnnotation:
    """Build the annotation of a row from the measures of its tokens. Pure.

    `skip_reason` is why its minibatch's optimizer step was not taken; empty if it was.
    """
    logprobs, entropies, ratios, outside, clipped, seen = measures
    is_sampled_T = trajectory.loss_mask_T == 1
    is_seen_T = seen > 0
    advantages_T = row.channels[Channel.ADVANTAGE]
    reasons_T = np.zeros(len(seen), np.uint8)
    reasons_T[row.loss_mask_T == 0] = UNTRAINABLE
    if objective.overlong.mask:
        reasons_T[build_loss_mask_without_cut_replies(trajectory) == 0] = CUT
    reasons_T[is_seen_T & (clipped > 0)] = CLIPPED
    if objective.off_policy_correction != "none":
        reasons_T[is_seen_T & (outside > 0)] = OUT_OF_BOUNDS

    def pack(values_T: FloatArray, dtype: type[np.floating]) -> bytes:
        seen_values = np.where(is_seen_T, values_T, np.nan)[is_sampled_T]
        limits = np.finfo(dtype)
        clamped = np.clip(seen_values, float(limits.min), float(limits.max))
        return bytes(clamped.astype(np.dtype(dtype).newbyteorder("<")).tobytes())

    seen_advantages = advantages_T[is_seen_T]
    if not len(seen_advantages):
        outcome = "masked"
    elif not seen_advantages.any():
        outcome = "no advantage"
    else:
        outcome = skip_reason or "trained"
    return RowAnnotation(
        shard=shard_and_row[0],
        row=shard_and_row[1],
        outcome=outcome,
        advantage=float(seen_advantages.mean()) if len(seen_advantages) else 0.0,
        advantages=pack(advantages_T, np.float16),
        logprobs=pack(logprobs, np.float32),
        entropies=pack(entropies, np.float16),
        ratios=pack(ratios, np.float16),
        reasons=reasons_T[is_sampled_T].tobytes(),
    )
