"""Rank 0's calls to a run's ledger and replicas: batches, publishing, evaluation."""

import logging
import math
import time
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeVar

import msgspec
import torch

from areal_hpc.errors import AgentError, HttpStatusError, RecipeError, SupersededTrainerError
from areal_hpc.jobs.processes.process_setup import StopRequest
from areal_hpc.metrics.step_metrics import (
    BATCH_WAIT_PHASE,
    CELL_IDLE_S_METRIC,
    CELL_WAIT_PHASE,
    EpisodeFailureCounter,
    list_evaluated_sets,
)
from areal_hpc.metrics.writer import StepRecord, summarize_newest_weight_update_pause
from areal_hpc.rundir.jsonl import JsonMetricRow
from areal_hpc.rundir.rendezvous import EVALUATION_CELL
from areal_hpc.rundir.service_client import ServiceClient
from areal_hpc.rundir.telemetry.events import CELL_FOUND_EVENT, NO_CELL_EVENT, EventLog
from areal_hpc.trainer.config import Schedule
from areal_hpc.weights.publisher import (
    Publisher,
    ReplicasBySender,
    UpdateBackoff,
    WeightSenders,
    find_outdated_replicas,
)
from areal_hpc.weights.replicas import DiscoveredReplicas, ReplicaKey
from areal_hpc.weights.update import PROBE_GAP_KEY, Probe
from areal_hpc.wire.ledger import (
    Acknowledged,
    BatchManifest,
    BatchReply,
    BatchRequest,
    EvaluateReply,
    EvaluateRequest,
    FinishRunRequest,
    OpenTrainerGenerationRequest,
    WeightsPublishedRequest,
)
from areal_hpc.wire.retry import retry
from areal_hpc.wire.weight_version import WeightVersion

logger = logging.getLogger(__name__)

ReplyT = TypeVar("ReplyT")

LONG_POLL_S = 1.0
LEDGER_AWAY_TIMEOUT_S = 120.0
"""Time limit for an absent ledger; its supervisor restarts it within seconds."""
LEDGER_REPLY_TIMEOUT_S = 15.0
HTTP_CONFLICT = 409
REPLICA_POLL_S = 1.0
NO_REPLICA_PAUSE_S = 0.1
EVALUATION_WAIT_LOG_PERIOD_S = 600.0
NO_CELL_LOG_PERIOD_S = 60.0
MAX_REFUSED_PROOFS = 5
"""Refused probes in a row, from the first weights on, that end the run."""


class AsyncEvaluationTracker:
    """Choice of the weights that the evaluation cell evaluates while training continues. Pure.

    It evaluates one version at a time, which is always the trainer's present one, because no other
    exists: when an evaluation is due and the cell is free, or has lost the weights under
    evaluation. A `judged_step` of -1 means that none was evaluated.
    """

    def __init__(self, schedule: Schedule, judged_step: int) -> None:
        self._schedule = schedule
        self._judged_step = judged_step
        self.under_way: WeightVersion | None = None
        """Version whose episodes are running, or wait for its weights."""

    def has_unjudged_up_to(self, step: int) -> bool:
        due = self._schedule.list_evaluation_steps(self._judged_step, step)
        return self.under_way is not None or bool(due)

    def list_replicas_to_update_now(
        self, replicas: DiscoveredReplicas, current_version: WeightVersion
    ) -> list[ReplicaKey]:
        return (
            find_outdated_replicas(replicas, current_version)
            if self._choose_version_to_hold(replicas, current_version) == current_version
            else []
        )

    def may_grant_episodes(
        self, replicas: DiscoveredReplicas, current_version: WeightVersion
    ) -> bool:
        """Return whether all replicas would play the current version's episodes on that version."""
        if (
            self.under_way == current_version
            or self._choose_version_to_hold(replicas, current_version) != current_version
        ):
            return False
        served = _list_served_versions(replicas)
        return bool(served) and all(version in ("", str(current_version)) for version in served)

    def begin_evaluation(self, current_version: WeightVersion) -> list[int]:
        """Grant the current version's episodes from now on; return the steps that are skipped.

        These should have been evaluated, but their weights are gone.
        """
        due = self._schedule.list_evaluation_steps(self._judged_step, current_version.step)
        self.under_way = current_version
        return [step for step in due if step != current_version.step]

    def count_due_tasks_by_set(self) -> dict[str, int]:
        assert self.under_way is not None
        return self._schedule.count_tasks_by_set_due_since(self._judged_step, self.under_way.step)

    def mark_judged(self) -> None:
        assert self.under_way is not None
        self._judged_step, self.under_way = self.under_way.step, None

    def _choose_version_to_hold(
        self, replicas: DiscoveredReplicas, current_version: WeightVersion
    ) -> WeightVersion | None:
        served = _list_served_versions(replicas)
        if self.under_way is not None and (not served or str(self.under_way) in served):
            return self.under_way
        return (
            current_version
            if self._schedule.list_evaluation_steps(self._judged_step, current_version.step)
            else None
        )


