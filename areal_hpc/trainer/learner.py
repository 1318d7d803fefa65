"""What every trainer rank holds and does together: train on a batch, commit, export."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from areal_hpc.faults import fault_point
from areal_hpc.layout import RunLayout, step_name
from areal_hpc.telemetry import EventLog, PhaseTimer
from areal_hpc.trainer.batch.experience import (
    ADVANTAGE,
    AGE,
    BEHAVIOUR,
    CURRENT,
    describe,
    leave_out_unsound,
    make_rows,
    read_batch,
)
from areal_hpc.trainer.batch.packing import Row
from areal_hpc.trainer.commits.store import CommitStore, TrainerState, load_commit
from areal_hpc.trainer.config import TrainerConfig
from areal_hpc.trainer.metrics import Line, finite
from areal_hpc.trainer.model.architecture import read_architecture
from areal_hpc.trainer.model.huggingface import ModelDirectory, load_hf, save_hf
from areal_hpc.trainer.model.policy import DTYPES, Policy, build_policy
from areal_hpc.trainer.objective import SUMS as LOSS_SUMS
from areal_hpc.trainer.objective import interpolate, policy_loss
from areal_hpc.trainer.optimizer import apply_settings, build_optimizer
from areal_hpc.trainer.schedule import learning_rate
from areal_hpc.trainer.step import (
    MicroBatch,
    Tally,
    make_micro_batches,
    run_passes,
    train_once,
)
from areal_hpc.trainer.untrained import Untrained, describe_norms, judge_norms
from areal_hpc.weights.version import Fork, WeightVersion
from areal_hpc.wire.ledger import BatchManifest

logger = logging.getLogger(__name__)

PROXIMAL = "proximal"
SUMS = (*LOSS_SUMS, "tokens", "places", "metered")
MAXIMA = ("weight", "mismatch")


class Learner:
    """The policy in training, at a committed point of the run or some steps after it.

    Args:
        policy: With its starting weights loaded.
        config: Objective, optimizer and sizes.
        layout: Where shards are read and commits are written.
        model_path: Tokenizer and configuration of exports come from here.
        epoch: This start of the trainer.
        seed: Recorded in commits.
        fence: Called on rank 0 before a commit becomes visible.
    """

    def __init__(
        self,
        policy: Policy,
        config: TrainerConfig,
        layout: RunLayout,
        model_path: Path,
        *,
        epoch: int,
        seed: int,
        fence: Callable[[], None] = lambda: None,
    ) -> None:
        self.policy = policy
        self._config = config
        self._layout = layout
        self._model_path = model_path
        self._events = EventLog(layout.events, "trainer")
        self._commits = CommitStore(layout.checkpoints_dir, config.keep_commits, fence)
        self._optimizer = build_optimizer(policy, config.optimizer)
        self.state = TrainerState(step=0, epoch=epoch, seed=seed, forks=[Fork(epoch, 0)])
        self.reopened_line: Line = {}
        """What the commit knows of the metrics of its step."""
        if (commit := self._commits.agree_on_latest()) is not None:
            load_commit(policy, self._optimizer, commit)
            apply_settings(self._optimizer, config.optimizer)
            held = commit.state
            self.reopened_line = held.line
            self.state = msgspec.structs.replace(
                held,
                epoch=epoch,
                seed=seed,
                parent=commit.path.name,
                forks=[*held.forks, Fork(epoch, held.step)],
                line={},
            )
            logger.info("epoch %d resumes after step %d", epoch, held.step)

    @property
    def version(self) -> WeightVersion:
        """The weights held now."""
        return WeightVersion(self.state.epoch, self.state.step)

    def clean(self) -> None:
        """Delete what interrupted commits left behind. For rank 0."""
        self._commits.clean(self.state.epoch)

    def train(self, manifest: BatchManifest) -> Line:
        """Consume one batch; its metrics, the same on every rank. A collective.

        Raises:
            GradientError: A gradient is not finite and the recipe does not pass over it.
            ShardError: This rank could not read a shard.
            OtherRankFailed: Another one could not.
        """
        fault_point("train.before_step")
        timer, config = PhaseTimer(), self._config
        with timer.phase("read"):
            whole = read_batch(manifest, self._layout.shards_dir)
            batch, untrained = leave_out_unsound(whole, manifest, self.policy.arch.vocab)
        with timer.phase("pack"):
            rows = make_rows(batch, self.version, self.state.forks, config.objective)
            parts = [
                make_micro_batches(
                    self.policy, part, list(rows[0].channels), config.max_tokens_per_microbatch
                )
                for part in _deal(rows, config.minibatches)
            ]
        with timer.phase("train"):
            rate = learning_rate(self.state.step, config.total_steps, config.optimizer)
            tally, norms = self._optimise(parts, rate)
        untrained += self._judge(norms, manifest.step)
        metrics = describe(batch, self.version, self.state.forks)
        self._advance(manifest, untrained)
        sums, maxima = tally.sums, tally.maxima
        tokens = max(1.0, sums["tokens"])
        line: Line = {
            "version": str(self.version),
            **metrics,
            "tokens_per_s": metrics["tokens/trained"] / timer.seconds["train"],
            "loss": sums["loss"] / tokens,
            **describe_norms(norms),
            "lr": rate,
            "ratio/clip_fraction": sums["clipped"] / tokens,
            "behaviour/weight_mean": sums["weight"] / tokens,
            "behaviour/weight_max": maxima["weight"],
            "behaviour/outside_fraction": sums["outside"] / tokens,
            "behaviour/effective_fraction": effective_fraction(sums),
            "behaviour/kl": sums["kl"] / tokens,
            "logprob/engine_trainer_max_abs_diff": maxima["mismatch"],
            "logprob/metered_tokens": int(sums["metered"]),
            "padding_waste": 1.0 - metrics["tokens/trained"] / max(1.0, sums["places"]),
            **timer.metrics(),
        }
        fault_point("train.after_step")
        return finite(line)

    def _judge(self, norms: Sequence[float], step: int) -> list[Untrained]:
        """What the gradients of the batch of `step` leave untrained."""
        return judge_norms(
            norms,
            step,
            self.state.untrained,
            self._config.optimizer.on_nonfinite,
            section="trainer.optimizer",
            name=lambda step: f"step {step}, trained on {self._layout.manifest(step).name}",
            way_out="areal-hpc replay tries settings on these batches, without servers: resume "
            "with some that keep the norm finite, as trainer.objective.proximal=recompute may",
        )

    def _optimise(
        self, parts: Sequence[Sequence[MicroBatch]], rate: float
    ) -> tuple[Tally, list[float]]:
        """One optimizer step per part: the tally over all ranks and the gradient norms.

        With a single part the weights at the start of the batch are those of its only forward
        pass, which then gives the proximal log-probabilities and the engine's deviation as well.
        """
        tally = Tally()
        if len(parts) > 1 and self._config.objective.proximal == "recompute":
            everything = [batch for part in parts for batch in part]
            tally.add(run_passes(self.policy, everything, self._remember, backward=False))
        norms = []
        for number, part in enumerate(parts):
            loss = partial(self._loss, taken=number / len(parts))
            seen, norm = train_once(self.policy, self._optimizer, part, loss, rate)
            tally.add(seen)
            norms.append(norm)
        return tally.over_all_ranks(SUMS, MAXIMA), norms

    def _remember(self, batch: MicroBatch, logprobs_N: torch.Tensor) -> tuple[torch.Tensor, Tally]:
        """Keep the log-probabilities of the weights that the batch starts from."""
        batch.channels_N[PROXIMAL] = logprobs_N
        return logprobs_N.sum(), meter(batch, logprobs_N)

    def _loss(
        self, batch: MicroBatch, logprobs_N: torch.Tensor, taken: float
    ) -> tuple[torch.Tensor, Tally]:
        """The loss of a micro-batch after the share `taken` of the step's updates."""
        held_N = logprobs_N.detach()
        loss = policy_loss(
            logprobs_N,
            self._proximal(batch, held_N, taken),
            batch.channels_N[BEHAVIOUR],
            batch.channels_N[ADVANTAGE],
            batch.rows,
            self._config.objective,
        )
        sums, weight_max = loss.measured()
        tally = Tally(
            {**sums, "tokens": len(logprobs_N), "places": batch.places}, {"weight": weight_max}
        )
        if taken == 0 and PROXIMAL not in batch.channels_N:
            tally.add(meter(batch, held_N))
        return loss.total, tally

    def _proximal(self, batch: MicroBatch, held_N: torch.Tensor, taken: float) -> torch.Tensor:
        """Log-probabilities under the policy that ratios are taken to [N]."""
        match self._config.objective.proximal:
            case "none":
                return batch.channels_N[BEHAVIOUR]
            case "log_linear":
                behaviour_N, age_N = batch.channels_N[BEHAVIOUR], batch.channels_N[AGE]
                return interpolate(held_N, behaviour_N, age_N, taken)
            case "recompute":
                return batch.channels_N.get(PROXIMAL, held_N)

    def _advance(self, manifest: BatchManifest, untrained: Sequence[Untrained]) -> None:
        self.state = msgspec.structs.replace(
            self.state,
            step=self.state.step + 1,
            consumed=[*self.state.consumed, manifest.step],
            untrained=[*self.state.untrained, *untrained],
        )
        if dist.get_rank() == 0:
            for one in untrained:
                of = f"tickets {one.tickets} of " if one.tickets else ""
                logger.warning("untrained: %sbatch %d: %s", of, one.step, one.reason)
                self._events.record("untrained", **msgspec.structs.asdict(one))

    def begin_commit(self, line: Line) -> None:
        """Begin to make the work so far durable, with the step's unfinished metrics. A collective.

        Returns once the state is copied: training may go on.
        """
        state = msgspec.structs.replace(self.state, line=line)
        path = self._commits.begin(self.policy, self._optimizer, state)
        self.state = msgspec.structs.replace(self.state, parent=path.name)

    def poll_commit(self) -> bool:
        """True when the commit in the writing became durable in this call. A collective."""
        return self._commits.poll()

    def finish_commit(self) -> bool:
        """Wait for the commit in the writing; false when there is none. A collective."""
        return self._commits.finish()

    def close(self) -> None:
        """End what runs beside the training."""
        self._commits.close()

    def export(self) -> None:
        """Write the weights as a Hugging Face model. A collective."""
        target = self._layout.export(step_name(self.state.step))
        save_hf(self.policy, self._model_path, target)


