"""Which weights the evaluation cell judges, and when, while training goes on. Pure.

One version at a time, and always the trainer's present one, because it has no other: when an
evaluation is due and the cell is free, or has lost the weights that it was judging.
"""

from areal_hpc.trainer.loop.schedule import Schedule
from areal_hpc.weights.discovery import DiscoveredReplicas, ReplicaKey
from areal_hpc.weights.publisher import find_outdated_replicas
from areal_hpc.wire.weight_version import WeightVersion


class AsyncEvaluationTracker:
    """Evaluations under way, and those still due. -1 as the newest judged step: none was."""

    def __init__(self, schedule: Schedule, judged_step: int) -> None:
        self._schedule = schedule
        self._judged_step = judged_step
        self.under_way: WeightVersion | None = None
        """The version whose episodes are being played, or wait for its weights."""

    def has_unjudged_up_to(self, step: int) -> bool:
        due = self._schedule.list_evaluation_steps(self._judged_step, step)
        return self.under_way is not None or bool(due)

    def list_replicas_to_update_now(
        self, replicas: DiscoveredReplicas, current_version: WeightVersion
    ) -> list[ReplicaKey]:
        """Those of the cell's replicas that are to be given the current weights now."""
        return (
            find_outdated_replicas(replicas, current_version)
            if self._choose_version_to_hold(replicas, current_version) == current_version
            else []
        )

    def may_grant_episodes(
        self, replicas: DiscoveredReplicas, current_version: WeightVersion
    ) -> bool:
        """The current version's episodes can be granted: no replica would play them on another."""
        if (
            self.under_way == current_version
            or self._choose_version_to_hold(replicas, current_version) != current_version
        ):
            return False
        held = _list_served_versions(replicas)
        return bool(held) and all(version in ("", str(current_version)) for version in held)

    def begin_and_list_skipped_steps(self, current_version: WeightVersion) -> list[int]:
        """Grant the current version's episodes from now on; the steps that are left out for good.

        Those should have been judged, and never will be, as their weights are gone.
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
        held = _list_served_versions(replicas)
        if self.under_way is not None and (not held or str(self.under_way) in held):
            return self.under_way
        return (
            current_version
            if self._schedule.list_evaluation_steps(self._judged_step, current_version.step)
            else None
        )


def _list_served_versions(replicas: DiscoveredReplicas) -> list[str]:
    return [view.version for _, view in replicas if view.state in ("ready", "serving")]
