"""Training loop: rank 0 decides the next command, and all ranks execute it. Start reading here.

One turn of `run_loop` is one command. For each version of the weights commands come in this order:

    action   all ranks                             rank 0
    -------  ------------------------------------  ------------------------------------------
    TRAIN    `Learner.train_batch`: read the       gets the batch from the ledger, or from
             batch, advantages, loss, optimizer    recorded manifests
    PUBLISH  score a fixed prompt; gather the      divides the replicas that lack the weights
             weights, tensor by tensor; senders    over senders, then reports to the ledger
             send
    SAVE     copy the state; writer processes      withholds the step's metrics until the
             write it to disk                      checkpoint is durable
    WAIT     nothing                               waits for held-out tasks
    EXPORT   write a Hugging Face model
    WAIT     nothing                               writes the step's metrics; waits for the
                                                   next batch
    STOP     leave the loop

`Coordinator._pick_next_command` implements this order. While rank 0 waits, it searches once a
second for late replicas, and polls in every turn for a stop and for the checkpoint being written.

Without an evaluation cell the next step is trained only after the evaluation, so that a replica
that restarts meanwhile can still receive the weights under evaluation. An evaluation cell keeps the
weights that it evaluates: training continues, and the reward gets a row of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum

from msgspec import Struct

from areal_hpc.errors import (
    ArealError,
    ClusterError,
    IdleError,
    NonFiniteGradientError,
    OtherRankError,
    ShardError,
    StopRequestedError,
    SupersededTrainerError,
    TeacherError,
    UntrainableBatchError,
)
from areal_hpc.jobs.processes.process_setup import StopRequest
from areal_hpc.metrics.writer import StepRecord
from areal_hpc.rundir.checkpoints import UntrainedBatchPart
from areal_hpc.rundir.jsonl import JsonMetricRow
from areal_hpc.rundir.telemetry.spans import time_span
from areal_hpc.trainer.collectives import broadcast_object, is_true_on_any_rank, note_place_reached
from areal_hpc.trainer.config import Schedule
from areal_hpc.trainer.learner import Learner
from areal_hpc.trainer.live_run import LiveRun
from areal_hpc.trainer.model.hf_weights import stream_sent_tensors
from areal_hpc.weights.publisher import ReplicasBySender, WeightSenders
from areal_hpc.wire.ledger import BatchManifest
from areal_hpc.wire.weight_version import WeightVersion

Action = StrEnum("Action", "TRAIN PUBLISH SAVE EXPORT WAIT STOP")


class Command(Struct, frozen=True):
    """Rank 0's next command to all ranks. Ranks act on nothing else."""

    action: Action
    manifest: BatchManifest | None = None
    """Batch to train."""
    quarantine: UntrainedBatchPart | None = None
    """Reason to consume that batch without training it; None if it is trained."""
    shares: ReplicasBySender = []
    """Replicas that each sender publishes to."""
    row: JsonMetricRow = {}
    """Unfinished metrics of the step, for its checkpoint."""
    finished: bool = False
    """Whether, with STOP, every step has been trained, saved and exported."""


_BATCH_ERRORS = (
    NonFiniteGradientError, ShardError, ClusterError, OtherRankError, UntrainableBatchError,
    TeacherError,
)  # fmt: skip
"""Errors that `Learner.train_batch` raises on all ranks alike."""


def run_loop(
    learner: Learner,
    coordinator: Coordinator | None,
    stop: StopRequest,
    senders: WeightSenders | None = None,
) -> bool:
    """Execute rank 0's commands until it sends STOP. Return whether the run is complete.

    Rank 0 is the rank with a coordinator. A stop requested of any rank stops all ranks. `senders`
    is this rank's part in sending weights.
    """
    while True:
        with _time_optional_span(coordinator is None, "command_wait"):
            note_place_reached("the next command")
            with _time_optional_span(coordinator is not None, "rank_wait"):
                is_stop_requested = is_true_on_any_rank(stop.requested)
            if is_stop_requested:
                stop.request()
            _poll_checkpoint(learner, coordinator, wait=False)
            note_place_reached("rank 0's decision")
            command, failure = _broadcast_next_command(coordinator)
        if command.action is Action.STOP:
            _poll_checkpoint(learner, coordinator, wait=True)
            if failure is not None:
                raise failure
            return command.finished
        _execute_command(command, learner, coordinator, senders)


