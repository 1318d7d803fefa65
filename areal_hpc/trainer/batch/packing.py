"""Packing of rows: the choice of sequences that share a forward pass, and its input. Pure numpy.

Sequences lie end to end (THD). Padding exists only where parallelism demands equal parts: context
parallelism divides every sequence into `2 cp` equal chunks, of which rank r holds chunks r and
2cp-1-r (zig-zag, so that causal work is even), and sequence parallelism makes each rank's number of
tokens a multiple of tp.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from areal_hpc.wire.trajectory import RouteArray, SamplingMask, lay_out_routes

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


class Channel(StrEnum):
    """Per-token numbers of a row; the first three always, others only when needed."""

    ADVANTAGE = "advantage"
    BEHAVIOR = "behavior"
    """Engine's log-probabilities."""
    CURRENT_WEIGHTS = "current"
    """1 for tokens that the trainer's current weights sampled."""
    STALENESS = "age"
    """Number of versions between the sampling weights and the current ones."""
    SCALE = "scale"
    """Factor of the loss terms."""
    TEMPERATURE = "temperature"
    """Divisor of the logits."""
    PROXIMAL = "proximal"
    """Log-probabilities under the weights at the start of the step."""
    REFERENCE = "reference"
    """Log-probabilities of the reference."""
    VALUE = "value"
    """Critic's values at the start of the step."""
    RETURN = "return"
    """Targets of the critic."""
    CROSS_ENTROPY = "cross_entropy"
    """Weight of a token's cross-entropy; where it is not 0, the token has no other loss."""


CRITIC_CHANNELS = (Channel.VALUE, Channel.RETURN)


@dataclass(frozen=True, slots=True, eq=False)
class TrainingRow:
    """One sequence to train on. Every array has length T, one element per token."""

    input_ids_T: npt.NDArray[np.int32]
    loss_mask_T: npt.NDArray[np.uint8]
    channels: Mapping[str, FloatArray]
    """Numbers per token that the loss needs; read where `loss_mask_T` is 1."""
    sampling_mask: SamplingMask | None = None
    """Tokens that could be sampled at each position; None if all could everywhere."""
    routes_TLK: RouteArray | None = None
    """Experts that its tokens visit; None if the router chooses."""
    objective: int = 0
    """Index of its objective, if the sources of tasks have several; a pass has rows of one."""


@dataclass(frozen=True, slots=True)
class PackParallelism:
    tp: int = 1
    cp: int = 1
    cp_rank: int = 0

    @property
    def sequence_multiple(self) -> int:
        return 2 * self.cp if self.cp > 1 else 1

    @property
    def pack_multiple(self) -> int:
        return math.lcm(self.sequence_multiple, self.cp * self.tp)


@dataclass(frozen=True, slots=True, eq=False)
class Pack:
    """One forward pass of one context-parallel rank. T: its tokens; N: tokens that are scored."""

    padded_lengths: IntArray
    """Padded length of each sequence over all context-parallel ranks [S]."""
    input_ids_T: IntArray
    positions_T: IntArray
    """Position of each local token within its sequence."""
    logit_indices_N: IntArray
    """Local indices whose logits predict a token of the loss."""
    labels_N: IntArray
    """Tokens that these logits predict."""
    rows_N: IntArray
    """Index of the sequence of each predicted token in the pack."""
    label_positions_N: IntArray
    """Position of each predicted token within its sequence."""
    channels_N: dict[str, FloatArray]
    """Channels of the rows at the predicted tokens."""
    sampling_mask_N: SamplingMask | None = None
    """Tokens that could be sampled in place of each predicted token; None if all could."""
    routes_TLK: RouteArray | None = None
    """Experts that the local tokens visit."""


def count_scored_tokens(rows: Sequence[TrainingRow]) -> int:
    return sum(int(np.count_nonzero(row.loss_mask_T[1:])) for row in rows)


def count_policy_tokens(rows: Sequence[TrainingRow]) -> int:
    """Count the scored tokens that have advantages: all but those of the cross-entropy."""
    others = (row.channels.get(Channel.CROSS_ENTROPY) for row in rows)
    return count_scored_tokens(rows) - sum(
        int(np.count_nonzero(weights_T)) for weights_T in others if weights_T is not None
    )


def split_minibatches(rows: Sequence[TrainingRow], count: int) -> list[list[TrainingRow]]:
    return [list(rows[first::count]) for first in range(min(count, len(rows)))]


