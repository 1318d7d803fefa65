"""Training rows of a batch: read, checked, scored, with the channels that the loss needs."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from areal_hpc.errors import ShardError
from areal_hpc.recipe.sections.objective import ObjectiveConfig
from areal_hpc.rundir.checkpoints import UntrainedBatchPart
from areal_hpc.shards.verify import CheckedShards
from areal_hpc.trainer.batch.batch_metrics import CUT_FINISH_REASON, count_sampled_tokens_by_version
from areal_hpc.trainer.batch.packing import Channel, TrainingRow
from areal_hpc.trainer.batch.untrained import (
    drop_distorted_replies_from_loss_mask,
    forbid_end_tokens,
    get_reply_span,
)
from areal_hpc.trainer.collectives import read_with_retries_on_all_ranks
from areal_hpc.trainer.objective.advantages import (
    FloatRows,
    MaskRows,
    compute_advantages,
    compute_reply_earnings,
    estimate_advantages,
    list_reply_rewards,
    scale_token_advantages,
)
from areal_hpc.trainer.objective.policy_loss import compute_loss_aggregation_row_factors
from areal_hpc.wire.ledger import BatchManifest, SealedTicket
from areal_hpc.wire.trajectory import TrajectoryRow, find_row_defect
from areal_hpc.wire.weight_version import GenerationFork, WeightVersion, compute_staleness_steps


@dataclass(frozen=True, slots=True, eq=False)
class BatchScores:
    """Per-row scores of a batch's tokens; 0 for tokens that the loss ignores."""

    start_policy_logprobs: FloatRows | None = None
    """Log-probabilities under the weights at the start of the step."""
    reference: FloatRows | None = None
    teacher: FloatRows | None = None
    values: FloatRows | None = None
    """Critic's values of the state before each token."""

    @property
    def policy_minus_reference_logprobs(self) -> FloatRows | None:
        """Log pi - log reference at each token."""
        return _subtract_rows(self.start_policy_logprobs, self.reference)

    @property
    def teacher_minus_policy_logprobs(self) -> FloatRows | None:
        """Log teacher - log pi at each token."""
        return _subtract_rows(self.teacher, self.start_policy_logprobs)


def _subtract_rows(rows: FloatRows | None, subtracted: FloatRows | None) -> FloatRows | None:
    if rows is None or subtracted is None:
        return None
    return [row_T - other_T for row_T, other_T in zip(rows, subtracted, strict=True)]


NO_SCORES = BatchScores()


def read_sound_rows_on_all_ranks(
    manifest: BatchManifest, shards: CheckedShards, vocab_size: int
) -> tuple[list[TrajectoryRow], list[UntrainedBatchPart]]:
    """Read the sound rows of a batch; also return the parts left out. A collective: all or none."""

    def read() -> tuple[list[TrajectoryRow], list[UntrainedBatchPart]]:
        with shards.check_digests_in_background({ticket.shard for ticket in manifest.tickets}):
            return select_sound_rows(read_rows_by_ticket(manifest, shards), manifest, vocab_size)

    return read_with_retries_on_all_ranks(read, ShardError)


def read_rows_by_ticket(
    manifest: BatchManifest, shards: CheckedShards
) -> list[list[TrajectoryRow]]:
    rows_of: dict[str, list[int]] = {}
    for ticket in manifest.tickets:
        rows_of.setdefault(ticket.shard, []).extend(ticket.rows)
    stored = {name: iter(shards.read_training_rows(name, rows)) for name, rows in rows_of.items()}
    batch = [[next(stored[ticket.shard]) for _ in ticket.rows] for ticket in manifest.tickets]
    for ticket, rows in zip(manifest.tickets, batch, strict=True):
        for row in rows:
            if (row.ticket_id, row.attempt) != (ticket.ref.ticket_id, ticket.ref.attempt):
                raise ShardError(
                    f"expected rows of ticket {ticket.ref.ticket_id}, attempt "
                    f"{ticket.ref.attempt}, got those of {row.ticket_id}, {row.attempt}",
                    key=ticket.shard,
                    hint="restore manifests/ and shards/ from the same copy",
                )
    return batch


