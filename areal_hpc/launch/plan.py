"""Plan of a run's jobs. Pure: the same recipe and facts always give the same plan.

Every process reads the run's recipe. The facts that only the launcher knows are fields of the
`config` module of the process's package, which imports neither torch nor SGLang: the launcher may
run where neither is installed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from areal_hpc.errors import RecipeError
from areal_hpc.inference.config import WORKER_NODE_ENTRY, InferenceJobConfig
from areal_hpc.ledger.config import LedgerJobConfig
from areal_hpc.proxy.config import ProxyJobConfig
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.rollout.config import RolloutJobConfig
from areal_hpc.rundir.jobs import JobSpec, ProcessSpec
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.rendezvous import (
    EVALUATION_CELL,
    LEDGER_SERVICE,
    format_cell_name,
)
from areal_hpc.trainer.config import SftJobConfig, TrainerJobConfig
from areal_hpc.wire.ledger import TaskSplit

MAX_CONSECUTIVE_SERVICE_RESTARTS = 20
"""Restarts of a service process (ledger, proxy, driver, inference) before its job gives up."""
MAX_CONSECUTIVE_RANK_RESTARTS = 2
"""Maximum consecutive deaths of a rank without progress after each of which the job restarts all
ranks. One more death ends the job."""


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """Facts about the machine and the run that a plan depends on."""

    train_tasks: int
    tasks_by_evaluation_set: Mapping[str, int]
    """Number of held-out tasks; empty if no task set is read."""
    serve_python: str
    sys_path: tuple[str, ...]
    """Folders from which the agent is imported."""
    tasks_of_sources: tuple[int, ...] = ()
    """Training tasks of each source, if there are several."""


@dataclass(frozen=True, slots=True)
class JobStage:
    """Jobs that run together. The stage ends when its leading job ends."""

    name: str
    leader: JobSpec
    others: tuple[JobSpec, ...]
    done_marker: Path
    """File that exists when the stage is complete; such a stage is skipped."""
    progress: Path | None = None
    """File that grows as the stage proceeds; None: the metrics of steps."""

    @property
    def jobs(self) -> tuple[JobSpec, ...]:
        return (self.leader, *self.others)


StagePlanner = Callable[[Recipe, RunPaths, PlanInputs | None], tuple[JobStage, ...]]
"""Planner of a recipe's jobs; without facts it plans only their shape."""


def plan_run(
    recipe: Recipe, paths: RunPaths, plan_inputs: PlanInputs | None = None
) -> tuple[JobStage, ...]:
    """Plan every job of a run, stage by stage.

    Without facts, before task sets are read, jobs have their shape but not their configuration.

    Raises:
        RecipeError: The recipe has neither training tasks nor demonstrations.
    """
    stages = (_plan_sft_stage(recipe, paths),) if recipe.sft else ()
    if recipe.train_dataset is None:
        if not stages:
            raise RecipeError(
                "the recipe has neither training tasks nor demonstrations: nothing is trained",
                key="train_dataset",
                hint="add a train_dataset, or a section sft for supervised fine-tuning alone",
            )
        return stages
    plan_inputs = plan_inputs or PlanInputs(1, {}, "python", (), (1,) * len(recipe.train_mixture))
    reinforcement = JobStage(
        name="train",
        leader=_plan_trainer_job(recipe, paths, plan_inputs),
        others=_plan_cell_jobs(recipe, paths, plan_inputs),
        done_marker=paths.finished_marker,
    )
    return (*stages, reinforcement)


def _plan_sft_stage(recipe: Recipe, paths: RunPaths) -> JobStage:
    assert recipe.sft is not None
    process = SftJobConfig(
        run_dir=paths.root,
        model_path=get_base_model_path(recipe, paths),
        dataset_path=paths.demonstrations("sft.dataset"),
        evaluation_path=paths.demonstrations("sft.evaluation.dataset")
        if recipe.sft.evaluation
        else None,
    ).build_process_spec("sft", ends_job=True, uses_gpus=True)
    is_alone = recipe.train_dataset is None
    return JobStage(
        "sft",
        build_rank_job("sft", recipe, [process]),
        (),
        paths.finished_marker if is_alone else paths.sft_export,
        paths.sft_metrics,
    )


def get_base_model_path(recipe: Recipe, paths: RunPaths) -> Path:
    return recipe.model.path.resolve() if recipe.model.path else paths.starting_model_dir


def get_initial_policy_path(recipe: Recipe, paths: RunPaths) -> Path:
    return paths.sft_export if recipe.sft else get_base_model_path(recipe, paths)


