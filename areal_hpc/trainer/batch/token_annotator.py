"""Annotations of a batch's tokens, collected while the batch is trained."""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from areal_hpc.recipe.sections.trainer import ObjectiveConfig
from areal_hpc.rundir.checkpoints import UntrainedBatchPart
from areal_hpc.rundir.telemetry.token_annotations import UNTRAINED_TOKEN_REASONS, RowAnnotation
from areal_hpc.trainer.batch.packing import TrainingRow
from areal_hpc.trainer.batch.training_rows import (
    ADVANTAGE_CHANNEL,
    build_loss_mask_without_cut_replies,
)
from areal_hpc.trainer.untrained import is_optimizer_step_taken
from areal_hpc.wire.ledger import BatchManifest
from areal_hpc.wire.trajectory import TrajectoryRow

AnnotateMode = Literal["off", "sampled", "all"]
MAX_ROWS_IN_SAMPLED_MODE = 64
"""Rows of a step that `sampled` annotates, in whole groups."""
CUT, UNTRAINABLE, OUT_OF_BOUNDS, CLIPPED = (
    UNTRAINED_TOKEN_REASONS.index(name)
    for name in ("cut reply", "untrainable reply", "weight out of bounds", "clipped")
)
TOKEN_MEASURE_NAMES = ("logprob", "entropy", "ratio", "outside", "clipped", "seen")
"""What is collected of each token, in this order."""

FloatArray = npt.NDArray[np.float32]


def choose_rows_to_annotate(
    batch: Sequence[TrajectoryRow], mode: AnnotateMode, seed: int
) -> list[int]:
    """Places of the rows to annotate: all, or whole groups drawn by `seed`. Pure.

    The first group drawn is taken whatever its size, others while all fit into
    `MAX_ROWS_IN_SAMPLED_MODE`.
    """
    if mode == "off":
        return []
    if mode == "all":
        return list(range(len(batch)))
    groups: dict[tuple[int, int], list[int]] = {}
    for place, row in enumerate(batch):
        groups.setdefault((row.ticket_id, row.attempt), []).append(place)
    keys = list(groups)
    chosen: list[int] = []
    for number in np.random.default_rng(seed).permutation(len(keys)):
        group = groups[keys[number]]
        if not chosen or len(chosen) + len(group) <= MAX_ROWS_IN_SAMPLED_MODE:
            chosen += group
    return sorted(chosen)


def split_trained_and_left_out_rows(
    manifest: BatchManifest, untrained: Sequence[UntrainedBatchPart]
) -> tuple[list[tuple[str, int]], list[RowAnnotation]]:
    """Shard and number of each row that is trained, in the batch's order, and of the others. Pure.

    The others are annotated already: they have nothing but their outcome.
    """
    reasons = {ticket: one.reason for one in untrained for ticket in one.tickets}
    trained, left_out = [], []
    for ticket in manifest.tickets:
        reason = reasons.get(ticket.ref.ticket_id)
        for row in ticket.rows:
            if reason is None:
                trained.append((ticket.shard, row))
            else:
                left_out.append(RowAnnotation(shard=ticket.shard, row=row, outcome=reason))
    return trained, left_out