def compute_padded_length(length: int, parallelism: PackParallelism) -> int:
    return -(-length // parallelism.sequence_multiple) * parallelism.sequence_multiple


def plan_packs(
    lengths: Sequence[int], *, ranks: int, max_tokens: int, parallelism: PackParallelism
) -> list[list[list[int]]]:
    """Assign sequences to ranks and micro-batches: `plan[rank][micro_batch]` lists their indices.

    Every data-parallel rank gets the same number of micro-batches, since each is a collective. The
    longest sequences are placed first, always into the pack with the lowest load. Packs hold at
    most `max_tokens` tokens; a longer sequence gets its own pack.
    """
    sizes = [compute_padded_length(length, parallelism) for length in lengths]
    order = sorted(range(len(sizes)), key=lambda index: (-sizes[index], index))
    needed = -(-sum(sizes) // max_tokens)
    rounds = max(1, -(-needed // ranks))
    while True:
        packs = _assign_sequences_to_least_loaded_packs(order, sizes, rounds * ranks)
        if all(len(pack) <= 1 or sum(sizes[i] for i in pack) <= max_tokens for pack in packs):
            return [packs[rank::ranks] for rank in range(ranks)]
        rounds += 1


def _assign_sequences_to_least_loaded_packs(
    sequence_indices: Sequence[int], sequence_lengths: Sequence[int], packs: int
) -> list[list[int]]:
    loads = np.zeros(packs, dtype=np.int64)
    plan: list[list[int]] = [[] for _ in range(packs)]
    for index in sequence_indices:
        pack = int(loads.argmin())
        plan[pack].append(index)
        loads[pack] += sequence_lengths[index]
    return plan


def build_pack(
    rows: Sequence[TrainingRow], channels: Sequence[str], parallelism: PackParallelism
) -> Pack:
    """Lay rows end to end and keep this context-parallel rank's part.

    A pack without rows holds one filler sequence without scored tokens: the rank must still take
    part in the collectives of the pass. Logits of a token predict the next one, so the first token
    of a sequence is never scored, whatever its mask.
    """
    lengths = np.array(
        [compute_padded_length(len(row.input_ids_T), parallelism) for row in rows] or [0]
    )
    lengths[-1] += -int(lengths.sum()) % parallelism.pack_multiple or (
        0 if rows else parallelism.pack_multiple
    )
    total = int(lengths.sum())
    starts = np.cumsum(lengths) - lengths
    ids_T = np.zeros(total, dtype=np.int64)
    scored_T = np.zeros(total, dtype=bool)
    values = {name: np.zeros(total, dtype=np.float32) for name in channels}
    for row, start in zip(rows, starts, strict=False):
        size = len(row.input_ids_T)
        ids_T[start : start + size] = row.input_ids_T
        scored_T[start : start + size - 1] = row.loss_mask_T[1:] != 0
        for name in channels:
            values[name][start : start + size] = row.channels[name]
    positions = [
        get_zigzag_positions(int(length), parallelism.cp, parallelism.cp_rank) for length in lengths
    ]
    indices_T = np.concatenate([start + own for start, own in zip(starts, positions, strict=True)])
    own = slice(None) if parallelism.cp == 1 else indices_T  # a slice copies nothing
    logit_indices_N = np.flatnonzero(scored_T[own])
    predicted_N = indices_T[logit_indices_N] + 1
    starts_and_routes = [*zip(starts.tolist(), (row.routes_TLK for row in rows), strict=False)]
    routes_TLK = lay_out_routes(starts_and_routes, total)
    rows_N = np.searchsorted(starts, predicted_N, side="right") - 1
    label_positions_N = predicted_N - starts[rows_N]
    return Pack(
        padded_lengths=lengths,
        input_ids_T=ids_T[own],
        positions_T=np.concatenate(positions),
        logit_indices_N=logit_indices_N,
        labels_N=ids_T[predicted_N],
        rows_N=rows_N,
        label_positions_N=label_positions_N,
        channels_N={name: value[predicted_N] for name, value in values.items()},
        sampling_mask_N=_gather_sampling_mask_of_predicted(rows, rows_N, label_positions_N),
        routes_TLK=None if routes_TLK is None else routes_TLK[own],
    )


def _gather_sampling_mask_of_predicted(
    rows: Sequence[TrainingRow], rows_N: IntArray, label_positions_N: IntArray
) -> SamplingMask | None:
    if all(row.sampling_mask is None for row in rows):
        return None
    counts_N, ids = np.zeros(len(rows_N), np.uint16), [np.empty(0, np.int32)]
    forbids_N = np.zeros(len(rows_N), np.bool_)
    for number, row in enumerate(rows):
        if (mask := row.sampling_mask) is None:
            continue
        own_N = rows_N == number
        positions = label_positions_N[own_N]  # ascending, also under context parallelism
        counts_N[own_N] = mask.counts_T[positions]
        if mask.forbids_T is not None:
            forbids_N[own_N] = mask.forbids_T[positions]
        is_predicted_T = np.zeros(len(mask.counts_T), dtype=bool)
        is_predicted_T[positions] = True
        ids.append(mask.ids[np.repeat(is_predicted_T, mask.counts_T)])
    return SamplingMask(counts_N, np.concatenate(ids), forbids_N)


def get_zigzag_positions(length: int, cp: int, rank: int) -> IntArray:
    """Return the positions that context-parallel rank `rank` holds: chunks rank and 2cp-1-rank."""
    if cp == 1:
        return np.arange(length)
    chunk = length // (2 * cp)
    first = np.arange(chunk)
    return np.concatenate([first + rank * chunk, first + (2 * cp - 1 - rank) * chunk])


def locate_sequence_after_cp_gather(index: int, lengths: IntArray, cp: int) -> IntArray:
    """Locate each position of a sequence after all ranks' tokens were gathered rank by rank."""
    local_total = int(lengths.sum()) // cp
    start = int(lengths[:index].sum()) // cp
    indices = np.empty(int(lengths[index]), dtype=np.int64)
    for rank in range(cp):
        positions = get_zigzag_positions(int(lengths[index]), cp, rank)
        indices[positions] = rank * local_total + start + np.arange(len(positions))
    return indices
