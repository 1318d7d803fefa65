"""Rules for what is neither generation nor learning: names, places, data, and how often."""

from __future__ import annotations

from typing import Any

from areal_hpc.areal_config.placement import of_allocation_mode
from areal_hpc.areal_config.rules import (
    Becomes,
    Lost,
    Rule,
    Source,
    always,
    anyway,
    computed,
    lost,
    renamed,
    same_as,
)

ROOT = "areal."
"""AReaL's import root."""


def _steps(value: Any, source: Source) -> dict[str, Any] | Lost:
    if source.total_steps is None:
        return Lost(
            "a recipe counts steps: set trainer.total_steps to the epochs times the rows of the "
            "training set, divided by trainer.batch_size"
        )
    return {"trainer.total_steps": source.total_steps}


def _every(target: str) -> Becomes:
    """Epochs as steps."""

    def becomes(value: Any, source: Source) -> dict[str, Any] | Lost:
        if value is None:
            return {}
        if source.steps_per_epoch is None:
            return Lost(f"a recipe counts steps: set {target}")
        return {target: int(value) * source.steps_per_epoch}

    return becomes


def _timer(section: str, target: str) -> tuple[Rule, ...]:
    """How often something happens; steps win over epochs, so they come last."""
    return (
        same_as(f"{section}.experiment_name", "experiment_name", "a run has one name"),
        same_as(f"{section}.trial_name", "trial_name", "a run has one name"),
        same_as(f"{section}.fileroot", "cluster.fileroot", "a run has one directory"),
        lost(f"{section}.freq_secs", f"a recipe counts steps: set `{target}`"),
        computed(
            f"{section}.freq_epochs", f"`{target}`, in steps of the training set", _every(target)
        ),
        renamed(f"{section}.freq_steps", target),
    )


def _workflow(value: Any, source: Source) -> dict[str, Any]:
    return {"rollout.workflow": as_here(str(value))} if value else {}


def as_here(dotted_path: str) -> str:
    """A name of AReaL's under this package's import root."""
    return f"areal_hpc.{dotted_path.removeprefix(ROOT)}" if _is_areal(dotted_path) else dotted_path


def _is_areal(dotted_path: str) -> bool:
    return dotted_path.startswith(ROOT)


def _task_file(section: str) -> Becomes:
    def becomes(value: Any, source: Source) -> dict[str, Any] | Lost:
        if not value:
            return {}
        if str(value).endswith((".jsonl", ".json")):
            return {f"{section}.path": value}
        return Lost(
            "a recipe reads files of JSON lines, or a generator: see train_dataset in "
            "docs/recipe.md; PPOTrainer takes rows as they are"
        )

    return becomes


def _script_key(name: str) -> Rule:
    """A key that AReaL's example scripts hand to their workflow."""
    target = f"rollout.workflow_kwargs.{name}"
    return computed(
        name,
        f"`{target}`",
        lambda value, _: {} if value in (None, "", {}) else {target: value},
    )


def _launched(value: Any, source: Source) -> dict[str, Any] | Lost:
    return Lost("jobs run on this machine or on Slurm") if value == "ray" else {}


def _loggers() -> tuple[Rule, ...]:
    why = "`metrics.jsonl` and `tensorboard/` are always written; nothing is sent anywhere"
    return (
        *(
            always(f"stats_logger.{name}.mode", "disabled", why)
            for name in ("wandb", "swanlab", "trackio")
        ),
        lost("stats_logger.wandb.*", why),
        lost("stats_logger.swanlab.*", why),
        lost("stats_logger.trackio.*", why),
        anyway("stats_logger.tensorboard.*", "`tensorboard/` of the run directory"),
    )


_LOADER = "rows are read once, from the run directory"