def select_sound_rows(
    tickets: Sequence[Sequence[TrajectoryRow]], manifest: BatchManifest, vocab_size: int
) -> tuple[list[TrajectoryRow], list[UntrainedBatchPart]]:
    """Return the trajectories of sound tickets with the manifest's rewards, and the parts left out.

    A group is left out as a whole, because its advantages are relative to all of it. Every rank
    reads the same rows of sealed shards and decides alike.
    """
    sound: list[TrajectoryRow] = []
    left_out = []
    for ticket, stored in zip(manifest.tickets, tickets, strict=True):
        rewarded = zip(stored, ticket.rewards, strict=False)
        rows = [replace(row, reward=reward) for row, reward in rewarded]
        if len(ticket.rewards) != len(stored):
            defect = f"expected {len(stored)} rewards in the manifest, got {len(ticket.rewards)}"
        else:
            defect = _describe_first_defect(rows, ticket, vocab_size)
        if defect:
            left_out.append(UntrainedBatchPart(manifest.step, defect, [ticket.ref.ticket_id]))
        else:
            sound += rows
    return sound, left_out


def _describe_first_defect(rows: list[TrajectoryRow], ticket: SealedTicket, vocab_size: int) -> str:
    for number, row in zip(ticket.rows, rows, strict=True):
        # A shard may hold a row without tokens; a forward pass cannot.
        defect = None if row.num_tokens else "expected at least one token, got none"
        if defect := defect or find_row_defect(row, vocab_size):
            return f"{ticket.shard} row {number}: {defect}"
    return ""


def build_rows_to_score(
    batch: Sequence[TrajectoryRow], objective: ObjectiveConfig
) -> list[TrainingRow]:
    """Build rows for the networks that score them, without the channels that depend on scores."""
    masks, temperatures = _build_masks(batch, objective), _build_temperatures(batch)
    return [
        TrainingRow(row.input_ids_T, mask_T, channels, forbid_end_tokens(row), row.routes_TLK)
        for row, mask_T, channels in zip(batch, masks, temperatures, strict=True)
    ]


def build_rows(
    batch: Sequence[TrajectoryRow],
    current_version: WeightVersion,
    generation_forks: Sequence[GenerationFork],
    objective: ObjectiveConfig,
    scores: BatchScores = NO_SCORES,
) -> list[TrainingRow]:
    """Build the rows with the channels that the objective needs."""
    teacher_minus_policy_logprobs = scores.teacher_minus_policy_logprobs
    temperatures = _build_temperatures(batch)
    current = [
        version.packed
        for version in list_versions_of_current_weights(current_version, generation_forks)
    ]
    masks = _build_masks(batch, objective)
    scales = compute_loss_aggregation_row_factors(
        [int(np.count_nonzero(mask_T[1:])) for mask_T in masks],
        [(row.ticket_id, row.episode) for row in batch],
        objective,
    )
    if objective.has_critic:
        advantages, returns = _compute_critic_advantages(batch, masks, objective, scores)
    else:
        advantages, returns = _compute_baseline_advantages(batch, objective, scores), None
    observed = _weigh_observed_tokens(batch, masks, objective)
    rows = []
    for index, trajectory in enumerate(batch):
        size = trajectory.num_tokens
        advantages_T = advantages[index]
        # The policy gradient of KL(pi || teacher), token by token.
        if teacher_minus_policy_logprobs is not None:
            advantages_T += objective.teacher.coef * teacher_minus_policy_logprobs[index]
        channels: dict[str, npt.NDArray[np.float32]] = {
            Channel.ADVANTAGE: advantages_T,
            Channel.BEHAVIOR: trajectory.logprobs_T,
            Channel.CURRENT_WEIGHTS: np.isin(trajectory.versions_T, current).astype(np.float32),
        }
        if scales is not None:
            channels[Channel.SCALE] = np.full(size, scales[index], dtype=np.float32)
        if returns is not None and scores.values is not None:
            channels |= {Channel.VALUE: scores.values[index], Channel.RETURN: returns[index]}
        if scores.reference is not None:
            channels[Channel.REFERENCE] = scores.reference[index]
        if scores.start_policy_logprobs is not None and objective.proximal == "recompute":
            channels[Channel.PROXIMAL] = scores.start_policy_logprobs[index]
        if objective.proximal == "log_linear":
            channels[Channel.STALENESS] = _compute_token_staleness(
                trajectory.versions_T, current_version, generation_forks
            )
        channels |= temperatures[index]
        mask_T = masks[index]
        if observed is not None:
            channels[Channel.CROSS_ENTROPY] = observed[index]
            is_observed_T = observed[index] != 0
            mask_T = np.where(is_observed_T, np.uint8(1), mask_T)
            advantages_T[is_observed_T] = 0.0
            if Channel.TEMPERATURE in channels:  # nothing was sampled there
                channels[Channel.TEMPERATURE][is_observed_T] = 1.0
        rows.append(
            TrainingRow(
                trajectory.input_ids_T,
                mask_T,
                channels,
                forbid_end_tokens(trajectory),
                trajectory.routes_TLK,
            )
        )
    return rows


