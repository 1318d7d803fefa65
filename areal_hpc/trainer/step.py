"""Optimizer step: forward and backward over micro-batches, gradient reduction, update; scoring."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch.distributed.fsdp import FSDPModule

from areal_hpc.recipe.sections.objective import ObjectiveConfig
from areal_hpc.recipe.sections.trainer import TrainerConfig
from areal_hpc.trainer.batch.packing import (
    Channel,
    Pack,
    TrainingRow,
    build_pack,
    plan_packs,
    split_minibatches,
)
from areal_hpc.trainer.collectives import note_detail, note_place_reached
from areal_hpc.trainer.memory import (
    OPTIMIZER_STEP_DESCRIPTION,
    ActivationOffload,
    note_work_on_memory_error,
)
from areal_hpc.trainer.model.attention import AttentionPlan, plan_attention
from areal_hpc.trainer.model.logprobs import (
    SampleableTokens,
    consume_logits_into_token_logprobs,
    consume_logits_measuring_entropy,
)
from areal_hpc.trainer.model.policy import Network, TrainedNetwork
from areal_hpc.trainer.objective.custom_loss import CustomLoss
from areal_hpc.trainer.objective.loss_stats import (
    STEP_HISTOGRAM_BINS,
    STEP_MAXIMUM_NAMES,
    STEP_SUM_NAMES,
    LossStats,
    ReducedStats,
    measure_engine_mismatch,
)
from areal_hpc.trainer.objective.policy_loss import (
    PolicyLoss,
    compute_policy_loss,
    interpolate_logprobs,
)
from areal_hpc.trainer.objective.token_rows import TokenRowMap
from areal_hpc.trainer.optimizer import Optimizer, step_optimizer
from areal_hpc.trainer.private_apis.megatron_private import ScoredTokenCritic
from areal_hpc.wire.fault_points import fault_point
from areal_hpc.wire.trajectory import SamplingMask


@dataclass(slots=True, eq=False)
class MicroBatch:
    """One forward pass of this rank, on its device. N: tokens that it scores."""

    input_ids_1T: torch.Tensor
    labels_N: torch.Tensor
    channels_N: dict[str, torch.Tensor]
    rows: TokenRowMap
    attention: AttentionPlan
    padded_token_count: int
    """Tokens of the pass, padding included."""
    sampleable_tokens: SampleableTokens | None
    """Tokens that could be sampled in place of each scored token; None if all could."""
    row_lengths: Sequence[int]
    """Tokens of each row over all context-parallel ranks, padding included."""
    flat_token_indices_N: npt.NDArray[np.int64]
    """Number of each scored token among all tokens of the rows that were packed."""
    routes_TLK: torch.Tensor | None = None
    """Experts that the tokens visit; None if the routers choose."""
    policy_indices_K: npt.NDArray[np.int64] | None = None
    """Indices of the scored tokens that have advantages; None if all have."""
    objective: int = 0
    """Index of the objective of its rows."""

    def select_tokens(self, indices_K: npt.NDArray[np.int64]) -> MicroBatch:
        """Return the batch with some of the scored tokens, as the loss sees it."""
        kept_K = torch.from_numpy(indices_K).to(self.labels_N.device, non_blocking=True)
        return replace(
            self,
            labels_N=self.labels_N[kept_K],
            channels_N={name: values_N[kept_K] for name, values_N in self.channels_N.items()},
            rows=replace(self.rows, row_N=self.rows.row_N[kept_K]),
            sampleable_tokens=None,
            flat_token_indices_N=self.flat_token_indices_N[indices_K],
            policy_indices_K=None,
        )

    def __str__(self) -> str:
        rows = f"{len(self.row_lengths)} rows" if len(self.row_lengths) != 1 else "1 row"
        longest = max(self.row_lengths, default=0)
        return f"{rows}, {sum(self.row_lengths)} tokens, the longest row {longest}"


LossFunction = Callable[[MicroBatch, torch.Tensor], tuple[torch.Tensor, LossStats]]
"""Function of a micro-batch and log-probabilities (or values) [N]: summed loss, statistics."""


def make_micro_batches_of_this_rank(
    network: Network, rows: Sequence[TrainingRow], channels: Sequence[str], max_tokens: int
) -> list[MicroBatch]:
    """Pack this rank's share of the rows. All ranks must pass the same rows.

    `channels` are those of the passes; a row whose objective does not need one lacks it.
    """
    first_of = np.cumsum([0, *(len(row.input_ids_T) for row in rows)])
    batches = []
    for objective in sorted({row.objective for row in rows}) or [0]:
        members = [i for i, row in enumerate(rows) if row.objective == objective]
        plan = plan_packs(
            [len(rows[i].input_ids_T) for i in members],
            ranks=parallel_state.get_data_parallel_world_size(),
            max_tokens=max_tokens,
            parallelism=network.split,
        )
        own_channels = [name for name in channels if all(name in rows[i].channels for i in members)]
        for part in plan[parallel_state.get_data_parallel_rank()]:
            chosen = [members[place] for place in part]
            pack = build_pack([rows[i] for i in chosen], own_channels, network.split)
            batches.append(_build_micro_batch(network, pack, first_of[chosen], objective))
    return batches


def _build_micro_batch(
    network: Network, pack: Pack, first_of: npt.NDArray[np.int64], objective: int
) -> MicroBatch:
    def move(array: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(network.device, non_blocking=True)

    return MicroBatch(
        input_ids_1T=move(pack.input_ids_T)[None],
        labels_N=move(pack.labels_N),
        channels_N={name: move(values) for name, values in pack.channels_N.items()},
        rows=TokenRowMap(
            move(pack.rows_N), len(pack.padded_lengths), parallel_state.get_context_parallel_group()
        ),
        attention=plan_attention(
            pack, network.split, network.rope_frequencies, network.arch.rope_attention_factor
        ),
        padded_token_count=len(pack.input_ids_T),
        sampleable_tokens=None
        if pack.sampling_mask_N is None
        else _move_sampling_mask_to_device(pack.sampling_mask_N, network.device),
        row_lengths=pack.padded_lengths.tolist(),
        flat_token_indices_N=first_of[pack.rows_N] + pack.label_positions_N,
        routes_TLK=None
        if pack.routes_TLK is None or network.router_replay is None
        else move(pack.routes_TLK),
        policy_indices_K=None
        if Channel.CROSS_ENTROPY not in pack.channels_N
        else np.flatnonzero(pack.channels_N[Channel.CROSS_ENTROPY] == 0),
        objective=objective,
    )


def _move_sampling_mask_to_device(mask: SamplingMask, device: torch.device) -> SampleableTokens:
    rows_K = np.repeat(np.arange(len(mask.counts_T)), mask.counts_T)
    starts = np.cumsum([0, *mask.counts_T.tolist()]).tolist()
    forbids_N = np.zeros(len(mask.counts_T), np.bool_) if mask.forbids_T is None else mask.forbids_T

    def move(array: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    return SampleableTokens(move(mask.ids.astype(np.int64)), move(rows_K), starts, move(forbids_N))


def run_forward_backward(
    network: Network, batches: Sequence[MicroBatch], loss: LossFunction, *, backward: bool
) -> LossStats:
    """Run forward (and backward) over all micro-batches. A collective over all ranks.

    `loss` receives log-probabilities, or a critic's values. With `backward`, gradients are summed
    over ranks and divided by the number of scored tokens of the whole batch. The statistics are
    complete only on the last pipeline stage.
    """
    is_critic = isinstance(network.gpt, ScoredTokenCritic)

    def score(batch: MicroBatch, output: torch.Tensor) -> tuple[torch.Tensor, LossStats]:
        if is_critic:
            return loss(batch, output[0])
        arguments = _list_scoring_arguments(network, batch, output)
        return loss(batch, consume_logits_into_token_logprobs(*arguments))

    return run_passes(network, batches, score, backward=backward)


def score_tokens(
    network: Network, batch: MicroBatch, logits_1NV: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities of a micro-batch's tokens, and the entropies at sampling [N].

    The logits are consumed.
    """
    arguments = _list_scoring_arguments(network, batch, logits_1NV)
    return consume_logits_measuring_entropy(*arguments)


