"""Learner of one rank: the policy, its updates, its checkpoints and exports."""

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from areal_hpc.errors import ClusterError, Problem, ShardError
from areal_hpc.metrics.step_metrics import PhaseTimer, find_best_step
from areal_hpc.metrics.writer import replace_non_finite_by_none
from areal_hpc.recipe.sections.objective import ObjectiveConfig
from areal_hpc.recipe.sections.trainer import TrainerConfig, compute_learning_rate
from areal_hpc.rundir.checkpoints import RewardRange, TrainerState, UntrainedBatchPart, digest_base
from areal_hpc.rundir.jsonl import JsonMetricRow
from areal_hpc.rundir.manifests import record_quarantine
from areal_hpc.rundir.paths import RunPaths, format_step_dir
from areal_hpc.rundir.run_inputs import NO_SOURCES, TrainSources
from areal_hpc.rundir.telemetry.events import EventLog
from areal_hpc.shards.verify import CheckedShards
from areal_hpc.trainer.annotations import StepAnnotator
from areal_hpc.trainer.batch.batch_metrics import (
    extend_reward_range,
    group_episode_rewards,
    summarize_batch,
    summarize_rewards,
    summarize_tokens,
)
from areal_hpc.trainer.batch.packing import (
    CRITIC_CHANNELS,
    Channel,
    TrainingRow,
    count_policy_tokens,
    count_scored_tokens,
    split_minibatches,
)
from areal_hpc.trainer.batch.sources import SourceObjectives, summarize_sources
from areal_hpc.trainer.batch.training_rows import (
    NO_SCORES,
    BatchScores,
    measure_largest_abs_advantage,
    measure_share_of_idle_groups,
    read_sound_rows_on_all_ranks,
)
from areal_hpc.trainer.batch.untrained import (
    build_norm_metrics,
    check_trainable_share,
    count_untrainable_tokens,
    record_damaged_batch,
    record_skipped_steps,
)
from areal_hpc.trainer.checkpoints.store import CheckpointStore
from areal_hpc.trainer.collectives import (
    all_reduce_max,
    broadcast_object,
    note_place_reached,
    raise_on_all_ranks,
)
from areal_hpc.trainer.memory import raise_out_of_memory_as_recipe_error, read_peak_memory_bytes
from areal_hpc.trainer.model.families.architecture import read_architecture
from areal_hpc.trainer.model.families.lora import initialize_adapter, seed_dropout
from areal_hpc.trainer.model.hf_weights import HfModelReader, load_hf, save_hf_model
from areal_hpc.trainer.model.policy import TORCH_DTYPE_BY_NAME, build_policy
from areal_hpc.trainer.model.utilization import measure_training_speed
from areal_hpc.trainer.objective.custom_loss import load_custom_loss
from areal_hpc.trainer.objective.loss_stats import build_loss_metrics
from areal_hpc.trainer.objective.policy_loss import compute_minibatch_factors
from areal_hpc.trainer.profiling import trace_step
from areal_hpc.trainer.side_networks import CriticTrainer, FrozenModels
from areal_hpc.trainer.step import PolicyTrainer, make_micro_batches_of_this_rank, score_rows
from areal_hpc.weights.update import Probe, choose_probe_ids
from areal_hpc.wire.fault_points import fault_point
from areal_hpc.wire.ledger import BatchManifest
from areal_hpc.wire.trajectory import TrajectoryRow
from areal_hpc.wire.weight_version import GenerationFork, WeightVersion

logger = logging.getLogger(__name__)


