"""What rank 0 decides: when to publish, evaluate, commit and train.

For each version of the weights, in this order: replicas get it, the ledger hears of it, it is
evaluated if due, committed if due, its line of metrics is written, the next batch is awaited.
The next step is not trained before the evaluation is over: a replica that restarts meanwhile
can then still be given the weights under evaluation. With an evaluation cell it is: that cell keeps
the weights it judges, training goes on, and the reward gets a line of its own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

import msgspec
import torch

from areal_hpc.cluster.preemption import StopRequest
from areal_hpc.cluster.site import EVALUATION_CELL
from areal_hpc.errors import AgentError, ClusterError
from areal_hpc.telemetry import EVALUATION, EventLog, PhaseTimer
from areal_hpc.trainer.loop.async_evaluation import SideEvaluation
from areal_hpc.trainer.loop.commands import Command, Commit, Export, Idle, Publish, Stop, Train
from areal_hpc.trainer.loop.ledger_client import LedgerPeer
from areal_hpc.trainer.loop.schedule import Schedule
from areal_hpc.trainer.metrics import Line, MetricsLog, describe_stalls
from areal_hpc.weights.backoff import Backoff
from areal_hpc.weights.plan import TensorSpec
from areal_hpc.weights.publisher import Publisher
from areal_hpc.weights.report import ReplicaKey, UpdateReport
from areal_hpc.weights.version import WeightVersion

logger = logging.getLogger(__name__)

LONG_POLL_S = 1.0
REPLICA_POLL_S = 1.0
NO_REPLICA_PAUSE_S = 0.1
SAID_AGAIN_S = 600.0


class Conductor:
    """Rank 0's view of the run: `next` says what all ranks do, the other methods what came of it.

    Args:
        schedule: Which steps get what.
        version: The weights at the start.
        line: What is known already of that step's metrics.
        ledger: Batches and evaluations.
        publisher: Replicas.
        specs: What a publish sends.
        metrics: Where finished lines go.
        events: Where updates are noted.
        stop: Ends the run early.
        fence: Called before anything becomes visible to others; raises when a newer start of the
            trainer owns the run.
        beside: What the evaluation cell is to judge, if the run has one.
    """

    def __init__(
        self,
        schedule: Schedule,
        version: WeightVersion,
        line: Line,
        *,
        ledger: LedgerPeer,
        publisher: Publisher,
        specs: list[TensorSpec],
        metrics: MetricsLog,
        events: EventLog,
        stop: StopRequest,
        fence: Callable[[], None],
        beside: SideEvaluation | None = None,
    ) -> None:
        self._schedule = schedule
        self._version = version
        self._ledger = ledger
        self._publisher = publisher
        self._specs = specs
        self._metrics = metrics
        self._events = events
        self._stop = stop
        self._fence = fence
        self._beside = beside
        self._said_at = float("-inf")
        self._backoff = Backoff()
        self._committed_step = version.step
        self._exported_step = -1
        self._ticket_counts: Line = {}
        self._open_version(line)
        self._begin_step()

    def _open_version(self, line: Line) -> None:
        self._line = line
        self._is_served = self._is_announced = False
        self._is_line_open = True
        self._replicas: list[ReplicaKey] = []
        self._next_poll_at = 0.0

    def _begin_step(self) -> None:
        self._timer = PhaseTimer()
        self._began_at = time.monotonic()

    # Deciding --------------------------------------------------------------------------------

    def next(self) -> Command:
        """What all ranks do now. Waits at most a few seconds.

        Raises:
            SupersededError: A newer trainer owns the run.
            AgentError: Agents do nothing but fail, so that no batch will form.
            ClusterError: The ledger stays away.
        """
        if self._stop.requested:
            return self._wind_up()
        try:
            return self._decide()
        except ClusterError:
            if not self._stop.wait(timeout_s=0.0):
                raise
            return self._wind_up()  # the ledger was told to stop as well

    def _decide(self) -> Command:
        step = self._version.step
        if self._find_outdated():
            return Publish()
        if not self._is_served:
            self._stop.wait(NO_REPLICA_PAUSE_S)
            return Idle()
        if not self._is_announced:
            self._ledger.publish(step)
            self._is_announced = True
        if self._beside is not None and self._find_receivers(self._beside):
            return Publish()
        if self._schedule.commits(step) and self._committed_step < step:
            self._fence()
            return Commit(self._line)
        if self._beside is None and self._schedule.evaluates(step) and EVALUATION not in self._line:
            return self._await_evaluation()
        if self._schedule.exports(step) and self._exported_step < step:
            self._fence()
            return Export()
        self._close_line()
        if step < self._schedule.total_steps:
            return self._await_batch()
        if self._beside is not None and self._beside.is_owed(step):
            return self._await_beside(self._beside)
        return Stop(finished=True)

    def _wind_up(self) -> Command:
        if self._committed_step < self._version.step:
            self._fence()
            return Commit(self._line)
        self._close_line()
        return Stop(finished=False)

    def _find_outdated(self) -> bool:
        """Replicas lack the current weights. Looked up after a step, then every second."""
        if time.monotonic() < self._next_poll_at:
            return False
        with self._timer.phase("publish"):
            outdated = self._publisher.outdated(self._version)
        now = time.monotonic()
        self._replicas = self._backoff.due(outdated, now)
        if not self._replicas and not self._is_served:
            self._replicas = self._backoff.due(outdated, now, is_urgent=True)
        self._next_poll_at = now + REPLICA_POLL_S
        if self._beside is not None:
            self._follow_beside(self._beside)
        return bool(self._replicas)

    def _find_receivers(self, beside: SideEvaluation) -> bool:
        """The evaluation cell lacks the weights that it shall judge: as of the last look.

        It gets them apart from the others, so that no cell of training is paused for longer.
        """
        lacking = beside.receivers(self._publisher.evaluation_replicas, self._version)
        is_last = self._version.step >= self._schedule.total_steps
        self._replicas = self._backoff.due(lacking, time.monotonic(), is_urgent=is_last)
        return bool(self._replicas)

    def _follow_beside(self, beside: SideEvaluation) -> None:
        """Note the reward of what was under way, and begin what the cell is ready for."""
        if beside.under_way is not None:
            self._ask_beside(beside, beside.under_way)
        if not beside.may_begin(self._publisher.evaluation_replicas, self._version):
            return
        given_up, left_out = beside.under_way, beside.begin(self._version)
        self._events.record(
            "evaluation_begun",
            version=str(self._version),
            given_up=str(given_up) if given_up else None,
            left_out=left_out,
        )
        if given_up:
            logger.warning("the evaluation of %s is given up: its weights are lost", given_up)
        if left_out:
            logger.warning(
                "step %d is evaluated in the place of %s: the evaluation cell was busy or away",
                self._version.step,
                ", ".join(map(str, left_out)),
            )
        self._ask_beside(beside, self._version)

    def _ask_beside(self, beside: SideEvaluation, version: WeightVersion) -> None:
        """Have the ledger play a version's held-out tasks, and take the reward if it is there."""
        reply = self._ledger.evaluate(version.step, self._schedule.evaluation_tasks, 0.0)
        if reply.mean_reward is None:
            return
        beside.end()
        reward: Line = {EVALUATION: reply.mean_reward}
        if self._is_line_open and version.step == self._version.step:
            self._line |= reward
        else:
            self._metrics.write(version.step, reward)

    def _await_beside(self, beside: SideEvaluation) -> Command:
        """All is trained and told; what is left is the evaluation cell's."""
        if time.monotonic() - self._said_at > SAID_AGAIN_S:
            self._said_at = time.monotonic()
            what = f"has {beside.under_way} to judge" if beside.under_way else "is not there"
            logger.info("all steps are trained; the evaluation cell is waited for: it %s", what)
        self._stop.wait(NO_REPLICA_PAUSE_S)
        return Idle()

    def _await_evaluation(self) -> Command:
        tasks = self._schedule.evaluation_tasks
        with self._timer.phase("eval"):
            reply = self._ledger.evaluate(self._version.step, tasks, LONG_POLL_S)
        if reply.mean_reward is not None:
            self._line[EVALUATION] = reply.mean_reward
        return Idle()

    def _await_batch(self) -> Command:
        with self._timer.phase("wait"):
            reply = self._ledger.batch(self._version.step + 1, LONG_POLL_S)
        if reply.manifest is not None:
            counts = msgspec.structs.asdict(reply.manifest.counts)
            self._ticket_counts = {f"tickets/{name}": count for name, count in counts.items()}
            return Train(reply.manifest)
        if reply.trouble:
            raise AgentError(
                reply.trouble, hint="read the logs of ledger and drivers in logs/latest"
            )
        return Idle()

    def _close_line(self) -> None:
        if not self._is_line_open:
            return
        seconds = round(time.monotonic() - self._began_at, 4)
        # A line reopened by a resume keeps the times of its first writing.
        known: Line = {"version": str(self._version), **self._timer.metrics()}
        known |= describe_stalls(self._publisher.stalls)
        self._metrics.write(self._version.step, known | {"time/step_s": seconds} | self._line)
        self._is_line_open = False
        self._begin_step()

    # What came of it -------------------------------------------------------------------------

    def trained(self, version: WeightVersion, report: Line) -> None:
        """A step was taken; `report` is what is known of its metrics."""
        self._version = version
        self._open_version(report | self._ticket_counts)

    def publish(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Send the weights to the replicas that lack them."""
        self._fence()
        began_at = time.monotonic()
        with self._timer.phase("publish"):
            report = self._publisher.publish(self._version, self._specs, parameters, self._replicas)
        now = time.monotonic()
        self._backoff.note(report.ok, report.failed, now, now - began_at)
        is_beside = any(key.cell == EVALUATION_CELL for key in self._replicas)
        # From now, not from the look that found them: an update that keeps failing must leave
        # room for the rest of the loop. The evaluation cell is looked at before a step is taken:
        # after it, these would not be the current weights.
        self._next_poll_at = now if is_beside else now + REPLICA_POLL_S
        if not is_beside:
            self._note_served(report)
        self._events.record(
            "published",
            version=str(self._version),
            replicas=len(report.ok),
            failed=[str(key) for key in report.failed],
            seconds=report.seconds,
        )
        for key, error in report.failed.items():
            logger.warning("%s did not get version %s: %s", key, self._version, error)

    def _note_served(self, report: UpdateReport) -> None:
        if report.ok and not self._is_served:  # later ones are for replicas that came late
            self._line |= {f"weights/{name}_s": took_s for name, took_s in report.seconds.items()}
        self._is_served = self._is_served or bool(report.ok)

    def commit_begun(self, seconds: float) -> None:
        """The current step is copied, and will be durable soon. Its line waits for that."""
        self._committed_step = self._version.step
        self._metrics.hold()
        self._add_commit_time(seconds)

    def committed(self, seconds: float) -> None:
        """The commit in the writing is durable."""
        self._metrics.release()
        self._add_commit_time(seconds)

    def _add_commit_time(self, seconds: float) -> None:
        """Count the time for which a commit kept the ranks from training."""
        self._timer.seconds["commit"] = self._timer.seconds.get("commit", 0.0) + seconds

    def finish(self) -> None:
        """Tell the ledger that the run is complete."""
        self._ledger.finish()

    def close(self) -> None:
        """Leave the replicas and the files."""
        self._publisher.close()
        self._ledger.close()
        self._metrics.close()

    def exported(self) -> None:
        """The current step has been written as a Hugging Face model."""
        self._exported_step = self._version.step
