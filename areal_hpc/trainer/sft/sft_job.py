"""Supervised fine-tuning process, one per rank: `areal_hpc.trainer.sft.sft_job:run`."""

import gc
import logging
import time
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from areal_hpc.jobs.processes.signals import StopRequest
from areal_hpc.metrics.writer import MetricsWriter
from areal_hpc.recipe.sections.trainer import compute_learning_rate
from areal_hpc.rundir.cancellation import is_cancelled_without_checkpoint
from areal_hpc.rundir.checkpoints import TrainerState
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.telemetry.spans import record_state_entry
from areal_hpc.trainer.checkpoints.store import CheckpointStore
from areal_hpc.trainer.collectives import is_true_on_any_rank
from areal_hpc.trainer.config import SftJobConfig
from areal_hpc.trainer.memory import raise_out_of_memory_as_recipe_error
from areal_hpc.trainer.model.families.architecture import read_architecture
from areal_hpc.trainer.model.hf_weights import HfModelReader, load_hf, save_hf_model
from areal_hpc.trainer.model.policy import TORCH_DTYPE_BY_NAME, Policy, build_policy
from areal_hpc.trainer.objective.loss_stats import LossStats
from areal_hpc.trainer.process_groups import run_rank
from areal_hpc.trainer.sft.sft_data import (
    ConversationTokenizer,
    get_batch_indices,
    read_demonstrations,
)
from areal_hpc.trainer.step import MicroBatch, make_micro_batches_of_this_rank, train_step
from areal_hpc.trainer.untrained import (
    build_nonfinite_records_or_raise,
    build_norm_metrics,
    is_optimizer_step_taken,
)

logger = logging.getLogger(__name__)

MAX_KEPT_CHECKPOINTS = 2
SFT_GENERATION = 0
"""SFT samples nothing: its weights need no version, and its starts no generation."""


def run(config: dict[str, Any]) -> None:
    job = SftJobConfig.model_validate(config)
    run_rank(job, StopRequest.install(), _run_sft)


def _run_sft(job: SftJobConfig, paths: RunPaths, device: torch.device, stop: StopRequest) -> bool:
    arch = read_architecture(job.model_path)
    config = job.trainer
    dtype = TORCH_DTYPE_BY_NAME[config.dtype]
    policy = build_policy(arch, config.parallel, dtype, device, config.activations)
    trainer = SftTrainer(job, paths, policy)
    gc.freeze()  # a collection looks at what training makes, not at all that imports left
    record_state_entry("train")
    finished = trainer.train(stop)
    record_state_entry("end")
    if finished:
        save_hf_model(policy, job.model_path, paths.sft_export)
    trainer.checkpoints.close()
    return finished


class SftTrainer:
    """Loop of supervised fine-tuning, resumed from its latest checkpoint when there is one."""

    def __init__(self, job: SftJobConfig, paths: RunPaths, policy: Policy) -> None:
        self._job = job
        self._policy = policy
        self._cancelled_marker = paths.cancelled_marker
        self.checkpoints = CheckpointStore(paths.sft_checkpoints_dir, MAX_KEPT_CHECKPOINTS)
        self._tokenizer = ConversationTokenizer(job.model_path)
        self._demonstrations = read_demonstrations(job.dataset_path)
        load_hf(policy, HfModelReader(job.model_path).read_tensor)
        self.state = TrainerState(step=0, generation=SFT_GENERATION, seed=job.seed)
        self._optimizer, checkpoint = self.checkpoints.build_optimizer_and_load_latest(
            policy, job.sft.optimizer, is_offloaded=job.trainer.offload.optimizer
        )
        if checkpoint is not None:
            self.state = msgspec.structs.replace(
                checkpoint.state, seed=job.seed, parent=checkpoint.path.name
            )
            logger.info("resuming the SFT stage after step %d", self.state.step)
        self._saved_step = self.state.step
        self._metrics = None
        if dist.get_rank() == 0:
            self.checkpoints.delete_leftovers(SFT_GENERATION)
            self._metrics = MetricsWriter(paths.sft_metrics, None, self.state.step)
            if self._metrics.reopened:
                self._metrics.write(self.state.step, self._metrics.reopened)

    def train(self, stop: StopRequest) -> bool:
        """Train to the end; false when a stop was asked for on any rank before it."""
        sft = self._job.sft
        while self.state.step < sft.total_steps:
            if is_true_on_any_rank(stop.requested):
                is_given_up = is_cancelled_without_checkpoint(self._cancelled_marker)
                if self.state.step > self._saved_step and not is_true_on_any_rank(is_given_up):
                    self._begin_checkpoint_and_update_state()
                self.checkpoints.finish_save()
                return False
            self._train_step()
            self.checkpoints.publish_and_prune_if_written()
            step = self.state.step
            if step % sft.checkpoint_every_steps == 0 or step == sft.total_steps:
                self._begin_checkpoint_and_update_state()
        self.checkpoints.finish_save()
        return True

    def _train_step(self) -> None:
        sft, step, began = self._job.sft, self.state.step + 1, time.perf_counter()
        data = self._demonstrations
        chosen = get_batch_indices(self.state.step, sft.batch_size, len(data), self._job.seed)
        rows = self._tokenizer.build_rows([data[index] for index in chosen])
        batches = make_micro_batches_of_this_rank(
            self._policy, rows, (), sft.max_tokens_per_microbatch
        )
        rate = compute_learning_rate(self.state.step, sft.total_steps, sft.optimizer)
        config = self._job.trainer.model_copy(
            update={"max_tokens_per_microbatch": sft.max_tokens_per_microbatch}
        )
        with raise_out_of_memory_as_recipe_error(self._policy, config, "sft"):
            stats, norm = train_step(self._policy, self._optimizer, batches, compute_sft_loss, rate)
        untrained = build_nonfinite_records_or_raise(
            [norm],
            step,
            self.state.untrained,
            sft.optimizer.on_nonfinite,
            section="sft.optimizer",
            name_step=lambda step: f"step {step} of the SFT stage",
            hint="lower sft.optimizer.lr and resume",
        )
        self.state = msgspec.structs.replace(
            self.state, step=step, untrained=[*self.state.untrained, *untrained]
        )
        if not is_optimizer_step_taken(norm):
            logger.warning("step %d of the SFT stage is not taken: its norm is %s", step, norm)
        total = stats.reduce_over_ranks(("loss", "tokens", "places"), ()).sums
        seconds = time.perf_counter() - began
        if self._metrics is not None:
            self._metrics.write(
                step,
                {
                    "loss": total["loss"] / max(1, total["tokens"]),
                    **build_norm_metrics([norm]),
                    "lr": rate,
                    "tokens/targets": int(total["tokens"]),
                    "tokens/trained": int(total["places"]),
                    "throughput/trained_tokens_per_s": total["places"] / seconds,
                    "time/step_s": round(seconds, 4),
                },
            )

    def _begin_checkpoint_and_update_state(self) -> None:
        path = self.checkpoints.finish_earlier_and_begin_save(
            self._policy, self._optimizer, self.state
        )
        self.state = msgspec.structs.replace(self.state, parent=path.name)
        self._saved_step = self.state.step


def compute_sft_loss(batch: MicroBatch, logprobs_N: torch.Tensor) -> tuple[torch.Tensor, LossStats]:
    """Cross entropy summed over the replies' tokens."""
    total = -logprobs_N.sum()
    return total, LossStats(
        {
            "loss": total.detach().double(),
            "tokens": len(logprobs_N),
            "places": batch.padded_token_count,
        }
    )
