"""The training loop: rank 0 decides what comes next, and all ranks do it. Start reading here.

One turn of `run_loop` is one command. For each version of the weights they come in this order:

    command                what all ranks do            what rank 0 does
    ---------------------  ---------------------------  -------------------------------------
    TrainOnBatchCommand    `Learner.train_batch`: read  gets the batch from its
                           it, advantages, loss,        `BatchSource`: the ledger, or
                           optimizer                    recorded manifests
    PublishWeightsCommand  score a fixed prompt;        divides the replicas that lack the
                           gather the weights, tensor   weights over senders, then tells the
                           by tensor; senders send      ledger
    SaveCheckpointCommand  copy the state; writer       holds back the step's metrics
                           processes put it on disk     until the checkpoint is durable
    WaitCommand            nothing                      the ledger plays the held-out tasks
    ExportModelCommand     write a Hugging Face model
    WaitCommand            nothing                      writes the step's metrics; waits for
                                                        the next batch
    StopCommand            leave the loop

`Coordinator._pick_next_command` is this order in code. While rank 0 waits it looks once
a second for replicas that came late, and every turn for a stop and for the checkpoint being
written.

The next step is not trained before the evaluation is over: a replica that restarts meanwhile can
then still be given the weights under evaluation. With an evaluation cell it is: that cell keeps the
weights that it judges, training goes on, and the reward gets a row of its own.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
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
from areal_hpc.jobs.processes.signals import StopRequest
from areal_hpc.rundir.checkpoints import UntrainedBatchPart
from areal_hpc.rundir.jsonl import JsonMetricRow
from areal_hpc.rundir.telemetry.spans import time_span
from areal_hpc.trainer.collectives import broadcast_object, is_true_on_any_rank
from areal_hpc.trainer.learner import Learner
from areal_hpc.trainer.loop.schedule import Schedule
from areal_hpc.trainer.loop.step_record import StepRecord
from areal_hpc.trainer.loop.weight_senders import WeightSenders
from areal_hpc.trainer.model.hf_weights import stream_hf_tensors
from areal_hpc.trainer.rank_progress import note_place_reached
from areal_hpc.weights.probe import Probe
from areal_hpc.weights.publisher import ReplicasBySender
from areal_hpc.wire.ledger import BatchManifest
from areal_hpc.wire.weight_version import WeightVersion


class TrainOnBatchCommand(Struct, frozen=True, tag=True):
    """Take one step on this batch."""

    manifest: BatchManifest
    quarantine: UntrainedBatchPart | None = None
    """Why the batch is consumed without being trained; None if it is trained."""


class PublishWeightsCommand(Struct, frozen=True, tag=True):
    """Export the weights; those ranks that are senders send them to replicas."""

    shares: ReplicasBySender
    """The replicas of each sender."""


class SaveCheckpointCommand(Struct, frozen=True, tag=True):
    """Begin to make the work so far durable."""

    row: JsonMetricRow
    """Metrics of the step, unfinished."""


class ExportModelCommand(Struct, frozen=True, tag=True):
    """Write the weights as a Hugging Face model."""


class WaitCommand(Struct, frozen=True, tag=True):
    """Command to do nothing yet. Rank 0 has waited a little."""


class StopCommand(Struct, frozen=True, tag=True):
    """Leave the loop."""

    finished: bool
    """Every step has been trained, saved and exported."""


RankCommand = (
    TrainOnBatchCommand
    | PublishWeightsCommand
    | SaveCheckpointCommand
    | ExportModelCommand
    | WaitCommand
    | StopCommand
)
"""Next command of rank 0 to all ranks. Ranks act on nothing else."""

_BATCH_ERRORS = (
    NonFiniteGradientError, ShardError, ClusterError, OtherRankError, UntrainableBatchError,
    TeacherError,
)  # fmt: skip
"""What `Learner.train_batch` raises on all ranks alike."""

PublishState = Literal["publish", "wait", "done"]
"""What the weights need: to be sent to some replicas, a replica to be sent to, or nothing more."""


class BatchSource(ABC):
    """Source of rank 0's batches, and sink of the weights that come of them.

    A source overrides what applies to it: by itself it serves nobody.
    """

    @abstractmethod
    def poll_next_batch(self, step: int) -> BatchManifest | None:
        """The batch that leads to `step`; None when it is not there yet.

        Raises:
            ArealError: There will be none.
        """

    def mark_weights_unpublished(self) -> None:
        """A step was taken: the weights are new."""
        return  # a source may leave it out

    def announce_weights_or_wait(self) -> PublishState:
        """What the weights need before anything else is done with them."""
        return "done"

    def list_outdated_replicas_by_sender(self) -> ReplicasBySender:
        """The replicas that lack the weights, by sender."""
        return []

    def publish_weights(
        self,
        shares: ReplicasBySender,
        parameters: Iterable[tuple[str, torch.Tensor]],
        score_probe: Callable[[], Probe],
    ) -> None:
        """Send the weights to these replicas, rank 0's share of them itself."""
        return  # a source may leave it out

    def poll_due_evaluation_done(self) -> bool:
        """The weights have their reward, need none or get it while training goes on. Waits."""
        return True

    def get_update_pause_metrics(self) -> JsonMetricRow:
        """Cost of sending the weights to those who generate."""
        return {}

    def has_found_no_cell_too_long(self) -> bool:
        """There is nobody to work with, and has not been for long."""
        return False

    def wait_briefly_until_evaluated(self) -> bool:
        """Nothing is left to wait for after the last step. Waits a little."""
        return True

    def report_run_finished(self) -> None:
        """The run is complete."""
        return  # a source may leave it out

    def close(self) -> None:
        """Leave whoever was served."""
        return  # a source may leave it out


