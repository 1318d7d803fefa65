"""Trainer process, once per rank: `run` trains live, `run_replay` on batches of another run.

A replay uses the same learner, loop and checkpoints. Its weights go to no replica.
"""

import gc
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from areal_hpc.jobs.node import get_job_start_number, get_task_position
from areal_hpc.jobs.processes.process_setup import StopRequest
from areal_hpc.jobs.starts import StopDeadline
from areal_hpc.metrics.step_metrics import EpisodeFailureCounter
from areal_hpc.metrics.writer import AlertReporter, MetricsWriter, StepRecord
from areal_hpc.recipe.sections.evaluation import resolve_keep_best
from areal_hpc.recipe.sections.trainer import TrainerConfig
from areal_hpc.recipe.source_objectives import resolve_source_objectives
from areal_hpc.rundir import rendezvous
from areal_hpc.rundir.files import build_generation_check, claim_next_number, fsync_path
from areal_hpc.rundir.jobs import STOPPED_EXIT_CODE, is_cancelled_without_checkpoint
from areal_hpc.rundir.jsonl import JsonMetricRow
from areal_hpc.rundir.manifests import read_manifest, read_quarantine
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.run_inputs import TrainSources
from areal_hpc.rundir.service_client import ServiceClient
from areal_hpc.rundir.telemetry.events import EventLog
from areal_hpc.rundir.telemetry.prometheus import build_samples, register_sample_reader
from areal_hpc.rundir.telemetry.spans import record_state_entry
from areal_hpc.trainer.collectives import broadcast_object, gather_objects_on_first_rank
from areal_hpc.trainer.config import STOP_MARGIN_S, ReplayJobConfig, Schedule, TrainerJobConfig
from areal_hpc.trainer.learner import Learner
from areal_hpc.trainer.live_run import AsyncEvaluationTracker, LiveRun
from areal_hpc.trainer.loop import Coordinator, run_loop
from areal_hpc.trainer.model.hf_weights import list_sent_specs
from areal_hpc.trainer.process_groups import run_rank
from areal_hpc.weights.buckets import TensorSpec
from areal_hpc.weights.publisher import (
    Publisher,
    WeightSenders,
    choose_sender_ranks,
    make_transport,
)
from areal_hpc.weights.update import Transport
from areal_hpc.wire.weight_version import GenerationFork

logger = logging.getLogger(__name__)

STOP_POLL_S = 0.5


def run(config: dict[str, Any]) -> None:
    """Train from the latest checkpoint, or the starting model, to the last step."""
    job = TrainerJobConfig.model_validate(config)
    if RunPaths(job.run_dir).finished_marker.exists():
        return  # a rank died after all work was complete
    sys.path[:0] = [folder for folder in job.sys_path if folder not in sys.path]
    stop = StopRequest.install()
    deadline = partial(_exit_on_stop_timeout, stop, job.recipe.cluster.stop_grace_s)
    threading.Thread(target=deadline, name="stop-deadline", daemon=True).start()
    run_rank(job, stop, _run_training)


def _run_training(
    job: TrainerJobConfig, paths: RunPaths, device: torch.device, stop: StopRequest
) -> bool:
    recipe, is_first = job.recipe, dist.get_rank() == 0
    claimed = claim_next_number(paths.generations_dir) if is_first else None
    generation = broadcast_object(claimed, int)
    check_generation = build_generation_check(paths.generations_dir, generation)
    events = EventLog(paths.events, "trainer")
    if is_first:
        events.record("ranks_joined", generation=generation)
    learner = Learner(
        recipe.trainer, paths, job.model_path, device,
        generation=generation, seed=recipe.seed, check_generation=check_generation,
        is_stop_requested=lambda: stop.requested,
        keep_best=resolve_keep_best(recipe.evaluation, recipe.evaluation_sets),
        sources=TrainSources.read(paths.train_source_sizes, recipe.train_source_names),
        source_objectives=resolve_source_objectives(recipe),
    )  # fmt: skip
    nodes = gather_objects_on_first_rank(get_task_position().node_rank, int)
    ranks: list[int] = broadcast_object(
        choose_sender_ranks(nodes, recipe.weights) if nodes else [], list[int]
    )
    transport, rank = None, dist.get_rank()
    if rank in ranks:
        transport = make_transport(
            recipe.weights.model_copy(update={"senders": len(ranks)}),
            rendezvous.read_service_key(paths.service_key),
            "nccl" if device.type == "cuda" else "gloo",
            device,
            paths.published_weights_dir,
        )
    specs = [
        TensorSpec(name, shape, str(dtype).removeprefix("torch."))
        for name, shape, dtype in list_sent_specs(learner.policy)
    ]
    index = ranks.index(rank) if rank in ranks else None
    senders = WeightSenders(index, len(ranks), specs, transport, gather_objects_on_first_rank)
    coordinator = None
    if is_first:
        events.record("state_loaded", generation=generation, step=learner.version.step)
        assert transport is not None  # rank 0 always sends
        coordinator = _make_coordinator(
            job, paths, learner, stop, check_generation, events, transport, senders
        )
    gc.freeze()  # a collection scans what training creates, not everything that imports left
    record_state_entry("")  # from here on phases report the state
    finished = run_loop(learner, coordinator, stop, senders)
    record_state_entry("end")
    if finished and coordinator:
        check_generation()
        paths.finished_marker.touch()
        fsync_path(paths.finished_marker)
        fsync_path(paths.finished_marker.parent)
        assert coordinator.live_run is not None
        coordinator.live_run.report_run_finished()
    if coordinator:
        coordinator.close()
    else:
        senders.close()
    learner.close()
    return finished