def make_learner(
    config: TrainerConfig,
    layout: RunLayout,
    model_path: Path,
    device: torch.device,
    *,
    epoch: int,
    seed: int,
    fence: Callable[[], None] = lambda: None,
) -> Learner:
    """A learner of the model at `model_path`, or of the latest commit that its run has made."""
    arch = read_architecture(model_path)
    policy = build_policy(arch, config.parallel, DTYPES[config.dtype], device)
    load_hf(policy, ModelDirectory(model_path).read)
    return Learner(policy, config, layout, model_path, epoch=epoch, seed=seed, fence=fence)


def effective_fraction(sums: Mapping[str, float]) -> float:
    """Tokens of equal weight that would say as much, as a share of all: Kish's sample size."""
    squares = sums["applied_squared"] * sums["tokens"]
    return sums["applied"] ** 2 / squares if squares else 0.0


def meter(batch: MicroBatch, logprobs_N: torch.Tensor) -> Tally:
    """How far the engine's log-probabilities are off, where it sampled from the same weights."""
    current_N = batch.channels_N[CURRENT] != 0
    gaps = (logprobs_N - batch.channels_N[BEHAVIOUR]).abs()[current_N]
    largest = gaps.max().item() if gaps.numel() else 0.0
    return Tally({"metered": gaps.numel()}, {"mismatch": largest})


def _deal(rows: Sequence[Row], hands: int) -> list[list[Row]]:
    """Rows dealt out in turn, so that each part sees every group; no part is empty."""
    return [list(rows[hand::hands]) for hand in range(min(hands, len(rows)))]