def _weigh_observed_tokens(
    batch: Sequence[TrajectoryRow], masks: MaskRows, objective: ObjectiveConfig
) -> FloatRows | None:
    """Return the weight of each token's cross-entropy (ECHO, arXiv:2605.24517); None without any.

    The loss is a mean over the tokens of `masks`, the cross-entropy one over the observed tokens.
    """
    if not objective.observation_coef:
        return None
    observed = [find_observed_tokens(row) for row in batch]
    trained = sum(int(np.count_nonzero(mask_T[1:])) for mask_T in masks)
    count = sum(int(is_observed_T.sum()) for is_observed_T in observed)
    weight = np.float32(objective.observation_coef * trained / max(1, count))
    return [weight * is_observed_T.astype(np.float32) for is_observed_T in observed]


def find_observed_tokens(row: TrajectoryRow) -> npt.NDArray[np.bool_]:
    """Mark the tokens between two replies of a row: what the agent sent after the first of them.

    Results of tools, users' turns and the template around them. Those before a reply that another
    row trains are left to that row.
    """
    is_observed_T = np.zeros(row.num_tokens, np.bool_)
    for earlier, later in itertools.pairwise(row.record.calls):
        if later.trained:
            is_observed_T[earlier.prompt_tokens + earlier.reply_tokens : later.prompt_tokens] = True
    is_observed_T[row.loss_mask_T != 0] = False
    return is_observed_T


def _build_masks(batch: Sequence[TrajectoryRow], objective: ObjectiveConfig) -> MaskRows:
    masks = [
        build_loss_mask_without_cut_replies(row) if objective.overlong.mask else row.loss_mask_T
        for row in batch
    ]
    return [drop_distorted_replies_from_loss_mask(*pair) for pair in zip(batch, masks, strict=True)]


def _build_temperatures(batch: Sequence[TrajectoryRow]) -> list[dict[str, npt.NDArray[np.float32]]]:
    temperatures = [row.temperature or 1.0 for row in batch]
    if all(temperature == 1.0 for temperature in temperatures):
        return [{} for _ in batch]
    return [
        {Channel.TEMPERATURE: np.full(row.num_tokens, temperature, dtype=np.float32)}
        for row, temperature in zip(batch, temperatures, strict=True)
    ]


