"""Recipe -> jobs. Pure: the same recipe and facts always give the same plan.

Entry points are strings, so that a plan can be made where neither torch nor SGLang is installed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from areal_hpc.recipe import Recipe
from areal_hpc.rundir.jobs import JobSpec, ProcessSpec
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.rendezvous import EVALUATION_CELL, LEDGER, format_cell_name
from areal_hpc.wire.ledger import Split

CRASHES_FORGIVEN = 20
"""Restarts of a service process (ledger, proxy, driver, inference) before its job gives up."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What the launcher found out and a plan depends on."""

    train_tasks: int
    valid_tasks: int
    serve_python: str
    sys_path: tuple[str, ...]
    """Folders from which the agent is imported."""
    tasks_of_sources: tuple[int, ...] = ()
    """Training tasks of each source, if there are several."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Jobs that run together. The stage ends when its leader does."""

    name: str
    leader: JobSpec
    others: tuple[JobSpec, ...]
    done_marker: Path
    """Exists when the stage is complete; such a stage is skipped."""

    @property
    def jobs(self) -> tuple[JobSpec, ...]:
        """Leader first."""
        return (self.leader, *self.others)


@dataclass(frozen=True, slots=True)
class Plan:
    """Every job of a run, stage after stage."""

    stages: tuple[Stage, ...]


def plan(recipe: Recipe, layout: RunPaths, facts: Facts) -> Plan:
    """Decide every job of a run."""
    reinforcement = Stage(
        name="train",
        leader=_trainer_job(recipe, layout, facts),
        others=_cell_jobs(recipe, layout, facts),
        done_marker=layout.finished_marker,
    )
    if recipe.warmup is None:
        return Plan((reinforcement,))
    warmup = Stage("warmup", _warmup_job(recipe, layout), (), layout.sft_export)
    return Plan((warmup, reinforcement))


def starting_model(recipe: Recipe, layout: RunPaths) -> Path:
    """The model before any training."""
    return recipe.model.path.resolve() if recipe.model.path else layout.tiny_model_dir


def policy_model(recipe: Recipe, layout: RunPaths) -> Path:
    """The model that reinforcement learning starts from."""
    return layout.sft_export if recipe.warmup else starting_model(recipe, layout)


def _warmup_job(recipe: Recipe, layout: RunPaths) -> JobSpec:
    assert recipe.warmup is not None
    config = {
        "run_dir": str(layout.root),
        "model_path": str(starting_model(recipe, layout)),
        "dataset_path": str(layout.dataset("warmup")),
        "seed": recipe.seed,
        "warmup": recipe.warmup.model_dump(mode="json", exclude={"dataset"}),
        "parallel": recipe.trainer.parallel.model_dump(mode="json"),
        "device": recipe.trainer.device,
        "dtype": recipe.trainer.dtype,
    }
    process = ProcessSpec(
        "warmup", "train", "areal_hpc.trainer.sft_job:run", config, ends_job=True, uses_gpus=True
    )
    return JobSpec(
        "warmup",
        "train",
        [process],
        tasks=recipe.trainer.parallel.world_size,
        gpus_per_task=gpus_of_a_rank(recipe),
    )


def gpus_of_a_rank(recipe: Recipe) -> int:
    """GPUs of one rank. `auto` means one: who plans does not see the nodes."""
    return 0 if recipe.trainer.device == "cpu" else 1


def _trainer_job(recipe: Recipe, layout: RunPaths, facts: Facts) -> JobSpec:
    evaluated = min(recipe.evaluation.tasks, facts.valid_tasks)
    trainer = {
        "run_dir": str(layout.root),
        "model_path": str(policy_model(recipe, layout)),
        "seed": recipe.seed,
        "trainer": recipe.trainer.model_dump(mode="json"),
        "weights": recipe.weights.model_dump(mode="json"),
        "cells": recipe.inference.cells,
        "n_samples": recipe.rollout.n_samples,
        "evaluation_every_steps": recipe.evaluation.every_steps,
        "evaluation_tasks": evaluated,
        "evaluation_cell": recipe.evaluation.separate_job,
        "stop_grace_s": recipe.cluster.stop_grace_s,
    }
    ledger = {
        "run_dir": str(layout.root),
        "batch_size": recipe.trainer.batch_size,
        "n_samples": recipe.rollout.episodes_per_ticket,
        "max_head_offpolicyness": recipe.rollout.max_head_offpolicyness,
        "stale_groups": recipe.rollout.stale_groups,
        "max_concurrent_rollouts": recipe.rollout.max_concurrent_rollouts,
        "seed": recipe.seed,
        "n_train_tasks": facts.train_tasks,
        "task_sources": [
            {"n_tasks": n_tasks, "weight": source.weight}
            for n_tasks, source in zip(
                facts.tasks_of_sources, recipe.train_dataset.sources, strict=True
            )
        ],
        "n_valid_tasks": facts.valid_tasks,
        "total_steps": recipe.trainer.total_steps,
        "curriculum": recipe.rollout.curriculum,
        "sys_path": list(facts.sys_path) if recipe.rollout.curriculum else [],
    }
    return JobSpec(
        "trainer",
        "train",
        [
            _service(LEDGER, "train", "areal_hpc.ledger.job:run", ledger, tasks="first"),
            ProcessSpec(
                "trainer",
                "train",
                "areal_hpc.trainer.job:run",
                trainer,
                ends_job=True,
                uses_gpus=True,
            ),
        ],
        tasks=recipe.trainer.parallel.world_size,
        gpus_per_task=gpus_of_a_rank(recipe),
    )