def build_rank_job(job_name: str, recipe: Recipe, processes: list[ProcessSpec]) -> JobSpec:
    """Build a job with a task per trainer rank, and a GPU per task unless it computes on the CPU.

    `trainer.device=auto` counts as a GPU: the planner does not see the nodes.
    """
    return JobSpec(
        job_name,
        "train",
        processes,
        tasks=recipe.trainer.parallel.world_size,
        gpus_per_task=0 if recipe.trainer.device == "cpu" else 1,
    )


def _plan_trainer_job(recipe: Recipe, paths: RunPaths, plan_inputs: PlanInputs) -> JobSpec:
    task_counts = {
        evaluation_set.name: count
        for evaluation_set in recipe.evaluation_sets
        if (count := plan_inputs.tasks_by_evaluation_set.get(evaluation_set.name))
    }
    ledger = LedgerJobConfig(
        run_dir=paths.root,
        n_train_tasks=plan_inputs.train_tasks,
        tasks_of_sources=plan_inputs.tasks_of_sources,
        tasks_by_evaluation_set=task_counts,
        sys_path=plan_inputs.sys_path if recipe.rollout.curriculum else (),
    )
    trainer = TrainerJobConfig(
        run_dir=paths.root,
        model_path=get_initial_policy_path(recipe, paths),
        tasks_by_evaluation_set=task_counts,
        sys_path=plan_inputs.sys_path if recipe.trainer.objective.custom else (),
    )
    return build_rank_job(
        "trainer",
        recipe,
        [
            ledger.build_process_spec(
                LEDGER_SERVICE, tasks="first", restarts=MAX_CONSECUTIVE_SERVICE_RESTARTS
            ),
            trainer.build_process_spec(
                "trainer",
                restarts=MAX_CONSECUTIVE_RANK_RESTARTS,
                ends_job=True,
                uses_gpus=True,
                is_forked=True,
                is_rank=True,
                progress=str(paths.metrics),
            ),
        ],
    )


def _plan_cell_jobs(
    recipe: Recipe, paths: RunPaths, plan_inputs: PlanInputs
) -> tuple[JobSpec, ...]:
    is_apart = recipe.evaluation.separate_cell
    splits: tuple[TaskSplit, ...] = ("train",) if is_apart else ("train", "valid")
    names = map(format_cell_name, range(recipe.inference.cells))
    jobs = [plan_cell_job(recipe, paths, plan_inputs, name, splits) for name in names]
    if is_apart:
        jobs.append(plan_cell_job(recipe, paths, plan_inputs, EVALUATION_CELL, ("valid",)))
    return tuple(jobs)


def plan_cell_job(
    recipe: Recipe,
    paths: RunPaths,
    plan_inputs: PlanInputs,
    cell_name: str,
    splits: tuple[TaskSplit, ...],
    loaded_version: str = "",
) -> JobSpec:
    """Plan the job of a cell. Its servers wait for a trainer's weights.

    With a `loaded_version` they serve the weights that they load, under that version.
    """
    inference = recipe.inference
    model = get_initial_policy_path(recipe, paths)
    server = InferenceJobConfig(
        run_dir=paths.root,
        cell=cell_name,
        model_path=model,
        loaded_version=loaded_version,
        serve_python=plan_inputs.serve_python,
    ).build_process_spec(
        "inference", tasks="first", restarts=MAX_CONSECUTIVE_SERVICE_RESTARTS, uses_gpus=True
    )
    follower = replace(server, name="follower", entry=WORKER_NODE_ENTRY, tasks="others")
    proxy = ProxyJobConfig(
        run_dir=paths.root,
        cell=cell_name,
        model_path=model,
        serve_python=plan_inputs.serve_python,
    ).build_process_spec("proxy", tasks="first", restarts=MAX_CONSECUTIVE_SERVICE_RESTARTS)
    driver = RolloutJobConfig(
        run_dir=paths.root,
        cell=cell_name,
        splits=splits,
        sys_path=plan_inputs.sys_path,
    ).build_process_spec(
        "driver", tasks="first", restarts=MAX_CONSECUTIVE_SERVICE_RESTARTS, ends_job=True
    )
    nodes = inference.nodes_per_replica
    gpus = inference.replicas_per_cell * inference.tp // nodes
    return JobSpec(
        cell_name,
        "agents",
        [server, *([follower] if nodes > 1 else []), proxy, driver],
        tasks=nodes,
        is_task_a_node=True,
        gpus_per_task=0 if recipe.trainer.device == "cpu" else gpus,
    )
