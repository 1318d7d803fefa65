"""Supervised fine-tuning on demonstrations, one process per rank: `areal_hpc.trainer.sft:run`."""

import gc
import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from areal_hpc.dataset.demonstrations import read_demonstrations
from areal_hpc.jobs.processes.process_setup import StopRequest
from areal_hpc.metrics.writer import MetricsWriter
from areal_hpc.recipe.sections.trainer import AdamConfig, compute_learning_rate
from areal_hpc.rundir.checkpoints import TrainerState, digest_base
from areal_hpc.rundir.files import write_atomic
from areal_hpc.rundir.jobs import is_cancelled_without_checkpoint
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.telemetry.spans import record_state_entry
from areal_hpc.trainer.batch.demonstration_rows import DemonstrationTokenizer
from areal_hpc.trainer.batch.packing import TrainingRow
from areal_hpc.trainer.batch.untrained import (
    build_norm_metrics,
    is_optimizer_step_taken,
    record_skipped_steps,
)
from areal_hpc.trainer.checkpoints.store import CheckpointStore
from areal_hpc.trainer.collectives import broadcast_object, is_true_on_any_rank
from areal_hpc.trainer.config import SftJobConfig
from areal_hpc.trainer.memory import raise_out_of_memory_as_recipe_error
from areal_hpc.trainer.model.families.architecture import read_architecture
from areal_hpc.trainer.model.families.lora import initialize_adapter, seed_dropout
from areal_hpc.trainer.model.hf_weights import HfModelReader, load_hf, save_hf_model
from areal_hpc.trainer.model.policy import TORCH_DTYPE_BY_NAME, TrainedNetwork, build_policy
from areal_hpc.trainer.objective.loss_stats import LossStats
from areal_hpc.trainer.process_groups import run_rank
from areal_hpc.trainer.step import (
    MicroBatch,
    make_micro_batches_of_this_rank,
    run_forward_backward,
    train_step,
)

logger = logging.getLogger(__name__)

MAX_KEPT_CHECKPOINTS = 2
SFT_GENERATION = 0
"""Generation of all weights of SFT: it samples nothing, so its starts need no numbers."""


def run(config: dict[str, Any]) -> None:
    job = SftJobConfig.model_validate(config)
    run_rank(job, StopRequest.install(), _run_sft)


def _run_sft(job: SftJobConfig, paths: RunPaths, device: torch.device, stop: StopRequest) -> bool:
    assert job.recipe.sft is not None
    lora, config = job.recipe.sft.lora, job.recipe.trainer
    arch = read_architecture(job.model_path, lora)
    dtype = TORCH_DTYPE_BY_NAME[config.dtype]
    policy = build_policy(arch, config.parallel, dtype, device, config.activations)
    trainer = SftTrainer(job, paths, policy)
    gc.freeze()  # a collection scans what training creates, not everything that imports left
    record_state_entry("train")
    finished = trainer.train(stop)
    record_state_entry("end")
    # It is there if a rank died after it was written.
    if finished and not is_true_on_any_rank(paths.sft_export.exists()):
        save_hf_model(policy, job.model_path, paths.sft_export)
    trainer.checkpoints.close()
    if finished and dist.get_rank() == 0 and job.recipe.train_dataset is None:
        write_atomic(paths.finished_marker, b"")
    return finished