class Learner:
    """Policy in training: its weights at the run's latest checkpoint, or some steps after it.

    `model_path` has the weights before the first checkpoint, and the files that exports copy. The
    best checkpoint by `keep_best`, the metric of `evaluation.keep_best`, is never deleted. A replay
    learns something else from `first_changed_step` on; that step has the engine's weights.
    """

    def __init__(
        self,
        config: TrainerConfig,
        paths: RunPaths,
        model_path: Path,
        device: torch.device,
        *,
        generation: int,
        seed: int,
        check_generation: Callable[[], None] = lambda: None,
        is_stop_requested: Callable[[], bool] = lambda: False,
        keep_best: str = "",
        sources: TrainSources = NO_SOURCES,
        source_objectives: Sequence[ObjectiveConfig] = (),
        first_changed_step: float = math.inf,
    ) -> None:
        custom_loss = load_custom_loss(config.objective)  # may fail: comes before slow work
        arch, base = read_architecture(model_path, config.lora), ""
        dtype = TORCH_DTYPE_BY_NAME[config.dtype]
        self.policy = build_policy(arch, config.parallel, dtype, device, config.activations)
        load_hf(self.policy, HfModelReader(model_path).read_tensor)
        if config.lora is not None:
            initialize_adapter(self.policy.gpt, seed)
            base = broadcast_object(digest_base(model_path) if dist.get_rank() == 0 else None, str)
        self._config = config
        self._sources = sources
        self._objectives = SourceObjectives(sources, source_objectives or [config.objective])
        self._paths = paths
        self._shards = CheckedShards(paths.shards_dir, paths.shard_index_dir)
        self._check_generation, self._first_changed_step = check_generation, first_changed_step
        self._model_path = model_path
        self._events = EventLog(paths.events, "trainer")
        self._annotator = StepAnnotator(config, paths)
        self.checkpoints = CheckpointStore(
            paths.checkpoints_dir,
            config.keep_checkpoints,
            check_generation,
            lambda steps: find_best_step(paths.metrics, keep_best, steps),
        )
        self._critic = (
            CriticTrainer(config, model_path, device) if config.objective.has_critic else None
        )
        self._optimizer, checkpoint = self.checkpoints.restore_latest(
            self.policy,
            config.optimizer,
            is_offloaded=config.offload.optimizer,
            critic=self._critic.state if self._critic else None,
            base=base,
        )
        self._trainer = PolicyTrainer(
            config,
            self.policy,
            self._optimizer,
            custom_loss,
            self._annotator.note_tokens,
            self._objectives.distinct,
        )
        forks = [GenerationFork(generation, 0)]
        self.state = TrainerState(generation=generation, seed=seed, base=base, forks=forks)
        self.reopened_row: JsonMetricRow = {}
        """Metrics of the checkpoint's step, as stored with it."""
        if checkpoint is not None:
            stored = checkpoint.state
            self.reopened_row = stored.row
            self.state = msgspec.structs.replace(
                stored,
                generation=generation,
                seed=seed,
                parent=checkpoint.path.name,
                forks=[*stored.forks, GenerationFork(generation, stored.step)],
                row={},
            )
            logger.info("generation %d resumes after step %d", generation, stored.step)
        self._frozen = FrozenModels(config, model_path, device, is_stop_requested)

    @property
    def version(self) -> WeightVersion:
        return WeightVersion(self.state.generation, self.state.step)

    @property
    def _critic_warms_up(self) -> bool:
        critic = self._critic
        return critic is not None and critic.is_warming_up(self.state.critic_batches)

    def train_batch(
        self, manifest: BatchManifest, quarantine: UntrainedBatchPart | None = None
    ) -> JsonMetricRow:
        """Consume one batch; return its metrics, on rank 0 with those of replies and episodes.

        A batch that is quarantined or unreadable is consumed without being trained. A collective.
        """
        fault_point("train.before_step")
        timer, config = PhaseTimer(records_spans=True), self._config
        note_place_reached(f"reading of batch {manifest.step}")
        with timer.time_phase("read"):
            batch, untrained = self._read_sound_rows(manifest, quarantine)
        with timer.time_phase("measure"):
            groups = group_episode_rewards(batch)
            reward_range = extend_reward_range(self.state.reward_range, groups)
            metrics = {
                **summarize_rewards(groups, reward_range, config.objective),
                **summarize_tokens(batch, self.version, self.state.forks),
            }
            untrainable = count_untrainable_tokens(batch)
            metrics["tokens/untrainable"] = untrainable.total()
            check_trainable_share(manifest.step, int(metrics["tokens/sampled"]), untrainable)
            if dist.get_rank() == 0:  # these take long
                metrics |= summarize_batch(batch, self.policy.arch.mixture)
        scores, warms_up = NO_SCORES, self._critic_warms_up
        if self._frozen.are_needed or self._critic is not None:
            with timer.time_phase("score"), self._raise_out_of_memory_as_recipe_error():
                scores = self._score_batch(manifest.step, batch)
        with timer.time_phase("pack"):
            rows = self._objectives.build_rows(batch, self.version, self.state.forks, scores)
            if manifest.step > self._first_changed_step:  # the engine never had these weights
                for row in rows:
                    row.channels[Channel.CURRENT_WEIGHTS][:] = 0
            minibatches = split_minibatches(rows, config.minibatches)
            factors = compute_minibatch_factors(
                [count_scored_tokens(part) for part in minibatches],
                [count_policy_tokens(part) for part in minibatches],
            )
            channels = [name for name in Channel if name not in CRITIC_CHANNELS]
            parts = [
                make_micro_batches_of_this_rank(
                    self.policy, part, channels, config.max_tokens_per_microbatch
                )
                for part in minibatches
            ]
        self._annotator.begin_step(batch, rows, len(parts), self.state)
        if config.lora is not None:
            seed_dropout(self.state.seed, self.state.step)
        with timer.time_phase("train"):
            rate = compute_learning_rate(self.state.step, config.total_steps, config.optimizer)
            with self._raise_out_of_memory_as_recipe_error():
                stats, norms = self._trainer.train(parts, factors, rate, only_measures=warms_up)
                critic_metrics: dict[str, float] = {}
                critic_norms: list[float] = []
                if self._critic is not None:
                    critic_metrics, critic_norms = self._critic.train(rows, scores, self.state.step)
        with timer.time_phase("measure"):
            self._annotator.finish_step(
                manifest, untrained, norms, self.version.generation, warms_up
            )
        untrained += self._record_skipped_steps(norms, critic_norms, manifest.step)
        self._advance_state(manifest, untrained, reward_range)
        trained_tokens = metrics["tokens/trained"]
        line: JsonMetricRow = {
            "version": str(self.version),
            **metrics,
            "advantage/abs_max": measure_largest_abs_advantage(rows),
            **({"groups/zero_variance": measure_share_of_idle_groups(batch, rows)} if rows else {}),
            **summarize_sources(batch, rows, self._sources),
            **build_loss_metrics(stats.sums, stats.maxima, stats.histograms),
            **self._frozen.build_metrics(stats.sums, scores),
            **critic_metrics,
            **build_norm_metrics(norms, were_due=not warms_up),
            "lr": rate,
            "padding_waste": 1.0 - trained_tokens / max(1.0, stats.sums["padded_tokens"]),
            **measure_training_speed(self.policy, rows, trained_tokens, timer.seconds["train"]),
            "memory/trainer_peak_bytes": all_reduce_max(read_peak_memory_bytes(self.policy.device)),
            **timer.build_metrics(),
        }
        fault_point("train.after_step")
        return replace_non_finite_by_none(line)

    def _raise_out_of_memory_as_recipe_error(self) -> AbstractContextManager[None]:
        critic = self._critic.network.arch if self._critic else None
        return raise_out_of_memory_as_recipe_error(self.policy, self._config, critic)

    def _score_batch(self, step: int, batch: Sequence[TrajectoryRow]) -> BatchScores:
        """Score the rows with the networks that the objective needs. A collective."""
        rows = self._objectives.build_rows_to_score(batch, self._config.objective)
        scores = NO_SCORES
        if self._frozen.are_needed:
            scores = self._frozen.score(self.policy, step, rows)
        if self._critic is None or not rows:
            return scores
        return replace(scores, values=self._critic.score(rows))

    def _read_sound_rows(
        self, manifest: BatchManifest, quarantine: UntrainedBatchPart | None
    ) -> tuple[list[TrajectoryRow], list[UntrainedBatchPart]]:
        """Return the rows to train on, and the parts left out. A collective."""
        if quarantine is not None:
            return [], [quarantine]
        try:
            batch, left_out = read_sound_rows_on_all_ranks(
                manifest, self._shards, self.policy.arch.vocab
            )
        except ShardError as error:  # on all ranks alike
            return [], [self._quarantine_damaged_batch(manifest.step, error.problems[0])]
        if not self._config.router_replay:
            batch = [replace(row, routes_TLK=None) for row in batch]
        return batch, left_out

    def _quarantine_damaged_batch(self, step: int, problem: Problem) -> UntrainedBatchPart:
        """Quarantine a batch before it counts as consumed, so that a restart also skips it.

        A collective.
        """
        reason = broadcast_object(f"{Path(problem.key).name}: {problem.message}", str)
        record = record_damaged_batch(step, self.state.untrained, reason, self._paths.root)
        failure = None
        if dist.get_rank() == 0:
            self._check_generation()  # a successor may have trained it
            try:
                record = record_quarantine(self._paths, record)
            except (OSError, ShardError) as error:
                path = self._paths.quarantine(step)
                failure = ClusterError(
                    f"{reason}; nor can it be quarantined: {error}", key=str(path)
                )
        raise_on_all_ranks(failure)
        agreed: UntrainedBatchPart = broadcast_object(record, UntrainedBatchPart)
        return agreed

    def _record_skipped_steps(
        self, norms: Sequence[float], critic_norms: Sequence[float], step: int
    ) -> list[UntrainedBatchPart]:
        suffix = ""
        hint = (
            "areal-hpc replay tries settings on these batches, without servers: resume "
            "with some that keep the norm finite, as trainer.objective.proximal=recompute may"
        )
        if all(map(math.isfinite, norms)):  # then the critic's gradient is not finite
            suffix = " of the critic"
            hint = "lower trainer.objective.critic.lr, or set trainer.objective.critic.clip_value"
        return record_skipped_steps(
            [*norms, *critic_norms],
            step,
            self.state.untrained,
            key="trainer.optimizer.lr",
            name_step=lambda step: (
                f"step {step}{suffix}, trained on {self._paths.manifest(step).name}"
            ),
            hint=hint,
        )

    def _advance_state(
        self,
        manifest: BatchManifest,
        untrained: Sequence[UntrainedBatchPart],
        reward_range: RewardRange | None,
    ) -> None:
        self.state = msgspec.structs.replace(
            self.state,
            step=self.state.step + 1,
            critic_batches=self.state.critic_batches + 1 if self._critic else 0,
            consumed=[*self.state.consumed, manifest.step],
            untrained=[*self.state.untrained, *untrained],
            reward_range=reward_range,
        )
        if dist.get_rank() == 0:
            for part in untrained:
                scope = f"tickets {part.tickets} of " if part.tickets else ""
                if part.quarantine:
                    scope = f"quarantined ({part.quarantine}) "
                logger.warning("untrained: %sbatch %d: %s", scope, part.step, part.reason)
                self._events.record("untrained", **msgspec.structs.asdict(part))

    def close(self) -> None:
        self._annotator.close()
        self._frozen.close()
        self.checkpoints.close()

    def trace_step(self, step: int) -> AbstractContextManager[None]:
        """Trace the block as the training of a step, if `trainer.profile` names it."""
        return trace_step(self._config.profile, self._paths, step, self.policy.device)

    def score_probe(self) -> Probe:
        """Score the fixed prompt with which replicas prove these weights. A collective."""
        ids = choose_probe_ids(self.policy.arch.vocab)
        row = TrainingRow(np.array(ids, np.int32), np.ones(len(ids), np.uint8), {})
        with self._raise_out_of_memory_as_recipe_error():
            (logprobs_T,) = score_rows(self.policy, [row], minibatch_count=1, max_tokens=len(ids))
        note_place_reached(f"sending of the weights {self.version}")
        if not np.isfinite(logprobs_T).all():
            raise ClusterError(
                f"weights {self.version} give log-probabilities that are no numbers",
                hint="resume from an earlier checkpoint, with a smaller learning rate",
            )
        return Probe(ids, logprobs_T[1:].tolist())

    def begin_checkpoint(self, row: JsonMetricRow) -> None:
        """Start to make the state durable, with the step's unfinished metrics. A collective.

        Return once the state is copied: training may continue.
        """
        state = msgspec.structs.replace(self.state, row=row)
        critic = self._critic.state if self._critic else None
        path = self.checkpoints.begin_save(self.policy, self._optimizer, state, critic)
        self.state = msgspec.structs.replace(self.state, parent=path.name)

    def export_model(self) -> None:
        """Write the weights as a Hugging Face model. A collective."""
        target = self._paths.export_dir(format_step_dir(self.state.step))
        save_hf_model(self.policy, self._model_path, target)