def _broadcast_next_command(
    coordinator: Coordinator | None,
) -> tuple[Command, ArealError | None]:
    command, failure = None, None
    if coordinator:
        try:
            command = coordinator.choose_next_command()
        except SupersededTrainerError:
            raise  # a successor may have taken over: this trainer must not finish anything
        except ArealError as error:
            command, failure = Command(Action.STOP), error
    with _time_optional_span(coordinator is not None, "rank_wait"):
        return broadcast_object(command, Command), failure


def _execute_command(
    command: Command,
    learner: Learner,
    coordinator: Coordinator | None,
    senders: WeightSenders | None,
) -> None:
    began = time.perf_counter()
    match command.action:
        case Action.TRAIN:
            assert command.manifest is not None
            try:
                with learner.trace_step(command.manifest.step):
                    row = learner.train_batch(command.manifest, command.quarantine)
            except StopRequestedError:  # on all ranks: the next turn ends the loop
                return
            except _BATCH_ERRORS:
                _poll_checkpoint(learner, coordinator, wait=True)
                raise
            if coordinator:
                coordinator.on_trained(learner.version, row)
        case Action.PUBLISH:
            parameters = stream_sent_tensors(learner.policy)
            with _time_optional_span(coordinator is None, "publish"):
                if coordinator and coordinator.live_run:
                    coordinator.live_run.publish_weights(
                        command.shares, parameters, learner.score_probe
                    )
                elif senders:
                    senders.send(learner.version, command.shares, parameters, learner.score_probe())
        case Action.SAVE:
            note_place_reached(f"checkpoint of step {learner.version.step}")
            _poll_checkpoint(learner, coordinator, wait=True)  # the previous checkpoint
            began = time.perf_counter()
            with _time_optional_span(coordinator is None, "checkpoint"):
                learner.begin_checkpoint(command.row)
            if coordinator:
                coordinator.on_checkpoint_started(time.perf_counter() - began)
        case Action.EXPORT:
            note_place_reached(f"export of step {learner.version.step}")
            with _time_optional_span(coordinator is None, "export"):
                learner.export_model()
            if coordinator:
                coordinator.on_exported(time.perf_counter() - began)


def _time_optional_span(is_recorded: bool, span_name: str) -> AbstractContextManager[object]:
    return time_span(span_name) if is_recorded else nullcontext()


def _poll_checkpoint(learner: Learner, coordinator: Coordinator | None, *, wait: bool) -> None:
    began = time.perf_counter()
    is_durable = learner.checkpoints.finish_save() if wait else learner.checkpoints.poll_save()
    if is_durable and coordinator:
        coordinator.on_checkpoint_saved(time.perf_counter() - began)