RUN_RULES = (
    renamed("experiment_name", "experiment_name"),
    renamed("trial_name", "trial_name"),
    renamed("seed", "seed"),
    always("enable_offload", False, "trainer and replicas keep their own devices"),
    always("async_training", True, "`rollout.max_head_offpolicyness` of 0 is synchronous"),
    always("dynamic_bs", False, "a batch has `trainer.batch_size` tickets"),
    computed("total_train_epochs", "`trainer.total_steps`, where the rows are known", _steps),
    renamed("total_train_steps", "trainer.total_steps"),
    same_as("tokenizer_path", "actor.path", "the tokenizer is the model's"),
    computed("allocation_mode", "`inference.*` and `trainer.parallel.*`", of_allocation_mode),
    computed("workflow", "`rollout.workflow`", _workflow),
    computed(
        "eval_workflow",
        "`evaluation.workflow`",
        lambda value, source: (
            {"evaluation.workflow": as_here(str(value))}
            if value and value != source("workflow")
            else {}
        ),
    ),
    _script_key("agent_type"),
    _script_key("n_trajs"),
    _script_key("agent_builder_path"),
    _script_key("agent_builder_kwargs"),
    _script_key("reward_fn_path"),
    renamed("max_turns", "rollout.limits.max_turns"),
    renamed("max_tokens_per_trajectory", "rollout.limits.max_tokens"),
    renamed("cluster.fileroot", "cluster.fileroot"),
    anyway("cluster.n_gpus_per_node", "it decides how many replicas make a cell"),
    anyway("cluster.n_nodes", "a job asks for the nodes that its ranks need"),
    anyway("cluster.cluster_name", "it has no meaning here"),
    anyway("cluster.name_resolve.*", "processes find one another by files of the run directory"),
    computed(
        "scheduler.type",
        "how a run is started: `areal-hpc run` here, or submitted to Slurm",
        _launched,
    ),
    anyway("scheduler.site", "`areal-hpc submit --site`"),
    lost("launcher.*", "what a job asks Slurm for is in the section `cluster`"),
    renamed("train_dataset.batch_size", "trainer.batch_size"),
    computed("train_dataset.path", "`train_dataset.path`", _task_file("train_dataset")),
    always("train_dataset.shuffle", True, "tasks are drawn in an order made from `seed`"),
    anyway("train_dataset.pin_memory", _LOADER),
    anyway("train_dataset.num_workers", _LOADER),
    always("train_dataset.drop_last", True, "tasks are an endless stream"),
    lost("train_dataset.max_length", "leave long rows out of the training set"),
    anyway("train_dataset.type", "the agent knows what its rows mean"),
    computed("valid_dataset.path", "`valid_dataset.path`", _task_file("valid_dataset")),
    anyway("valid_dataset.batch_size", "`evaluation.tasks` are evaluated together"),
    anyway("valid_dataset.shuffle", "the first `evaluation.tasks` rows are evaluated"),
    anyway("valid_dataset.pin_memory", _LOADER),
    anyway("valid_dataset.num_workers", _LOADER),
    anyway("valid_dataset.drop_last", "every row counts"),
    lost("valid_dataset.max_length", "leave long rows out of the held-out set"),
    anyway("valid_dataset.type", "the agent knows what its rows mean"),
    *_timer("saver", "trainer.export_every_steps"),
    *_timer("evaluator", "evaluation.every_steps"),
    anyway("evaluator.eval_before_train", "the first weights are always evaluated"),
    *_timer("recover", "trainer.commit_every_steps"),
    anyway("recover.mode", "a run always goes on from its last commit"),
    lost("recover.retries", "a job is started again while the run gets further"),
    always("recover.no_save_optim", False, "a commit is whole"),
    always("recover.no_load_optim", False, "a commit is whole"),
    same_as("stats_logger.experiment_name", "experiment_name", "a run has one name"),
    same_as("stats_logger.trial_name", "trial_name", "a run has one name"),
    same_as("stats_logger.fileroot", "cluster.fileroot", "a run has one directory"),
    *_loggers(),
    anyway("perf_tracer.*", "`metrics.jsonl` has the time of every part of a step"),
)
"""What becomes of each."""