def _list_scoring_arguments(
    network: Network, batch: MicroBatch, logits_1NV: torch.Tensor
) -> tuple[Any, ...]:
    return (
        logits_1NV.flatten(0, 1),
        batch.labels_N,
        batch.channels_N.get(Channel.TEMPERATURE),
        network.arch.vocab,
        parallel_state.get_tensor_model_parallel_group(),
        batch.sampleable_tokens,
    )


def run_passes(
    network: Network, batches: Sequence[MicroBatch], score: LossFunction, *, backward: bool
) -> LossStats:
    """Run all micro-batches; `score` receives the output of the network's last stage."""
    stats, numbers, work = LossStats(), itertools.count(1), ""
    replay = network.router_replay
    if replay is not None:
        replay.begin_passes()

    def mark_forward_done() -> None:
        nonlocal work
        work = f"a backward pass, after {work}"

    def measure(
        batch: MicroBatch, output: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        total, measured = score(batch, output)
        stats.add(measured)
        mark_forward_done()
        tokens = torch.full((), len(batch.labels_N), dtype=torch.int, device=total.device)
        return total, tokens, {}

    def forward(data: Any, model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        nonlocal work
        fault_point("train.before_forward")
        batch, number = next(data), next(numbers)
        note_detail(f"forward of micro-batch {number}")
        work = f"the forward pass of micro-batch {number} of {len(batches)} ({batch})"
        with replay.follow(batch.routes_TLK) if replay is not None else nullcontext():
            output = model(batch.input_ids_1T, None, None, packed_seq_params=batch.attention)
        if not parallel_state.is_pipeline_last_stage():  # the last stage still has logits to score
            mark_forward_done()
        return output, partial(measure, batch)

    note_place_reached("forward and backward passes" if backward else "forward passes")
    if network.arch.lora is not None:
        network.module.train(backward)  # an adapter's dropout
    run = get_forward_backward_func()
    offloads = backward and isinstance(network, TrainedNetwork) and network.offloads_activations
    offload = ActivationOffload(network.module.parameters()) if offloads else nullcontext()
    with note_work_on_memory_error(lambda: work), torch.set_grad_enabled(backward), offload:
        run(
            forward_step_func=forward,
            data_iterator=iter(batches),
            model=[network.module],
            num_microbatches=len(batches),
            # Shapes travel with the tensors (variable_seq_lengths).
            seq_length=1,
            micro_batch_size=1,
            forward_only=not backward,
        )
    if replay is not None:
        stats.add(LossStats(replay.sums))
    if isinstance(network.gpt, FSDPModule):
        network.gpt.reshard()  # passes without gradients leave its parameters gathered
    return stats


def train_step(
    policy: TrainedNetwork,
    optimizer: Optimizer,
    batches: Sequence[MicroBatch],
    loss: LossFunction,
    rate: float,
) -> tuple[LossStats, float]:
    stats = run_forward_backward(policy, batches, loss, backward=True)
    return stats, apply_gradients(optimizer, rate)


def apply_gradients(optimizer: Optimizer, rate: float) -> float:
    """Apply the gradients of the passes; return their norm before clipping. A collective."""
    fault_point("optimizer.before_step")
    note_place_reached("the optimizer's step")
    with note_work_on_memory_error(lambda: OPTIMIZER_STEP_DESCRIPTION):
        norm = step_optimizer(optimizer, rate)
    fault_point("optimizer.after_step")
    return norm


NoteTokens = Callable[[int, MicroBatch, torch.Tensor, torch.Tensor, PolicyLoss], None]
"""Callback that takes the number of a minibatch, one of its micro-batches, and per token the
log-probabilities at the start of the step, the entropies and the loss."""


class PolicyTrainer:
    """Optimizer steps of the policy on a batch."""

    def __init__(
        self,
        config: TrainerConfig,
        policy: TrainedNetwork,
        optimizer: Optimizer,
        custom_loss: CustomLoss | None,
        note_tokens: NoteTokens,
        objectives: Sequence[ObjectiveConfig],
    ) -> None:
        self._objective = config.objective
        self._objectives = objectives
        self._policy = policy
        self._optimizer = optimizer
        self._custom_loss = custom_loss
        self._note_tokens = note_tokens

    def train(
        self,
        minibatches: Sequence[Sequence[MicroBatch]],
        factors: Sequence[float],
        rate: float,
        *,
        only_measures: bool,
    ) -> tuple[ReducedStats, list[float]]:
        """Take one optimizer step per minibatch; return stats over all ranks and gradient norms.

        A minibatch's loss is multiplied by its factor (`compute_minibatch_factors`). With a single
        minibatch its only forward pass runs with the weights at the start of the batch, and so also
        yields the proximal log-probabilities and the mismatch with the engine.
        """
        stats, objective = LossStats(), self._objective
        if (
            len(minibatches) > 1
            and objective.proximal == "recompute"
            and not objective.advantages_need_logprobs
        ):
            all_batches = [batch for part in minibatches for batch in part]
            stats.add(
                run_forward_backward(
                    self._policy, all_batches, self._store_proximal_logprobs, backward=False
                )
            )
        norms = []
        for number, (part, factor) in enumerate(zip(minibatches, factors, strict=True)):
            loss = partial(
                self._compute_loss,
                minibatch_index=number,
                updates_done_share=number / len(minibatches),
                factor=factor,
            )
            stats.add(run_passes(self._policy, part, loss, backward=not only_measures))
            norms.append(0.0 if only_measures else apply_gradients(self._optimizer, rate))
        reduced = stats.reduce_over_ranks(STEP_SUM_NAMES, STEP_MAXIMUM_NAMES, STEP_HISTOGRAM_BINS)
        return reduced, norms

    def _store_proximal_logprobs(
        self, batch: MicroBatch, logprobs_N: torch.Tensor
    ) -> tuple[torch.Tensor, LossStats]:
        batch.channels_N[Channel.PROXIMAL] = logprobs_N
        return logprobs_N.sum(), _build_engine_mismatch_stats(batch, logprobs_N)

    def _compute_loss(
        self,
        batch: MicroBatch,
        logits_1NV: torch.Tensor,
        minibatch_index: int,
        updates_done_share: float,
        factor: float,
    ) -> tuple[torch.Tensor, LossStats]:
        objective = self._objectives[batch.objective]
        logprobs_N, entropy_N = score_tokens(self._policy, batch, logits_1NV)
        observation_loss = logprobs_N.new_zeros(())
        if batch.policy_indices_K is not None:
            observation_loss = -(batch.channels_N[Channel.CROSS_ENTROPY] * logprobs_N).sum()
            kept_K = torch.from_numpy(batch.policy_indices_K).to(logprobs_N.device)
            logprobs_N, entropy_N = logprobs_N[kept_K], entropy_N[kept_K]
            batch = batch.select_tokens(batch.policy_indices_K)
        channels_N = batch.channels_N
        detached_N = logprobs_N.detach()
        loss = compute_policy_loss(
            logprobs_N,
            self._select_proximal_logprobs(batch, detached_N, updates_done_share),
            channels_N[Channel.BEHAVIOR],
            channels_N[Channel.ADVANTAGE],
            batch.rows,
            objective,
            channels_N.get(Channel.SCALE),
            self._custom_loss,
            channels_N.get(Channel.REFERENCE),
        )
        start_N = channels_N.get(Channel.PROXIMAL)
        self._note_tokens(
            minibatch_index, batch, detached_N if start_N is None else start_N, entropy_N, loss
        )
        total = (loss.total + observation_loss) * factor
        stats = LossStats(
            {
                **loss.sums,
                "loss": loss.sums["loss"] + observation_loss.detach().double(),
                "observation_loss": observation_loss.detach().double(),
                "tokens": len(logprobs_N),
                "padded_tokens": batch.padded_token_count,
                "entropy": entropy_N.detach().sum(dtype=torch.float64),
            },
            {"weight": loss.largest_weight},
        )
        if start_N is None and updates_done_share == 0:
            stats.add(_build_engine_mismatch_stats(batch, detached_N))
        elif start_N is not None and self._objective.advantages_need_logprobs:  # else added before
            stats.add(_build_engine_mismatch_stats(batch, start_N))
        if objective.entropy_coef:
            scale_N = channels_N.get(Channel.SCALE)
            scaled_N = entropy_N if scale_N is None else entropy_N * scale_N
            entropy_loss = -objective.entropy_coef * scaled_N.sum()
            total = total + entropy_loss * factor
            stats.add(LossStats({"loss": entropy_loss.detach().double()}))
        return total, stats

    def _select_proximal_logprobs(
        self, batch: MicroBatch, current_logprobs_N: torch.Tensor, updates_done_share: float
    ) -> torch.Tensor:
        """Return log-probabilities under the policy in the ratios' denominator [N]."""
        match self._objective.proximal:
            case "none":
                return batch.channels_N[Channel.BEHAVIOR]
            case "log_linear":
                behavior_N, age_N = (
                    batch.channels_N[Channel.BEHAVIOR],
                    batch.channels_N[Channel.STALENESS],
                )
                return interpolate_logprobs(
                    current_logprobs_N, behavior_N, age_N, updates_done_share
                )
            case "recompute":
                return batch.channels_N.get(Channel.PROXIMAL, current_logprobs_N)


def _build_engine_mismatch_stats(batch: MicroBatch, logprobs_N: torch.Tensor) -> LossStats:
    return measure_engine_mismatch(
        logprobs_N,
        batch.channels_N[Channel.BEHAVIOR],
        batch.channels_N[Channel.CURRENT_WEIGHTS] != 0,
    )


ScoresByRow = list[npt.NDArray[np.float32]]
"""For each row one number per token; 0 for tokens that the loss ignores."""


def score_rows(
    network: Network, rows: Sequence[TrainingRow], *, minibatch_count: int, max_tokens: int
) -> ScoresByRow:
    """Return log-probabilities of all trained tokens, or a critic's values of the states before.

    A collective; the result is on every rank. Passes are packed as in training, so that training
    computes the same bits.
    """
    scores: ScoresByRow = [np.empty(0, np.float32)] * len(rows)
    for first, part in enumerate(split_minibatches(rows, minibatch_count)):
        scores[first::minibatch_count] = _score_minibatch(network, part, max_tokens)
    return scores


def _score_minibatch(network: Network, rows: Sequence[TrainingRow], max_tokens: int) -> ScoresByRow:
    scored: list[tuple[npt.NDArray[np.int64], torch.Tensor]] = []

    def note(batch: MicroBatch, scores_N: torch.Tensor) -> tuple[torch.Tensor, LossStats]:
        scored.append((batch.flat_token_indices_N, scores_N))
        return scores_N.sum(), LossStats()

    batches = make_micro_batches_of_this_rank(network, rows, [Channel.TEMPERATURE], max_tokens)
    run_forward_backward(network, batches, note, backward=False)
    lengths = [len(row.input_ids_T) for row in rows]
    flat = torch.zeros(sum(lengths))
    # Tensor-parallel ranks have equal scores: only the first adds its own.
    if scored and parallel_state.get_tensor_model_parallel_rank() == 0:
        positions = torch.from_numpy(np.concatenate([tokens_N for tokens_N, _ in scored]))
        flat[positions] = torch.cat([scores_N for _, scores_N in scored]).cpu()
    if dist.get_world_size() > 1:
        dist.all_reduce(flat)
    return np.split(flat.numpy(), np.cumsum(lengths)[:-1])