class SftTrainer:
    """Loop of supervised fine-tuning; it resumes from its latest checkpoint if there is one."""

    def __init__(self, job: SftJobConfig, paths: RunPaths, policy: TrainedNetwork) -> None:
        assert job.recipe.sft is not None
        self._job, self._sft = job, job.recipe.sft
        self._policy = policy
        self._cancelled_marker = paths.cancelled_marker
        self.checkpoints = CheckpointStore(paths.sft_checkpoints_dir, MAX_KEPT_CHECKPOINTS)
        self._tokenizer = DemonstrationTokenizer(job.model_path)
        self._demonstrations = read_demonstrations(job.dataset_path)
        held_out = read_demonstrations(job.evaluation_path) if job.evaluation_path else []
        self._held_out_rows = self._tokenizer.build_rows(held_out)
        load_hf(policy, HfModelReader(job.model_path).read_tensor)
        seed, base = job.recipe.seed, ""
        if self._sft.lora is not None:
            initialize_adapter(policy.gpt, seed)
            base = broadcast_object(
                digest_base(job.model_path) if dist.get_rank() == 0 else None, str
            )
        self.state = TrainerState(step=0, generation=SFT_GENERATION, seed=seed, base=base)
        self._optimizer, checkpoint = self.checkpoints.restore_latest(
            policy,
            AdamConfig(**self._sft.optimizer.model_dump()),
            is_offloaded=job.recipe.trainer.offload.optimizer,
            base=base,
        )
        if checkpoint is not None:
            self.state = msgspec.structs.replace(
                checkpoint.state, seed=seed, parent=checkpoint.path.name
            )
            logger.info("resuming the SFT stage after step %d", self.state.step)
        self._saved_step = self.state.step
        self._tokenizing = ThreadPoolExecutor(1, "tokenizing")
        self._next_rows = self._tokenizing.submit(self._build_rows, self.state.step)
        self._metrics = None
        if dist.get_rank() == 0:
            self.checkpoints.delete_leftovers(SFT_GENERATION)
            self._metrics = MetricsWriter(paths.sft_metrics, None, self.state.step)
            if self._metrics.reopened:
                self._metrics.write(self.state.step, self._metrics.reopened)

    def train(self, stop: StopRequest) -> bool:
        """Train to the last step; return False if a stop was requested on any rank before."""
        sft = self._sft
        while self.state.step < sft.total_steps:
            if is_true_on_any_rank(stop.requested):
                skips_checkpoint = is_cancelled_without_checkpoint(self._cancelled_marker)
                if self.state.step > self._saved_step and not is_true_on_any_rank(skips_checkpoint):
                    self._begin_checkpoint()
                self.checkpoints.finish_save()
                return False
            self._train_step()
            self.checkpoints.poll_save()
            step = self.state.step
            if step % sft.checkpoint_every_steps == 0 or step == sft.total_steps:
                self._begin_checkpoint()
        self.checkpoints.finish_save()
        return True

    def _train_step(self) -> None:
        sft, step, began = self._sft, self.state.step + 1, time.perf_counter()
        rows = self._next_rows.result()
        # A template and a tokenizer in Python are slow: the device does not wait for them.
        self._next_rows = self._tokenizing.submit(self._build_rows, step)
        if sft.lora is not None:
            seed_dropout(self._job.recipe.seed, self.state.step)
        rate = compute_learning_rate(self.state.step, sft.total_steps, sft.optimizer)
        with raise_out_of_memory_as_recipe_error(self._policy, self._job.recipe.trainer):
            batches = self._pack(rows)
            stats, norm = train_step(self._policy, self._optimizer, batches, compute_sft_loss, rate)
        untrained = record_skipped_steps(
            [norm],
            step,
            self.state.untrained,
            key="sft.optimizer.lr",
            name_step=lambda step: f"step {step} of the SFT stage",
            hint="lower sft.optimizer.lr and resume",
        )
        self.state = msgspec.structs.replace(
            self.state, step=step, untrained=[*self.state.untrained, *untrained]
        )
        if not is_optimizer_step_taken(norm):
            logger.warning("step %d of the SFT stage is not taken: its norm is %s", step, norm)
        total = reduce_sft_stats(stats)
        seconds = time.perf_counter() - began
        held_out = self._evaluate(step)
        if self._metrics is not None:
            self._metrics.write(
                step,
                {
                    "loss": total["loss"] / max(1, total["tokens"]),
                    **build_norm_metrics([norm]),
                    "lr": rate,
                    "rows": len(rows),
                    "rows/rewritten": len(rows) - sft.batch_size,
                    "tokens/targets": int(total["tokens"]),
                    "tokens/trained": int(total["padded_tokens"]),
                    "throughput/trained_tokens_per_s": total["padded_tokens"] / seconds,
                    "time/step_s": round(seconds, 4),
                    **held_out,
                },
            )

    def _build_rows(self, step: int) -> list[TrainingRow]:
        data, seed = self._demonstrations, self._job.recipe.seed
        chosen = get_batch_indices(step, self._sft.batch_size, len(data), seed)
        return self._tokenizer.build_rows([data[index] for index in chosen])

    def _pack(self, rows: Sequence[TrainingRow]) -> list[MicroBatch]:
        max_tokens = self._job.recipe.trainer.max_tokens_per_microbatch
        return make_micro_batches_of_this_rank(self._policy, rows, (), max_tokens)

    def _evaluate(self, step: int) -> dict[str, float]:
        """Return the loss on held-out demonstrations if it is due after this step. A collective."""
        evaluation = self._sft.evaluation
        if evaluation is None:
            return {}
        if step % evaluation.every_steps and step != self._sft.total_steps:
            return {}
        rows, size, stats = self._held_out_rows, self._sft.batch_size, LossStats()
        with raise_out_of_memory_as_recipe_error(self._policy, self._job.recipe.trainer):
            for first in range(0, len(rows), size):  # as many on the device as in a training batch
                batches = self._pack(rows[first : first + size])
                stats.add(
                    run_forward_backward(self._policy, batches, compute_sft_loss, backward=False)
                )
        total = reduce_sft_stats(stats)
        return {"eval/loss": total["loss"] / max(1, total["tokens"])}

    def _begin_checkpoint(self) -> None:
        path = self.checkpoints.begin_save(self._policy, self._optimizer, self.state)
        self.state = msgspec.structs.replace(self.state, parent=path.name)
        self._saved_step = self.state.step


def compute_sft_loss(batch: MicroBatch, logprobs_N: torch.Tensor) -> tuple[torch.Tensor, LossStats]:
    """Return the cross entropy summed over the replies' tokens."""
    total = -logprobs_N.sum()
    return total, LossStats(
        {
            "loss": total.detach().double(),
            "tokens": len(logprobs_N),
            "padded_tokens": batch.padded_token_count,
        }
    )


def reduce_sft_stats(stats: LossStats) -> Mapping[str, float]:
    return stats.reduce_over_ranks(("loss", "tokens", "padded_tokens"), ()).sums


def get_batch_indices(step: int, batch_size: int, size: int, seed: int) -> list[int]:
    """Return the demonstrations of one step; each pass over all of them has its own order."""
    first = step * batch_size
    orders: dict[int, Any] = {}
    chosen = []
    for position in range(first, first + batch_size):
        epoch, offset = divmod(position, size)
        if epoch not in orders:
            orders[epoch] = np.random.default_rng((seed, epoch)).permutation(size)
        chosen.append(int(orders[epoch][offset]))
    return chosen