def _list_served_versions(replicas: DiscoveredReplicas) -> list[str]:
    return [view.version for _, view in replicas if view.state in ("ready", "serving")]


class LiveRun:
    """Ledger and replicas of a run.

    Methods that call the ledger raise SupersededTrainerError when a newer generation has been
    opened, AgentError when all agents fail, and ClusterError when the ledger stays absent or a
    stop is requested while it is absent.
    """

    def __init__(
        self,
        schedule: Schedule,
        record: StepRecord,
        *,
        ledger: ServiceClient,
        publisher: Publisher,
        senders: WeightSenders,
        events: EventLog,
        stop: StopRequest,
        episode_failures: EpisodeFailureCounter,
        idle_timeout_s: float = math.inf,
        async_evaluation: AsyncEvaluationTracker | None = None,
    ) -> None:
        self._schedule = schedule
        self._record = record
        self._ledger = ledger
        self._publisher = publisher
        self._senders = senders
        self._events = events
        self._stop = stop
        self._episode_failures = episode_failures
        self._async_evaluation = async_evaluation
        self._idle_timeout_s = idle_timeout_s
        self._looked_at = self._missed_at = time.monotonic()
        """Time of the last search for replicas, and of the last log line that there are none."""
        self._missing_since: float | None = None
        """Time of the first search that found no replica; None if the last one found some."""
        self._is_cell_missing = False
        self._refused_proofs: int | None = 0
        """Refused probes in a row; None once a replica has proven any weights."""
        self._logged_at = float("-inf")
        self._backoff = UpdateBackoff()
        self._ticket_counts: JsonMetricRow = {}
        self._targets: list[ReplicaKey] = []
        """Replicas that receive the next publish."""
        self.mark_weights_unpublished()

    # Ledger ----------------------------------------------------------------------------------

    def open_generation(self) -> None:
        """Report to the ledger that this trainer continues after the record's step.

        A running evaluation of that step continues, unless an evaluation cell runs it.
        """
        step = self._record.version.step
        evaluated_step = -1 if self._async_evaluation else step
        request = OpenTrainerGenerationRequest(self._generation, step, evaluated_step)
        self._call_ledger("/open_generation", request, Acknowledged)

    def poll_next_batch(self, step: int) -> BatchManifest | None:
        """Return the ledger's batch for `step`; None until it has formed."""
        with self._record.timer.time_phase(BATCH_WAIT_PHASE):
            request = BatchRequest(self._generation, step, LONG_POLL_S)
            reply = self._call_ledger("/batch", request, BatchReply, LONG_POLL_S)
        check_agents(reply.trouble)
        if reply.manifest is not None:
            counts = msgspec.structs.asdict(reply.manifest.counts)
            self._ticket_counts = {f"tickets/{name}": count for name, count in counts.items()}
            self._ticket_counts[CELL_IDLE_S_METRIC] = round(reply.idle_cell_s, 3)
            failures = self._episode_failures.count_new_failed_tries()
            self._ticket_counts["episode/failures"] = failures.failed_tries
            self._ticket_counts["episode/rewarded_failures"] = failures.rewarded
        return reply.manifest

    def report_run_finished(self) -> None:
        self._call_ledger("/finish", FinishRunRequest(self._generation), Acknowledged)

    def _request_evaluation(
        self, step: int, n_tasks_by_set: dict[str, int], wait_s: float = 0.0
    ) -> dict[str, float] | None:
        request = EvaluateRequest(self._generation, step, n_tasks_by_set, wait_s)
        reply = self._call_ledger("/evaluate", request, EvaluateReply, wait_s)
        check_agents(reply.trouble)
        return reply.metrics

    @property
    def _generation(self) -> int:
        return self._record.version.generation

    def _call_ledger(
        self, route: str, request: msgspec.Struct, reply: type[ReplyT], wait_s: float = 0.0
    ) -> ReplyT:
        timeout_s = wait_s + LEDGER_REPLY_TIMEOUT_S
        try:
            return retry(
                lambda: self._ledger.call(route, request, reply, timeout_s=timeout_s),
                LEDGER_AWAY_TIMEOUT_S,
                is_stopping=lambda: self._stop.requested,
            )
        except HttpStatusError as error:
            if error.status == HTTP_CONFLICT:
                raise SupersededTrainerError(error.body) from error
            raise

    # Replicas --------------------------------------------------------------------------------

    def mark_weights_unpublished(self) -> None:
        """Note that a step was taken: neither replicas nor the ledger have the new weights."""
        self._record.row |= self._ticket_counts
        self._is_served = self._is_announced = False
        self._targets = []
        self._next_poll_at = 0.0

    def lacks_cells_too_long(self) -> bool:
        """Return whether cells have been absent for so long that the job should release its nodes.

        The last search decides: there is none during a step, however long it takes.
        """
        since = self._missing_since
        return since is not None and self._looked_at - since > self._idle_timeout_s

    def announce_weights(self) -> Literal["publish", "wait", "done"]:
        """Serve at least one replica, report to the ledger, then serve the evaluation cell.

        That cell gets its weights separately, so that it prolongs no other replica's pause.
        """
        if self._poll_replicas():
            return "publish"
        if not self._is_served:
            with self._record.timer.time_phase(CELL_WAIT_PHASE):
                self._stop.wait(NO_REPLICA_PAUSE_S)
            return "wait"
        version = self._record.version
        if not self._is_announced:
            request = WeightsPublishedRequest(self._generation, version.step)
            self._call_ledger("/publish", request, Acknowledged)
            self._is_announced = True
        if self._async_evaluation:
            outdated = self._async_evaluation.list_replicas_to_update_now(
                self._publisher.evaluation_replicas, version
            )
            is_last = version.step >= self._schedule.total_steps
            self._targets = self._backoff.filter_retryable(
                outdated, time.monotonic(), is_urgent=is_last
            )
        return "publish" if self._async_evaluation and self._targets else "done"

    def _poll_replicas(self) -> bool:
        if time.monotonic() < self._next_poll_at:
            return False
        with self._record.timer.time_phase("publish"):
            outdated = self._publisher.discover_outdated_training_replicas(self._record.version)
        now = self._looked_at = time.monotonic()
        self._note_absence_of_all_cells(now)
        self._targets = self._backoff.filter_retryable(outdated, now)
        if not self._targets and not self._is_served:
            self._targets = self._backoff.filter_retryable(outdated, now, is_urgent=True)
        self._next_poll_at = now + REPLICA_POLL_S
        if self._async_evaluation:
            self._advance_async_evaluation(self._async_evaluation)
        return bool(self._targets)

    def _note_absence_of_all_cells(self, now: float) -> None:
        if self._missing_since is None:
            self._missing_since = self._missed_at = now
        waited_s = now - self._missing_since
        if self._publisher.replica_count:
            if self._is_cell_missing:
                self._record_event(CELL_FOUND_EVENT, waited_s=round(waited_s, 1))
            self._missing_since, self._is_cell_missing = None, False
        elif now - self._missed_at > NO_CELL_LOG_PERIOD_S:
            self._missed_at = now
            if not self._is_cell_missing:
                self._record_event(NO_CELL_EVENT, waited_s=round(waited_s, 1))
            self._is_cell_missing = True
            logger.info("no cell found for %.0f s; waiting", waited_s)

    def list_targets_by_sender(self) -> ReplicasBySender:
        return self._senders.assign(self._targets)

    def publish_weights(
        self,
        shares: ReplicasBySender,
        parameters: Iterable[tuple[str, torch.Tensor]],
        score_probe: Callable[[], Probe],
    ) -> None:
        """Send the weights to the replicas that lack them. A collective."""
        version = self._record.version
        began_at = time.monotonic()
        with self._record.timer.time_phase("publish"):
            report = self._senders.send(version, shares, parameters, score_probe())
        now = time.monotonic()
        self._backoff.record_update(report.ok, report.failed, now, now - began_at)
        is_evaluation = any(key.cell == EVALUATION_CELL for key in self._targets)
        # From now, not from the last search: an update that keeps failing must leave time for the
        # rest of the loop. The evaluation cell is searched before the next step: after it, these
        # would not be the current weights.
        self._next_poll_at = now if is_evaluation else now + REPLICA_POLL_S
        if report.ok and not is_evaluation:
            if not self._is_served:  # later updates are for late replicas
                seconds = report.seconds.items()
                self._record.row |= {f"weights/{name}_s": took_s for name, took_s in seconds}
            self._is_served = True
        self._record_event(
            "weights_published",
            version=str(version),
            replicas=len(report.ok),
            failed=[str(key) for key in report.failed],
            reason=next((str(error) for error in report.failed.values()), ""),
            seconds=report.seconds,
        )
        for key, error in report.failed.items():
            logger.warning("%s did not receive version %s: %s", key, version, error)
        if report.ok:
            self._refused_proofs = None
        elif self._refused_proofs is not None:
            self._refuse_differing_engine([str(error) for error in report.failed.values()])

    def _refuse_differing_engine(self, errors: list[str]) -> None:
        """End the run if every replica has scored like another model from the first weights on."""
        assert self._refused_proofs is not None
        is_refused = bool(errors) and all(PROBE_GAP_KEY in error for error in errors)
        self._refused_proofs = self._refused_proofs + 1 if is_refused else 0
        if self._refused_proofs == MAX_REFUSED_PROOFS:
            raise RecipeError(
                f"SGLang computes another model than the trainer: {errors[0].splitlines()[0]}",
                key="model",
                hint="SGLang may not read all that config.json says; docs/models.md names models "
                "that were compared",
            )

    def _record_event(self, event_name: str, **facts: Any) -> None:
        with self._record.time_files():
            self._events.record(event_name, **facts)

    def get_update_pause_metrics(self) -> JsonMetricRow:
        return summarize_newest_weight_update_pause(self._publisher.pauses)

    # Evaluation ------------------------------------------------------------------------------

    def poll_due_evaluation_done(self) -> bool:
        """Return whether the weights need no reward, have it or get it from the evaluation cell."""
        step, row = self._record.version.step, self._record.row
        due = self._schedule.count_tasks_by_due_set(step)
        if self._async_evaluation or due.keys() <= list_evaluated_sets(row):
            return True
        with self._record.timer.time_phase("eval"):
            row |= self._request_evaluation(step, due, LONG_POLL_S) or {}
        return False

    def _advance_async_evaluation(self, evaluation: AsyncEvaluationTracker) -> None:
        version = self._record.version
        if evaluation.under_way is not None:
            self._take_reward(evaluation, evaluation.under_way)
        if not evaluation.may_grant_episodes(self._publisher.evaluation_replicas, version):
            return
        abandoned, skipped = evaluation.under_way, evaluation.begin_evaluation(version)
        self._record_event(
            "evaluation_begun",
            version=str(version),
            given_up=str(abandoned) if abandoned else None,
            left_out=skipped,
        )
        if abandoned:
            logger.warning("evaluation of %s abandoned: its weights are gone", abandoned)
        if skipped:
            logger.warning(
                "evaluating step %d; skipped steps %s (evaluation cell busy or missing)",
                version.step,
                ", ".join(map(str, skipped)),
            )
        self._take_reward(evaluation, version)

    def _take_reward(self, evaluation: AsyncEvaluationTracker, version: WeightVersion) -> None:
        metrics = self._request_evaluation(version.step, evaluation.count_due_tasks_by_set())
        if metrics is not None:
            evaluation.mark_judged()
            self._record.add_metrics(version.step, dict(metrics))

    def is_evaluation_cell_done(self) -> bool:
        """Return whether no evaluation is pending in its cell; if one is, wait briefly."""
        evaluation = self._async_evaluation
        if evaluation is None or not evaluation.has_unjudged_up_to(self._record.version.step):
            return True
        if time.monotonic() - self._logged_at > EVALUATION_WAIT_LOG_PERIOD_S:
            self._logged_at = time.monotonic()
            under_way = evaluation.under_way
            status = f"has {under_way} to judge" if under_way else "is not there"
            logger.info("training is complete; waiting for the evaluation cell, which %s", status)
        self._stop.wait(NO_REPLICA_PAUSE_S)
        return False

    def close(self) -> None:
        self._publisher.close()
        self._ledger.close()


def check_agents(agent_error: str) -> None:
    if agent_error:
        has_hint = "\n  try: " in agent_error
        raise AgentError(
            agent_error, hint="" if has_hint else "fix it, and run the same command again"
        )
