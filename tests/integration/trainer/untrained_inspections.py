"""What ranks find out for `test_untrained`, each in its process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from areal_hpc.recipe.sections.trainer import ParallelConfig
from areal_hpc.rundir.manifests import list_manifest_steps, read_manifest
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.trainer.step import train_step
from tests.support.layout_worker import LR, Case, make_rows, weighted_loss
from tests.support.replay_worker import Scenario, digests, make_learner


def each_step(scenario: Scenario, paths: RunPaths) -> dict[str, Any]:
    """Train on every batch; what is held before the first and after each one."""
    learner = make_learner(scenario, paths)
    held = [digests(learner.policy, learner._optimizer)]
    lines = []
    for step in list_manifest_steps(paths):
        lines.append(learner.train(read_manifest(paths, step)))
        held.append(digests(learner.policy, learner._optimizer))
    parts = learner._optimizer.chained_optimizers
    return {
        "held": held,
        "lines": lines,
        "consumed": learner.state.consumed,
        "untrained": [[one.step, one.tickets, one.reason] for one in learner.state.untrained],
        "adam_steps": sorted(
            {float(state["step"]) for part in parts for state in part.optimizer.state.values()}
        ),
    }


def gradients_of_no_use(scenario: Scenario, paths: RunPaths) -> dict[str, Any]:
    """A step, two whose gradient is zero or not a number, and another; or without the two."""
    parallel = ParallelConfig(**scenario["trainer"]["parallel"])
    found: dict[str, Any] = {}
    for family in scenario["families"]:
        case, twin = (Case(family, parallel, Path(paths.root)) for _ in range(2))
        for one in (case, twin):
            one.step(one.policy, one.optimizer, 2)
        before, norms = digests(case.policy, case.optimizer), []
        for advantage in (0.0, float("nan")):
            rows = make_rows(3)
            for row in rows if advantage == 0 else rows[:1]:
                row.channels["advantage"].fill(advantage)
            batches = case.batches(case.policy, rows)
            _, norm = train_step(case.policy, case.optimizer, batches, weighted_loss, LR)
            norms.append(str(norm))
        unchanged = digests(case.policy, case.optimizer) == before
        for one in (case, twin):
            one.step(one.policy, one.optimizer, 4)
        after = digests(case.policy, case.optimizer)
        found[family] = {
            "norms": norms,
            "unchanged": unchanged,
            "next_step_changes": after != before,
            "left_no_trace": after == digests(twin.policy, twin.optimizer),
        }
    return found
