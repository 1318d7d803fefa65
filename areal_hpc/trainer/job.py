"""The trainer as a process: `areal_hpc.trainer.job:run`, once per rank."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
from pydantic import Field

from areal_hpc.cluster import rendezvous
from areal_hpc.cluster.epochs import take_next_epoch
from areal_hpc.cluster.jobspec import STOPPED_EXIT_CODE
from areal_hpc.cluster.preemption import StopRequest
from areal_hpc.cluster.starts import own_stop_note
from areal_hpc.config import StageConfig
from areal_hpc.durable import sync_path
from areal_hpc.layout import RunLayout
from areal_hpc.telemetry import EventLog
from areal_hpc.trainer.collectives import from_rank_zero
from areal_hpc.trainer.config import TrainerConfig
from areal_hpc.trainer.fence import epoch_fence
from areal_hpc.trainer.learner import Learner, make_learner
from areal_hpc.trainer.loop.async_evaluation import SideEvaluation
from areal_hpc.trainer.loop.coordinator import Conductor
from areal_hpc.trainer.loop.ledger_client import LedgerPeer
from areal_hpc.trainer.loop.loop import run_loop
from areal_hpc.trainer.loop.schedule import Schedule
from areal_hpc.trainer.metrics import MetricsLog
from areal_hpc.trainer.model.hf_weights import hf_specs
from areal_hpc.trainer.rank_main import run_rank
from areal_hpc.weights.config import WeightsConfig
from areal_hpc.weights.plan import TensorSpec
from areal_hpc.weights.publisher import Publisher

logger = logging.getLogger(__name__)

STOP_MARGIN_S = 4.0
"""A step or commit that is not over this long before the job is killed is given up."""
STOP_POLL_S = 0.5


class TrainerJobConfig(StageConfig):
    """What the launcher tells the trainer."""

    run_dir: Path
    """The run directory."""
    model_path: Path
    """The model that training starts from."""
    seed: int
    """Recorded in commits."""
    trainer: TrainerConfig
    """How the policy learns."""
    weights: WeightsConfig
    """How replicas get new weights."""
    cells: Annotated[int, Field(ge=1)]
    """Cells to send them to, that of evaluation not counted."""
    n_samples: Annotated[int, Field(ge=1)]
    """Episodes per ticket."""
    evaluation_every_steps: Annotated[int, Field(ge=0)]
    """Steps between evaluations; 0 evaluates only the first and the last weights."""
    evaluation_tasks: Annotated[int, Field(ge=0)]
    """Held-out tasks per evaluation; 0 never evaluates."""
    evaluation_cell: bool = False
    """A cell of their own plays them, and training does not wait for it."""
    stop_grace_s: Annotated[float, Field(gt=STOP_MARGIN_S)] = 12.0
    """Time from a stop signal to the kill."""

    @property
    def schedule(self) -> Schedule:
        """Which steps get what."""
        return Schedule(
            total_steps=self.trainer.total_steps,
            commit_every_steps=self.trainer.commit_every_steps,
            export_every_steps=self.trainer.export_every_steps,
            evaluation_every_steps=self.evaluation_every_steps,
            evaluation_tasks=self.evaluation_tasks,
        )


def run(config: dict[str, Any]) -> None:
    """Train from the latest commit, or the starting model, to the last step.

    Raises:
        SystemExit: Stopped by a signal before the end, the work so far being committed; or another
            rank failed.
    """
    job = TrainerJobConfig.model_validate(config)
    layout = RunLayout(job.run_dir)
    stop = StopRequest.install()
    threading.Thread(
        target=_give_up, args=(stop, job.stop_grace_s), name="stop-deadline", daemon=True
    ).start()
    run_rank(
        job.trainer.parallel,
        job.trainer.device,
        layout.rendezvous_dir,
        stop,
        lambda device: _train(job, layout, device, stop),
    )


def _train(
    job: TrainerJobConfig, layout: RunLayout, device: torch.device, stop: StopRequest
) -> bool:
    """Every rank's part; true when the run is complete."""
    is_first = dist.get_rank() == 0
    taken = str(take_next_epoch(layout.epochs_dir)).encode() if is_first else None
    epoch = int(from_rank_zero(taken))
    fence = epoch_fence(layout.epochs_dir, epoch)
    learner = make_learner(
        job.trainer, layout, job.model_path, device, epoch=epoch, seed=job.seed, fence=fence
    )
    conductor = _make_conductor(job, layout, learner, device, stop) if is_first else None
    gc.freeze()  # Megatron collects garbage at every commit: not among what imports left
    finished = run_loop(learner, conductor, stop)
    if finished and conductor:
        epoch_fence(layout.epochs_dir, learner.state.epoch)()
        layout.finished.touch()
        sync_path(layout.finished)
        sync_path(layout.finished.parent)
        conductor.finish()
    if conductor:
        conductor.close()
    learner.close()
    return finished


def _make_conductor(
    job: TrainerJobConfig,
    layout: RunLayout,
    learner: Learner,
    device: torch.device,
    stop: StopRequest,
) -> Conductor:
    """Rank 0's part: clean up after the last start, open the epoch, find the replicas."""
    version = learner.version
    learner.clean()
    metrics = MetricsLog(layout.metrics, layout.tensorboard_dir, version.step)
    admin_key = rendezvous.ensure_admin_key(layout.admin_key)
    ledger = LedgerPeer(layout.rendezvous_dir, admin_key, version.epoch, lambda: stop.requested)
    beside = SideEvaluation(job.schedule, metrics.judged_step) if job.evaluation_cell else None
    ledger.open_epoch(version.step, -1 if beside else version.step)
    backend = "nccl" if device.type == "cuda" else "gloo"
    return Conductor(
        job.schedule,
        version,
        metrics.reopened or learner.reopened_line,
        ledger=ledger,
        publisher=Publisher(
            job.weights,
            layout.rendezvous_dir,
            job.cells,
            admin_key,
            backend,
            device,
            layout.weights_dir,
            evaluation_cell=job.evaluation_cell,
        ),
        beside=beside,
        specs=[
            TensorSpec(name, shape, str(dtype).removeprefix("torch."))
            for name, shape, dtype in hf_specs(learner.policy)
        ],
        metrics=metrics,
        events=EventLog(layout.events, "trainer"),
        stop=stop,
        fence=epoch_fence(layout.epochs_dir, version.epoch),
    )


def _give_up(stop: StopRequest, grace_s: float) -> None:
    """End the process when a stop takes too long: a half-written commit stays invisible.

    Under Slurm the supervisor finds out how long that is, and may correct itself.
    """
    while not stop.wait(timeout_s=3600.0):
        pass
    kill_at = time.time() + grace_s
    while time.time() < kill_at - STOP_MARGIN_S:
        time.sleep(STOP_POLL_S)
        if (note := own_stop_note()) is not None:
            kill_at = note.kill_at
    logger.warning("the step in flight is given up; the last commit stands")
    os._exit(STOPPED_EXIT_CODE)
