"""Recipe -> jobs. Pure: the same recipe and facts always give the same plan.

Every process gets a configuration that it declares in its package's `config`, which imports
neither torch nor SGLang: a plan is made where neither is installed.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from areal_hpc.inference.config import WORKER_NODE_ENTRY, InferenceJobConfig
from areal_hpc.ledger.config import LedgerEvaluationSet, LedgerJobConfig
from areal_hpc.ledger.tasks.task_stream import TaskSource
from areal_hpc.proxy.config import ProxyJobConfig, ProxyLimits
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.recipe.sections.evaluation import EvaluationSet, resolve_keep_best
from areal_hpc.rollout.config import DriverEvaluationSet, RolloutJobConfig
from areal_hpc.rundir.jobs import JobSpec, ProcessSpec
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.rendezvous import (
    EVALUATION_CELL,
    LEDGER_SERVICE,
    format_cell_name,
)
from areal_hpc.trainer.config import SftJobConfig, TrainerJobConfig
from areal_hpc.trainer.loop.schedule import EvaluationSetSchedule
from areal_hpc.wire.ledger import TaskSplit

MAX_CONSECUTIVE_SERVICE_RESTARTS = 20
"""Restarts of a service process (ledger, proxy, driver, inference) before its job gives up."""
MAX_CONSECUTIVE_RANK_RESTARTS = 2
"""Deaths of a rank in a row without progress that are answered within the job: all ranks start
again. After one more the job ends."""


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """Facts about the machine and the run that a plan depends on."""

    train_tasks: int
    tasks_by_evaluation_set: Mapping[str, int]
    """Held-out tasks that there are; empty where no task set is read."""
    serve_python: str
    sys_path: tuple[str, ...]
    """Folders from which the agent is imported."""
    tasks_of_sources: tuple[int, ...] = ()
    """Training tasks of each source, if there are several."""


@dataclass(frozen=True, slots=True)
class JobStage:
    """Jobs that run together. The stage ends when its leader does."""

    name: str
    leader: JobSpec
    others: tuple[JobSpec, ...]
    done_marker: Path
    """Exists when the stage is complete; such a stage is skipped."""
    progress: Path | None = None
    """A file that grows as the stage gets further; None: the metrics of steps."""

    @property
    def jobs(self) -> tuple[JobSpec, ...]:
        return (self.leader, *self.others)


def plan_run(
    recipe: Recipe, paths: RunPaths, plan_inputs: PlanInputs | None = None
) -> tuple[JobStage, ...]:
    """Decide every job of a run, stage after stage.

    Without facts, while no task set is read, jobs have their shape, not their configuration.
    """
    plan_inputs = plan_inputs or PlanInputs(
        1, {}, "python", (), (1,) * len(recipe.train_dataset.sources)
    )
    reinforcement = JobStage(
        name="train",
        leader=_plan_trainer_job(recipe, paths, plan_inputs),
        others=_plan_cell_jobs(recipe, paths, plan_inputs),
        done_marker=paths.finished_marker,
    )
    if recipe.sft is None:
        return (reinforcement,)
    process = SftJobConfig(
        run_dir=paths.root,
        model_path=get_base_model_path(recipe, paths),
        dataset_path=paths.dataset("sft"),
        seed=recipe.seed,
        sft=recipe.sft,  # a SftConfig: its data set is written already
        trainer=recipe.trainer,
    ).build_process_spec("sft", ends_job=True, uses_gpus=True)
    sft = build_job_with_task_per_rank("sft", recipe, [process])
    return (JobStage("sft", sft, (), paths.sft_export, paths.sft_metrics), reinforcement)


def get_base_model_path(recipe: Recipe, paths: RunPaths) -> Path:
    return recipe.model.path.resolve() if recipe.model.path else paths.starting_model_dir


def get_initial_policy_path(recipe: Recipe, paths: RunPaths) -> Path:
    return paths.sft_export if recipe.sft else get_base_model_path(recipe, paths)


def build_job_with_task_per_rank(
    job_name: str, recipe: Recipe, processes: list[ProcessSpec]
) -> JobSpec:
    """A job with a task per rank of the trainer, and a GPU per task unless it computes on the CPU.

    `trainer.device=auto` means a GPU: who plans does not see the nodes.
    """
    return JobSpec(
        job_name,
        "train",
        processes,
        tasks=recipe.trainer.parallel.world_size,
        gpus_per_task=0 if recipe.trainer.device == "cpu" else 1,
    )


def _plan_trainer_job(recipe: Recipe, paths: RunPaths, plan_inputs: PlanInputs) -> JobSpec:
    rollout, evaluation = recipe.rollout, recipe.evaluation
    sets = [
        one for one in recipe.evaluation_sets if plan_inputs.tasks_by_evaluation_set.get(one.name)
    ]
    sources = zip(plan_inputs.tasks_of_sources, recipe.train_dataset.sources, strict=True)
    ledger = LedgerJobConfig(
        run_dir=paths.root,
        batch_size=recipe.trainer.batch_size,
        episodes_per_ticket=rollout.episodes_per_ticket,
        max_head_offpolicyness=rollout.max_head_offpolicyness,
        stale_groups=rollout.stale_groups,
        max_concurrent_rollouts=rollout.max_concurrent_rollouts,
        seed=recipe.seed,
        n_train_tasks=plan_inputs.train_tasks,
        task_sources=tuple(TaskSource(n_tasks, source.weight) for n_tasks, source in sources),
        evaluation_sets=build_ledger_evaluation_sets(sets, plan_inputs),
        total_steps=recipe.trainer.total_steps,
        curriculum=rollout.curriculum,
        sys_path=plan_inputs.sys_path if rollout.curriculum else (),
    )
    trainer = TrainerJobConfig(
        run_dir=paths.root,
        model_path=get_initial_policy_path(recipe, paths),
        seed=recipe.seed,
        trainer=recipe.trainer.resolve_paths(),
        weights=recipe.weights,
        cells=recipe.inference.cells,
        evaluations={
            one.name: EvaluationSetSchedule(
                one.every_steps, min(one.tasks, plan_inputs.tasks_by_evaluation_set[one.name])
            )
            for one in sets
        },
        keep_best=resolve_keep_best(evaluation, recipe.evaluation_sets),
        evaluation_cell=evaluation.separate_cell,
        alerts=recipe.alerts,
        idle_timeout_s=recipe.cluster.idle_timeout_s,
        stop_grace_s=recipe.cluster.stop_grace_s,
        sys_path=plan_inputs.sys_path if recipe.trainer.objective.custom else (),
    )
    return build_job_with_task_per_rank(
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


def build_ledger_evaluation_sets(
    sets: Iterable[EvaluationSet], plan_inputs: PlanInputs
) -> dict[str, LedgerEvaluationSet]:
    """Evaluation sets as the ledger is told of them."""
    return {
        one.name: LedgerEvaluationSet(
            number=one.number,
            n_tasks=plan_inputs.tasks_by_evaluation_set[one.name],
            n_samples=one.n_samples,
            metrics=one.metrics,
            pass_reward=one.pass_reward,
        )
        for one in sets
    }


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
    """The job of a cell; its servers wait for a trainer's weights, or serve what they load.

    With a `loaded_version` they serve these weights, as that version.
    """
    inference, rollout = recipe.inference, recipe.rollout
    model = get_initial_policy_path(recipe, paths)
    server = InferenceJobConfig(
        run_dir=paths.root,
        cell=cell_name,
        inference=inference,
        model_path=model,
        loaded_version=loaded_version,
        serve_python=plan_inputs.serve_python,
        serve_variables=recipe.cluster.serve.variables,
        seed=recipe.seed,
        updates_in_place=recipe.weights.pause_mode == "in_place",
        serves_metrics=recipe.cluster.prometheus,
    ).build_process_spec(
        "inference", tasks="first", restarts=MAX_CONSECUTIVE_SERVICE_RESTARTS, uses_gpus=True
    )
    follower = replace(server, name="follower", entry=WORKER_NODE_ENTRY, tasks="others")
    proxy = ProxyJobConfig(
        run_dir=paths.root,
        cell=cell_name,
        proxy=ProxyLimits(**recipe.proxy.model_dump()),
        shards=recipe.shards,
        model_path=model,
        model_name=recipe.experiment_name,
        context_tokens=inference.context_length,
        tool_call_parser=inference.tool_call_parser,
        reasoning_parser=inference.reasoning_parser,
        serve_python=plan_inputs.serve_python,
        online=rollout.agent.mode == "online",
    ).build_process_spec("proxy", tasks="first", restarts=MAX_CONSECUTIVE_SERVICE_RESTARTS)
    driver = RolloutJobConfig(
        run_dir=paths.root,
        cell=cell_name,
        rollout=rollout,
        evaluation_sets={
            one.name: DriverEvaluationSet(
                number=one.number,
                sampling=one.sampling,
                workflow=one.workflow,
                workflow_kwargs=one.workflow_kwargs,
                workflow_key=one.agent_section_key,
            )
            for one in recipe.evaluation_sets
        },
        episode_slots=max(1, rollout.max_concurrent_rollouts // inference.cells),
        splits=splits,
        plays_trials=cell_name == format_cell_name(0) and rollout.trial_tasks > 0,
        sys_path=plan_inputs.sys_path,
        idle_timeout_s=recipe.cluster.idle_timeout_s,
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
        gpus_per_task=0 if inference.device == "cpu" else gpus,
    )
