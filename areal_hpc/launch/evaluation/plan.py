"""Jobs of an evaluation without a trainer: one, with a ledger that asks itself. Pure."""

from collections.abc import Collection

from msgspec.structs import replace

from areal_hpc.evaluation.ticket_numbers import STEP_OF_LOADED_WEIGHTS
from areal_hpc.launch.plan import (
    MAX_CONSECUTIVE_SERVICE_RESTARTS,
    JobStage,
    PlanInputs,
    build_ledger_evaluation_sets,
    plan_cell_job,
)
from areal_hpc.launch.prepared_run import StagePlanner
from areal_hpc.ledger.config import LedgerJobConfig
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.rendezvous import EVALUATION_CELL, LEDGER_SERVICE
from areal_hpc.wire.weight_version import WeightVersion

LOADED_VERSION = str(WeightVersion(0, STEP_OF_LOADED_WEIGHTS))
"""Version of the weights that replicas load: of no generation, as no trainer made them here."""


def build_evaluation_planner(set_names: Collection[str]) -> StagePlanner:
    def plan(
        recipe: Recipe, paths: RunPaths, plan_inputs: PlanInputs | None
    ) -> tuple[JobStage, ...]:
        known = plan_inputs or PlanInputs(1, {}, "python", ())
        return (plan_evaluation(recipe, paths, known, set_names),)

    return plan


def plan_evaluation(
    recipe: Recipe, paths: RunPaths, plan_inputs: PlanInputs, set_names: Collection[str]
) -> JobStage:
    """The job `evaluation`: a cell that serves what it loads, and the ledger on its first task."""
    sets = [
        one
        for one in recipe.evaluation_sets
        if one.name in set_names and plan_inputs.tasks_by_evaluation_set.get(one.name)
    ]
    ledger = LedgerJobConfig(
        run_dir=paths.root,
        batch_size=1,
        episodes_per_ticket=recipe.rollout.episodes_per_ticket,
        max_head_offpolicyness=0,
        max_concurrent_rollouts=recipe.rollout.max_concurrent_rollouts,
        seed=recipe.seed,
        n_train_tasks=1,
        evaluation_sets=build_ledger_evaluation_sets(sets, plan_inputs),
        evaluates={
            one.name: min(one.tasks, plan_inputs.tasks_by_evaluation_set[one.name]) for one in sets
        },
        total_steps=1,
    ).build_process_spec(LEDGER_SERVICE, tasks="first", restarts=MAX_CONSECUTIVE_SERVICE_RESTARTS)
    job = plan_cell_job(recipe, paths, plan_inputs, EVALUATION_CELL, ("valid",), LOADED_VERSION)
    # The agents' Python: there is no trainer, and its environment need not be there.
    processes = [replace(ledger, role="agents"), *job.processes]
    return JobStage(
        EVALUATION_CELL,
        replace(job, processes=processes),
        (),
        paths.finished_marker,
        paths.evaluated_tickets(STEP_OF_LOADED_WEIGHTS),
    )