def _make_coordinator(
    job: TrainerJobConfig,
    paths: RunPaths,
    learner: Learner,
    stop: StopRequest,
    check_generation: Callable[[], None],
    events: EventLog,
    transport: Transport[Any],
    senders: WeightSenders,
) -> Coordinator:
    recipe, schedule, version = job.recipe, job.schedule, learner.version
    has_evaluation_cell = recipe.evaluation.separate_cell
    learner.checkpoints.delete_leftovers(version.generation)
    metrics = MetricsWriter(
        paths.metrics, paths.tensorboard_run_dir, version.step, schedule.total_steps
    )
    register_sample_reader(lambda: build_samples("areal_hpc_trainer", metrics.newest_line))
    reopened: JsonMetricRow = {"step": version.step, **metrics.reopened} if metrics.reopened else {}
    alerts = AlertReporter(recipe.alerts, paths, events, reopened)
    record = StepRecord(
        metrics, version, metrics.reopened or learner.reopened_row, alerts.report_new_alerts
    )
    service_key = rendezvous.read_service_key(paths.service_key)
    evaluation = (
        AsyncEvaluationTracker(schedule, metrics.judged_step) if has_evaluation_cell else None
    )
    publisher = Publisher(
        transport,
        paths.rendezvous_dir,
        recipe.inference.cells,
        service_key,
        evaluation_cell=has_evaluation_cell,
    )
    live_run = LiveRun(
        schedule,
        record,
        ledger=ServiceClient(paths.rendezvous_dir, rendezvous.LEDGER_SERVICE, service_key),
        publisher=publisher,
        senders=senders,
        events=events,
        stop=stop,
        episode_failures=EpisodeFailureCounter(paths.events),
        # Without Slurm no scheduler takes nodes back.
        idle_timeout_s=recipe.cluster.idle_timeout_s if get_job_start_number() else math.inf,
        async_evaluation=evaluation,
    )
    live_run.open_generation()
    return Coordinator(
        schedule,
        record,
        live_run.poll_next_batch,
        stop,
        live_run,
        check_generation=check_generation,
        read_quarantine=partial(read_quarantine, paths),
        must_end_unsaved=partial(is_cancelled_without_checkpoint, paths.cancelled_marker),
    )


def _exit_on_stop_timeout(stop: StopRequest, grace_s: float) -> None:
    """End the process when a stop takes too long: a half-written checkpoint stays invisible.

    Under Slurm the supervisor determines the limit, and may correct it.
    """
    while not stop.wait(timeout_s=3600.0):
        pass
    deadline = StopDeadline(grace_s)
    while deadline.get_left_s() > STOP_MARGIN_S:
        time.sleep(STOP_POLL_S)
    logger.warning("the step in flight is given up; the last checkpoint stands")
    os._exit(STOPPED_EXIT_CODE)


def run_replay(config: dict[str, Any]) -> None:
    job = ReplayJobConfig.model_validate(config)
    sys.path[:0] = [folder for folder in job.sys_path if folder not in sys.path]
    run_rank(job, StopRequest.install(), _train_on_recorded_batches)


def _train_on_recorded_batches(
    job: ReplayJobConfig, paths: RunPaths, device: torch.device, stop: StopRequest
) -> bool:
    forks = [GenerationFork(generation, step) for generation, step in job.forks]
    learner = Learner(
        job.recipe.trainer, paths, job.model_path, device,
        generation=forks[-1].generation, seed=job.recipe.seed,
        is_stop_requested=lambda: stop.requested,
        sources=TrainSources.read(
            paths.train_source_sizes, job.recipe.train_source_names
        ),
        source_objectives=resolve_source_objectives(job.recipe),
        first_changed_step=job.first_changed_step or math.inf,
    )  # fmt: skip
    # Tokens keep their age: this is no new start of the recorded run.
    learner.state = msgspec.structs.replace(learner.state, forks=forks)
    coordinator = None
    if dist.get_rank() == 0:
        learner.checkpoints.delete_leftovers(learner.state.generation)
        coordinator = make_replay_coordinator(
            learner, paths, job.recipe.trainer, job.first_step, job.last_step, stop
        )
    finished = run_loop(learner, coordinator, stop)
    learner.close()
    return finished


def make_replay_coordinator(
    learner: Learner,
    paths: RunPaths,
    config: TrainerConfig,
    first_step: int,
    last_step: int,
    stop: StopRequest,
) -> Coordinator:
    """Make rank 0's coordinator of a replay; its rows of metrics begin with `first_step`."""
    version = learner.version
    metrics = MetricsWriter(paths.metrics, None, version.step)
    if version.step >= first_step:  # its row was withheld until the checkpoint was durable
        metrics.write(version.step, metrics.reopened or learner.reopened_row)
    schedule = Schedule(
        total_steps=last_step,
        checkpoint_every_steps=config.checkpoint_every_steps,
        export_every_steps=None,
    )
    record = StepRecord(metrics, version, None)
    return Coordinator(
        schedule,
        record,
        partial(read_manifest, paths),
        stop,
        read_quarantine=partial(read_quarantine, paths),
    )