def _get_kl_taken_off_rewards(objective: ObjectiveConfig, scores: BatchScores) -> FloatRows | None:
    return scores.policy_minus_reference_logprobs if objective.kl.placement == "reward" else None


def _compute_baseline_advantages(
    batch: Sequence[TrajectoryRow], objective: ObjectiveConfig, scores: BatchScores
) -> FloatRows:
    credit = compute_reply_earnings(batch, objective, _get_kl_taken_off_rewards(objective, scores))
    advantages_K = compute_advantages(credit, objective)
    advantages = [np.zeros(row.num_tokens, dtype=np.float32) for row in batch]
    for advantages_T, spans in zip(advantages, credit.spans, strict=True):
        for begin, end, number in spans:
            advantages_T[begin:end] = advantages_K[number]
    return advantages


def _compute_critic_advantages(
    batch: Sequence[TrajectoryRow],
    masks: MaskRows,
    objective: ObjectiveConfig,
    scores: BatchScores,
) -> tuple[FloatRows, FloatRows]:
    advantages, returns = (
        [np.zeros(row.num_tokens, dtype=np.float32) for row in batch] for _ in range(2)
    )
    if scores.values is None:
        return advantages, returns
    divergences = _get_kl_taken_off_rewards(objective, scores)
    replies = list_reply_rewards(batch, masks, objective, divergences)
    values = [
        scores.values[item.row][item.token_positions_t].astype(np.float64) for item in replies
    ]
    estimates = estimate_advantages(replies, values, objective)
    scaled = scale_token_advantages(replies, estimates, objective)
    for reply, estimate, scaled_t in zip(replies, estimates, scaled, strict=True):
        advantages[reply.row][reply.token_positions_t] = scaled_t
        returns[reply.row][reply.token_positions_t] = estimate.returns_t
    return advantages, returns


def measure_largest_abs_advantage(rows: Sequence[TrainingRow]) -> float:
    advantages = [np.abs(row.channels[Channel.ADVANTAGE][row.loss_mask_T != 0]) for row in rows]
    return float(max((values_N.max(initial=0.0) for values_N in advantages), default=0.0))


def measure_share_of_idle_groups(
    batch: Sequence[TrajectoryRow], rows: Sequence[TrainingRow]
) -> float:
    has_gain = (np.any(row.channels[Channel.ADVANTAGE][row.loss_mask_T != 0]) for row in rows)
    taught = {row.ticket_id for row, is_taught in zip(batch, has_gain, strict=True) if is_taught}
    return 1.0 - len(taught) / max(1, len({row.ticket_id for row in batch}))


def build_loss_mask_without_cut_replies(row: TrajectoryRow) -> npt.NDArray[np.uint8]:
    """Copy the row's loss mask without replies that were cut at their token limit."""
    mask_T = row.loss_mask_T.copy()
    for call in row.record.calls:
        if call.finish_reason == CUT_FINISH_REASON:
            mask_T[get_reply_span(call)] = 0
    return mask_T


def list_versions_of_current_weights(
    current_version: WeightVersion, generation_forks: Sequence[GenerationFork]
) -> list[WeightVersion]:
    """List the versions with the current weights: a restart renames those of a checkpoint."""
    names = {WeightVersion(fork.generation, current_version.step) for fork in generation_forks} | {
        current_version
    }
    return [
        name
        for name in sorted(names)
        if name.generation <= current_version.generation
        and compute_staleness_steps(current_version, name, generation_forks) == 0
    ]


def _compute_token_staleness(
    versions_T: npt.NDArray[np.int64],
    current_version: WeightVersion,
    generation_forks: Sequence[GenerationFork],
) -> npt.NDArray[np.float32]:
    ages_T = np.zeros(len(versions_T), dtype=np.float32)
    for packed in count_sampled_tokens_by_version(versions_T):
        ages_T[versions_T == packed] = compute_staleness_steps(
            current_version, WeightVersion.unpack(packed), generation_forks
        )
    return ages_T