class Coordinator:
    """Rank 0's decisions; the `on_` methods receive the results of its commands.

    Args:
        schedule: Steps at which to save, export and evaluate.
        record: Metrics of the step in progress.
        poll_batch: Returns the batch for a step; None until it is formed.
        stop: Stop request of a signal.
        live_run: The ledger and the replicas; None in a replay.
        check_generation: Called before others can see a result; raises when a newer start of the
            trainer owns the run.
        read_quarantine: Returns the reason not to train the batch of a step; called for each batch.
        must_end_unsaved: Returns whether a stop discards the steps since the last checkpoint.
    """

    def __init__(
        self,
        schedule: Schedule,
        record: StepRecord,
        poll_batch: Callable[[int], BatchManifest | None],
        stop: StopRequest,
        live_run: LiveRun | None = None,
        *,
        check_generation: Callable[[], None] = lambda: None,
        read_quarantine: Callable[[int], UntrainedBatchPart | None] = lambda step: None,
        must_end_unsaved: Callable[[], bool] = lambda: False,
    ) -> None:
        self._schedule = schedule
        self._record = record
        self._poll_batch = poll_batch
        self._stop = stop
        self.live_run = live_run
        self._check_generation = check_generation
        self._read_quarantine = read_quarantine
        self._must_end_unsaved = must_end_unsaved
        self._saved_step = record.version.step
        self._exported_step = -1

    def choose_next_command(self) -> Command:
        """Choose the next command of all ranks. Wait a few seconds at most."""
        is_idle = self.live_run is not None and self.live_run.lacks_cells_too_long()
        if not self._stop.requested and not is_idle:
            try:
                return self._pick_next_command()
            except ClusterError:
                if not self._stop.wait(timeout_s=0.0):
                    raise
                # The ledger received the stop as well.
        command = self._pick_save_command()
        if is_idle and command.action is Action.STOP and not self._stop.requested:
            raise IdleError("no cell has been there for long: the trainer gives its nodes back")
        return command

    def _pick_next_command(self) -> Command:
        step, live_run = self._record.version.step, self.live_run
        if live_run is not None:
            match live_run.announce_weights():
                case "publish":
                    self._check_ownership()
                    return Command(Action.PUBLISH, shares=live_run.list_targets_by_sender())
                case "wait":
                    return Command(Action.WAIT)
        if self._schedule.saves_checkpoint(step) and self._saved_step < step:
            return self._save()
        if live_run is not None and not live_run.poll_due_evaluation_done():
            return Command(Action.WAIT)
        if self._schedule.exports_model(step) and self._exported_step < step:
            self._check_ownership()
            return Command(Action.EXPORT)
        self._write_row()
        if step < self._schedule.total_steps:
            manifest = self._poll_batch(step + 1)
            if manifest is None:
                return Command(Action.WAIT)
            with self._record.time_files():
                quarantine = self._read_quarantine(manifest.step)
            return Command(Action.TRAIN, manifest, quarantine)
        if live_run is not None and not live_run.is_evaluation_cell_done():
            return Command(Action.WAIT)
        return Command(Action.STOP, finished=True)

    def _pick_save_command(self) -> Command:
        step = self._record.version.step
        if self._saved_step < step:
            if self._stop.requested and self._must_end_unsaved():
                return Command(Action.STOP)
            return self._save()
        self._write_row()
        return Command(Action.STOP, finished=self._schedule.is_finished_once_saved(step))

    def _save(self) -> Command:
        self._check_ownership()
        return Command(Action.SAVE, row=self._record.row)

    def _check_ownership(self) -> None:
        with self._record.time_files():
            self._check_generation()

    def _write_row(self) -> None:
        pauses = self.live_run.get_update_pause_metrics() if self.live_run is not None else {}
        self._record.write_row_once(pauses)

    def on_trained(self, version: WeightVersion, row: JsonMetricRow) -> None:
        self._record.open_row_of_trained_step(version, row)
        if self.live_run is not None:
            self.live_run.mark_weights_unpublished()

    def on_checkpoint_started(self, seconds: float) -> None:
        self._saved_step = self._record.version.step
        self._record.metrics.hold_back_lines()
        self._record.timer.add_seconds("checkpoint", seconds)

    def on_checkpoint_saved(self, seconds: float) -> None:
        self._record.timer.add_seconds("checkpoint", seconds)
        with self._record.time_files():
            self._record.metrics.write_held_lines()

    def on_exported(self, seconds: float) -> None:
        self._exported_step = self._record.version.step
        self._record.timer.add_seconds("export", seconds)

    def close(self) -> None:
        if self.live_run is not None:
            self.live_run.close()
        self._record.metrics.close()