def run_loop(
    learner: Learner,
    coordinator: Coordinator | None,
    stop: StopRequest,
    senders: WeightSenders | None = None,
) -> bool:
    """Train until rank 0, the one with a coordinator, says stop; true when the run is complete.

    A stop asked of any rank is a stop of all. `senders` is a rank's part in sending weights where
    it has no coordinator, whose source has it.

    Raises:
        ArealError: Rank 0 cannot go on, or a batch cannot be trained on. A checkpoint that was
            being written has been finished first: what was trained is worth keeping.
    """
    while True:
        with _time_span_on_other_ranks(coordinator, "command_wait"):
            note_place_reached("the next command")
            with _time_span_on_first_rank(coordinator, "rank_wait"):
                is_stop_requested = is_true_on_any_rank(stop.requested)
            if is_stop_requested:
                stop.request()
            _publish_checkpoint_if_written(learner, coordinator, wait=False)
            note_place_reached("rank 0's decision")
            command, trouble = _broadcast_next_command(coordinator)
        if isinstance(command, StopCommand):
            _publish_checkpoint_if_written(learner, coordinator, wait=True)
            if trouble is not None:
                raise trouble
            return command.finished
        _execute_command(command, learner, coordinator, senders)


def _broadcast_next_command(
    coordinator: Coordinator | None,
) -> tuple[RankCommand, ArealError | None]:
    command, trouble = None, None
    if coordinator:
        try:
            command = coordinator.choose_next_command_and_wait_briefly()
        except SupersededTrainerError:
            raise  # a successor may already have taken over: nothing is ours to finish
        except ArealError as error:
            command, trouble = StopCommand(finished=False), error
    with _time_span_on_first_rank(coordinator, "rank_wait"):
        return broadcast_object(command, RankCommand), trouble


def _execute_command(
    command: RankCommand,
    learner: Learner,
    coordinator: Coordinator | None,
    senders: WeightSenders | None,
) -> None:
    match command:
        case TrainOnBatchCommand(manifest, quarantine):
            try:
                row = learner.train_batch(manifest, quarantine)
            except StopRequestedError:  # on all ranks: the next turn ends the loop
                return
            except _BATCH_ERRORS:
                _publish_checkpoint_if_written(learner, coordinator, wait=True)
                raise
            if coordinator:
                coordinator.on_trained(learner.version, row)
        case PublishWeightsCommand(shares):
            parameters = stream_hf_tensors(learner.policy)
            with _time_span_on_other_ranks(coordinator, "publish"):
                if coordinator:
                    coordinator.publish_weights(shares, parameters, learner.score_probe)
                elif senders:
                    senders.send(learner.version, shares, parameters, learner.score_probe())
        case SaveCheckpointCommand(row):
            note_place_reached(f"checkpoint of step {learner.version.step}")
            _publish_checkpoint_if_written(learner, coordinator, wait=True)  # an earlier one
            began = time.perf_counter()
            with _time_span_on_other_ranks(coordinator, "checkpoint"):
                learner.begin_checkpoint(row)
            if coordinator:
                coordinator.on_checkpoint_started(time.perf_counter() - began)
        case ExportModelCommand():
            note_place_reached(f"export of step {learner.version.step}")
            began = time.perf_counter()
            with _time_span_on_other_ranks(coordinator, "export"):
                learner.export_model()
            if coordinator:
                coordinator.on_exported(time.perf_counter() - began)


def _time_span_on_other_ranks(
    coordinator: Coordinator | None, span_name: str
) -> AbstractContextManager[object]:
    """Note the time of the block on a rank other than 0, which has its timer for that."""
    return nullcontext() if coordinator else time_span(span_name)