class TokenAnnotator:
    """Collects what the passes of one step find of the tokens of some rows.

    `rows` are those that `batch` became, dealt out to `minibatch_count` as minibatches are.
    """

    def __init__(
        self,
        batch: Sequence[TrajectoryRow],
        rows: Sequence[TrainingRow],
        chosen_row_indices: Sequence[int],
        minibatch_count: int,
    ) -> None:
        self._batch, self._rows, self._chosen, self._parts = (
            batch,
            rows,
            chosen_row_indices,
            minibatch_count,
        )
        self._starts: dict[int, int] = {}
        self._size = 0
        for place in chosen_row_indices:
            self._starts[place] = self._size
            self._size += len(rows[place].input_ids_T)
        self._places = [
            self._map_minibatch_tokens_to_columns(part) for part in range(minibatch_count)
        ]
        self._found: list[tuple[npt.NDArray[np.int64], torch.Tensor]] = []
        self._entropies: list[tuple[npt.NDArray[np.int64], torch.Tensor]] = []

    def _map_minibatch_tokens_to_columns(self, minibatch_index: int) -> npt.NDArray[np.int64]:
        targets = []
        for place in range(minibatch_index, len(self._rows), self._parts):
            size = len(self._rows[place].input_ids_T)
            start = self._starts.get(place)
            targets.append(np.full(size, -1) if start is None else np.arange(start, start + size))
        return np.concatenate(targets) if targets else np.empty(0, np.int64)

    def note_measures(
        self,
        minibatch_index: int,
        tokens_N: npt.NDArray[np.int64],
        logprobs_N: torch.Tensor,
        ratios_N: torch.Tensor,
        outside_N: torch.Tensor,
        clipped_N: torch.Tensor,
    ) -> None:
        """Keep what one micro-batch of a part found of its scored tokens."""
        places, kept_K = self._select_annotated_tokens(minibatch_index, tokens_N, logprobs_N.device)
        values = (logprobs_N, ratios_N, outside_N, clipped_N)
        stacked = torch.stack([one.detach()[kept_K].float() for one in values])
        self._found.append((places, stacked))

    def note_entropies(
        self, minibatch_index: int, tokens_N: npt.NDArray[np.int64], entropies_N: torch.Tensor
    ) -> None:
        """Keep the entropies of one micro-batch's distributions."""
        places, kept_K = self._select_annotated_tokens(
            minibatch_index, tokens_N, entropies_N.device
        )
        self._entropies.append((places, entropies_N.detach()[kept_K].float()))

    def _select_annotated_tokens(
        self, minibatch_index: int, tokens_N: npt.NDArray[np.int64], device: torch.device
    ) -> tuple[npt.NDArray[np.int64], torch.Tensor]:
        columns_N = self._places[minibatch_index][tokens_N]
        kept_K = np.flatnonzero(columns_N >= 0)
        return columns_N[kept_K], torch.from_numpy(kept_K).to(device, non_blocking=True)

    def gather(self, *, is_first_copy: bool) -> FloatArray:
        """All ranks' measures, in the order of `TOKEN_MEASURE_NAMES`, by token of the chosen rows.

        A collective. 0 where no pass saw a token. Of ranks that found the same, one has the
        first copy.
        """
        values = torch.zeros(len(TOKEN_MEASURE_NAMES), self._size)
        if is_first_copy:
            for places, measured in self._found:
                targets = torch.from_numpy(places)
                logprobs, ratios, outside, clipped = measured.cpu()
                values[0, targets] = logprobs
                values[2, targets] = ratios
                values[3, targets], values[4, targets] = outside, clipped
                values[5, targets] = 1.0
            for places, entropies in self._entropies:
                values[1, torch.from_numpy(places)] = entropies.cpu()
        if dist.get_world_size() > 1:
            dist.all_reduce(values)
        found: FloatArray = values.numpy()
        return found

    def build_row_annotations(
        self,
        measures: FloatArray,
        names: Sequence[tuple[str, int]],
        skip_reasons: Sequence[str],
        objective: ObjectiveConfig,
    ) -> list[RowAnnotation]:
        """The annotations of the chosen rows. Pure.

        `skip_reasons` says of each minibatch why no step was taken; empty where one was.
        """
        found = []
        for place in self._chosen:
            start = self._starts[place]
            own = measures[:, start : start + len(self._rows[place].input_ids_T)]
            why = skip_reasons[place % self._parts]
            stored, row = self._batch[place], self._rows[place]
            found.append(_annotate_row(names[place], stored, row, own, objective, why))
        return found


def describe_skipped_step(norm: float, critic_warms_up: bool) -> str:
    """Why rows taught the policy nothing although they have advantages; empty if they did."""
    if critic_warms_up:
        return "the critic warmed up: the policy was not trained"
    if not math.isfinite(norm):
        return "the gradient was not finite: the step was not taken"
    if not is_optimizer_step_taken(norm):  # the clip or the bounds left none of it, say
        return "the gradient was zero: the step was not taken"
    return ""


def _annotate_row(
    shard_and_row: tuple[str, int],
    trajectory: TrajectoryRow,
    row: TrainingRow,
    measures: FloatArray,
    objective: ObjectiveConfig,
    skip_reason: str,
) -> RowAnnotation:
    logprobs, entropies, ratios, outside, clipped, seen = measures
    is_sampled_T = trajectory.loss_mask_T == 1
    is_seen_T = seen > 0
    advantages_T = row.channels[ADVANTAGE_CHANNEL]
    reasons_T = np.zeros(len(seen), np.uint8)
    reasons_T[row.loss_mask_T == 0] = UNTRAINABLE
    if objective.overlong.mask:
        reasons_T[build_loss_mask_without_cut_replies(trajectory) == 0] = CUT
    reasons_T[is_seen_T & (clipped > 0)] = CLIPPED
    if objective.off_policy_correction != "none":
        reasons_T[is_seen_T & (outside > 0)] = OUT_OF_BOUNDS

    def pack(values_T: FloatArray, dtype: type[np.floating]) -> bytes:
        told = np.where(is_seen_T, values_T, np.nan)[is_sampled_T]
        limits = np.finfo(dtype)
        clamped = np.clip(told, float(limits.min), float(limits.max))
        return bytes(clamped.astype(np.dtype(dtype).newbyteorder("<")).tobytes())

    taught = advantages_T[is_seen_T]
    return RowAnnotation(
        shard=shard_and_row[0],
        row=shard_and_row[1],
        outcome=_describe_outcome(is_seen_T, taught, skip_reason),
        advantage=float(taught.mean()) if len(taught) else 0.0,
        advantages=pack(advantages_T, np.float16),
        logprobs=pack(logprobs, np.float32),
        entropies=pack(entropies, np.float16),
        ratios=pack(ratios, np.float16),
        reasons=reasons_T[is_sampled_T].tobytes(),
    )


def _describe_outcome(
    is_seen_T: npt.NDArray[np.bool_], taught: FloatArray, skip_reason: str
) -> str:
    if not is_seen_T.any():
        return "masked"
    if not np.any(taught != 0):
        return "no advantage"
    return skip_reason or "trained"