def _cell_jobs(recipe: Recipe, layout: RunPaths, facts: Facts) -> tuple[JobSpec, ...]:
    """Those of training, and that of evaluation if it has one."""
    is_apart = recipe.evaluation.separate_job
    splits: tuple[Split, ...] = ("train",) if is_apart else ("train", "valid")
    jobs = [
        _cell_job(recipe, layout, facts, format_cell_name(index), splits)
        for index in range(recipe.inference.cells)
    ]
    if is_apart:
        jobs.append(_cell_job(recipe, layout, facts, EVALUATION_CELL, ("valid",)))
    return tuple(jobs)


def _cell_job(
    recipe: Recipe, layout: RunPaths, facts: Facts, name: str, splits: tuple[Split, ...]
) -> JobSpec:
    cell = {"run_dir": str(layout.root), "cell": name}
    model = str(policy_model(recipe, layout))
    inference = {
        **cell,
        "inference": recipe.inference.model_dump(mode="json"),
        "model_path": model,
        "serve_python": facts.serve_python,
        "serve_variables": dict(recipe.cluster.serve.variables),
        "seed": recipe.seed,
    }
    proxy = {
        **cell,
        "proxy": recipe.proxy.model_dump(mode="json"),
        "shards": recipe.shards.model_dump(mode="json"),
        "model_path": model,
        "model_name": recipe.experiment_name,
        "context_tokens": recipe.inference.context_tokens,
        "tool_call_parser": recipe.inference.tool_call_parser,
        "reasoning_parser": recipe.inference.reasoning_parser,
        "serve_python": facts.serve_python,
        "online": recipe.rollout.agent.mode == "online",
    }
    rollout = {
        **cell,
        "rollout": recipe.rollout.model_dump(mode="json"),
        "evaluation_sampling": recipe.evaluation.sampling.model_dump(mode="json"),
        "evaluation_workflow": recipe.evaluation.workflow,
        "evaluation_workflow_kwargs": recipe.evaluation.workflow_kwargs,
        "episode_slots": max(1, recipe.rollout.max_concurrent_rollouts // recipe.inference.cells),
        "splits": list(splits),
        "sys_path": list(facts.sys_path),
        "idle_timeout_s": recipe.cluster.idle_timeout_s,
    }
    keeper, driver = "areal_hpc.inference.job:run", "areal_hpc.rollout.job:run"
    nodes = recipe.inference.nodes_per_replica
    follower = _service(
        "follower",
        "agents",
        "areal_hpc.inference.follower:run",
        inference,
        tasks="others",
        uses_gpus=True,
    )
    gpus = recipe.inference.replicas_per_cell * recipe.inference.tp // nodes
    return JobSpec(
        name,
        "agents",
        [
            _service("inference", "agents", keeper, inference, tasks="first", uses_gpus=True),
            *([follower] if nodes > 1 else []),
            _service("proxy", "agents", "areal_hpc.proxy.job:run", proxy, tasks="first"),
            _service("driver", "agents", driver, rollout, tasks="first", ends_job=True),
        ],
        tasks=nodes,
        is_task_a_node=True,
        gpus_per_task=0 if recipe.inference.device == "cpu" else gpus,
    )


def _service(
    name: str,
    role: str,
    entry: str,
    config: dict[str, Any],
    *,
    tasks: Literal["all", "first", "others"] = "all",
    ends_job: bool = False,
    uses_gpus: bool = False,
) -> ProcessSpec:
    """A process that its supervisor restarts when it crashes."""
    return ProcessSpec(
        name,
        role,
        entry,
        config,
        tasks=tasks,
        restarts=CRASHES_FORGIVEN,
        ends_job=ends_job,
        uses_gpus=uses_gpus,
    )