def _time_span_on_first_rank(
    coordinator: Coordinator | None, span_name: str
) -> AbstractContextManager[object]:
    """Note the time of the block on rank 0, whose other ranks have a span around it."""
    return time_span(span_name) if coordinator else nullcontext()


def _publish_checkpoint_if_written(
    learner: Learner, coordinator: Coordinator | None, *, wait: bool
) -> None:
    began = time.perf_counter()
    is_durable = (
        learner.checkpoints.finish_save()
        if wait
        else learner.checkpoints.publish_and_prune_if_written()
    )
    if is_durable and coordinator:
        coordinator.on_checkpoint_saved(time.perf_counter() - began)


class Coordinator:
    """Rank 0's decisions.

    `choose_next_command_and_wait_briefly` says what all ranks do; what came of it is told to the
    `on_` methods.

    `check_generation` is called before anything becomes visible to others; it raises when a newer
    start of the trainer owns the run. `read_quarantine` says of a step why its batch is not to be
    trained: it is asked each time that a batch is handed out. `must_end_unsaved` says at a stop
    whether what was trained since the last checkpoint is to be given up.
    """

    def __init__(
        self,
        schedule: Schedule,
        record: StepRecord,
        batch_source: BatchSource,
        stop: StopRequest,
        check_generation: Callable[[], None] = lambda: None,
        read_quarantine: Callable[[int], UntrainedBatchPart | None] = lambda step: None,
        must_end_unsaved: Callable[[], bool] = lambda: False,
    ) -> None:
        self._schedule = schedule
        self._record = record
        self.source = batch_source
        self._stop = stop
        self._check_generation = check_generation
        self._read_quarantine = read_quarantine
        self._must_end_unsaved = must_end_unsaved
        self._saved_step = record.version.step
        self._exported_step = -1

    def choose_next_command_and_wait_briefly(self) -> RankCommand:
        """What all ranks do now. Waits at most a few seconds.

        Raises:
            SupersededTrainerError: A newer trainer owns the run.
            AgentError: Agents do nothing but fail, so that no batch will form.
            ClusterError: The ledger stays away.
            ShardError: The manifest or the quarantine file of the next batch is gone or damaged.
            IdleError: No cell has been there for long. What was trained is saved.
        """
        is_idle = self.source.has_found_no_cell_too_long()
        if not self._stop.requested and not is_idle:
            try:
                return self._pick_next_command()
            except ClusterError:
                if not self._stop.wait(timeout_s=0.0):
                    raise
                # The ledger was told to stop as well.
        command = self._pick_save_or_stop_command()
        if is_idle and isinstance(command, StopCommand) and not self._stop.requested:
            raise IdleError("no cell has been there for long: the trainer gives its nodes back")
        return command

    def _pick_next_command(self) -> RankCommand:
        step = self._record.version.step
        match self.source.announce_weights_or_wait():
            case "publish":
                self._check_ownership()
                return PublishWeightsCommand(self.source.list_outdated_replicas_by_sender())
            case "wait":
                return WaitCommand()
        if self._schedule.saves_checkpoint(step) and self._saved_step < step:
            self._check_ownership()
            return SaveCheckpointCommand(self._record.row)
        if not self.source.poll_due_evaluation_done():
            return WaitCommand()
        if self._schedule.exports_model(step) and self._exported_step < step:
            self._check_ownership()
            return ExportModelCommand()
        self._record.write_row_once(self.source.get_update_pause_metrics())
        if step < self._schedule.total_steps:
            manifest = self.source.poll_next_batch(step + 1)
            if manifest is None:
                return WaitCommand()
            with self._record.time_files():
                return TrainOnBatchCommand(manifest, self._read_quarantine(manifest.step))
        return (
            StopCommand(finished=True)
            if self.source.wait_briefly_until_evaluated()
            else WaitCommand()
        )

    def _check_ownership(self) -> None:
        with self._record.time_files():
            self._check_generation()

    def _pick_save_or_stop_command(self) -> RankCommand:
        step = self._record.version.step
        if self._saved_step < step:
            if self._stop.requested and self._must_end_unsaved():
                return StopCommand(finished=False)
            self._check_ownership()
            return SaveCheckpointCommand(self._record.row)
        self._record.write_row_once(self.source.get_update_pause_metrics())
        return StopCommand(finished=self._schedule.is_finished_once_saved(step))

    def on_trained(self, version: WeightVersion, row: JsonMetricRow) -> None:
        self._record.open_row_of_trained_step(version, row)
        self.source.mark_weights_unpublished()

    def publish_weights(
        self,
        shares: ReplicasBySender,
        parameters: Iterable[tuple[str, torch.Tensor]],
        score_probe: Callable[[], Probe],
    ) -> None:
        self.source.publish_weights(shares, parameters, score_probe)

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
        self.source.close()
        self._record.metrics.close()
