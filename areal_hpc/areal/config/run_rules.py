"""Translation rules for AReaL's names, paths, data and schedule keys."""

from collections.abc import Mapping
from typing import Any

from areal_hpc.areal.config.allocation_mode import parse_allocation_mode
from areal_hpc.areal.config.rules import (
    SLURM_OPTIONS_REASON,
    ArealConfigValues,
    KeyRule,
    TranslateValue,
    Untranslatable,
    fixed_value_rule,
    ignored_rule,
    renamed_rule,
    repeated_run_key_rules,
    same_as_key_rule,
    unsupported_rule,
)

AREAL_PREFIX = "areal."
"""AReaL's import root."""


def _derive_total_steps(
    value: Any, areal_values: ArealConfigValues
) -> dict[str, Any] | Untranslatable:
    if areal_values.total_steps is None:
        return Untranslatable(
            "a recipe counts steps: set trainer.total_steps to the epochs times the rows of the "
            "training set, divided by trainer.batch_size"
        )
    return {"trainer.total_steps": areal_values.total_steps}


def _build_epochs_to_steps_translator(recipe_key: str) -> TranslateValue:
    def translate(value: Any, areal_values: ArealConfigValues) -> dict[str, Any] | Untranslatable:
        if value is None:
            return {}
        if areal_values.steps_per_epoch is None:
            return Untranslatable(f"a recipe counts steps: set {recipe_key}")
        return {recipe_key: int(value) * areal_values.steps_per_epoch}

    return translate


def _frequency_rules(section: str, target: str) -> tuple[KeyRule, ...]:
    return (
        *repeated_run_key_rules(section),
        unsupported_rule(f"{section}.freq_secs", f"a recipe counts steps: set `{target}`"),
        KeyRule(
            f"{section}.freq_epochs",
            f"`{target}`, in steps of the training set",
            _build_epochs_to_steps_translator(target),
        ),
        renamed_rule(f"{section}.freq_steps", target),
    )


def _translate_workflow(value: Any, areal_values: ArealConfigValues) -> dict[str, Any]:
    return {"rollout.workflow": map_areal_module(str(value))} if value else {}


def map_areal_module(dotted_path: str) -> str:
    """A dotted path with `areal.` at its beginning as `areal_hpc.areal.`; any other as it is."""
    return f"areal_hpc.{dotted_path}" if dotted_path.startswith(AREAL_PREFIX) else dotted_path


def map_areal_path_kwargs(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of an agent; those that are dotted paths (`..._path`) as `map_areal_module`."""
    return {
        name: map_areal_module(value)
        if name.endswith("_path") and isinstance(value, str)
        else value
        for name, value in kwargs.items()
    }


def _build_task_file_translator(section: str) -> TranslateValue:
    def translate(value: Any, areal_values: ArealConfigValues) -> dict[str, Any] | Untranslatable:
        if not value:
            return {}
        if str(value).endswith((".jsonl", ".json")):
            return {f"{section}.path": value}
        return Untranslatable(
            "a recipe reads files of JSON lines, or a generator: see train_dataset in "
            "docs/recipe.md; PPOTrainer takes rows as they are"
        )

    return translate


def _workflow_kwarg_rule(kwarg_name: str) -> KeyRule:
    target = f"rollout.workflow_kwargs.{kwarg_name}"

    def translate(value: Any, areal_values: ArealConfigValues) -> dict[str, Any]:
        return {} if value in (None, "", {}) else map_areal_path_kwargs({target: value})

    return KeyRule(kwarg_name, f"`{target}`", translate)


def _reject_ray_scheduler(
    value: Any, areal_values: ArealConfigValues
) -> dict[str, Any] | Untranslatable:
    return Untranslatable("jobs run on this machine or on Slurm") if value == "ray" else {}


_NO_DATA_LOADER_REASON = "rows are read once, from the run directory"
_LOGS_ALWAYS_WRITTEN_REASON = (
    "`metrics.jsonl` and `tensorboard/` are always written; nothing is sent anywhere"
)
_UNSUPPORTED_TRACKERS = ("wandb", "swanlab", "trackio")

RUN_RULES = (
    renamed_rule("experiment_name", "experiment_name"),
    renamed_rule("trial_name", "trial_name"),
    renamed_rule("seed", "seed"),
    fixed_value_rule("enable_offload", False, "trainer and replicas keep their own devices"),
    fixed_value_rule(
        "async_training", True, "`rollout.max_head_offpolicyness` of 0 is synchronous"
    ),
    fixed_value_rule("dynamic_bs", False, "a batch has `trainer.batch_size` tickets"),
    KeyRule(
        "total_train_epochs",
        "`trainer.total_steps`, where the rows are known",
        _derive_total_steps,
    ),
    renamed_rule("total_train_steps", "trainer.total_steps"),
    same_as_key_rule("tokenizer_path", "actor.path", "the tokenizer is the model's"),
    KeyRule("allocation_mode", "`inference.*` and `trainer.parallel.*`", parse_allocation_mode),
    KeyRule("workflow", "`rollout.workflow`", _translate_workflow),
    KeyRule(
        "eval_workflow",
        "`evaluation.workflow`",
        lambda value, areal_values: (
            {"evaluation.workflow": map_areal_module(str(value))}
            if value and value != areal_values("workflow")
            else {}
        ),
    ),
    _workflow_kwarg_rule("agent_type"),
    _workflow_kwarg_rule("n_trajs"),
    _workflow_kwarg_rule("agent_builder_path"),
    _workflow_kwarg_rule("agent_builder_kwargs"),
    _workflow_kwarg_rule("reward_fn_path"),
    renamed_rule("max_turns", "rollout.limits.max_turns"),
    renamed_rule("max_tokens_per_trajectory", "rollout.limits.max_tokens"),
    renamed_rule("cluster.fileroot", "cluster.fileroot"),
    ignored_rule("cluster.n_gpus_per_node", "it decides how many replicas make a cell"),
    ignored_rule("cluster.n_nodes", "a job asks for the nodes that its ranks need"),
    ignored_rule("cluster.cluster_name", "it has no meaning here"),
    ignored_rule(
        "cluster.name_resolve.*", "processes find one another by files of the run directory"
    ),
    KeyRule(
        "scheduler.type",
        "how a run is started: `areal-hpc run` here, or submitted to Slurm",
        _reject_ray_scheduler,
    ),
    ignored_rule("scheduler.site", "`areal-hpc submit --site`"),
    unsupported_rule("launcher.*", SLURM_OPTIONS_REASON),
    renamed_rule("train_dataset.batch_size", "trainer.batch_size"),
    KeyRule(
        "train_dataset.path", "`train_dataset.path`", _build_task_file_translator("train_dataset")
    ),
    fixed_value_rule("train_dataset.shuffle", True, "tasks are drawn in an order made from `seed`"),
    ignored_rule("train_dataset.pin_memory", _NO_DATA_LOADER_REASON),
    ignored_rule("train_dataset.num_workers", _NO_DATA_LOADER_REASON),
    fixed_value_rule("train_dataset.drop_last", True, "tasks are an endless stream"),
    unsupported_rule("train_dataset.max_length", "filter long rows out of the training set"),
    ignored_rule("train_dataset.type", "the agent knows what its rows mean"),
    KeyRule(
        "valid_dataset.path", "`valid_dataset.path`", _build_task_file_translator("valid_dataset")
    ),
    ignored_rule("valid_dataset.batch_size", "`evaluation.tasks` are evaluated together"),
    ignored_rule("valid_dataset.shuffle", "the first `evaluation.tasks` rows are evaluated"),
    ignored_rule("valid_dataset.pin_memory", _NO_DATA_LOADER_REASON),
    ignored_rule("valid_dataset.num_workers", _NO_DATA_LOADER_REASON),
    ignored_rule("valid_dataset.drop_last", "every row counts"),
    unsupported_rule("valid_dataset.max_length", "leave long rows out of the held-out set"),
    ignored_rule("valid_dataset.type", "the agent knows what its rows mean"),
    *_frequency_rules("saver", "trainer.export_every_steps"),
    *_frequency_rules("evaluator", "evaluation.every_steps"),
    ignored_rule("evaluator.eval_before_train", "the first weights are always evaluated"),
    *_frequency_rules("recover", "trainer.checkpoint_every_steps"),
    ignored_rule("recover.mode", "a run always resumes from its last checkpoint"),
    unsupported_rule("recover.retries", "a job is restarted as long as the run makes progress"),
    fixed_value_rule(
        "recover.no_save_optim", False, "a checkpoint always contains the optimizer state"
    ),
    fixed_value_rule(
        "recover.no_load_optim", False, "a checkpoint always contains the optimizer state"
    ),
    *repeated_run_key_rules("stats_logger"),
    *(
        fixed_value_rule(f"stats_logger.{name}.mode", "disabled", _LOGS_ALWAYS_WRITTEN_REASON)
        for name in _UNSUPPORTED_TRACKERS
    ),
    *(
        unsupported_rule(f"stats_logger.{name}.*", _LOGS_ALWAYS_WRITTEN_REASON)
        for name in _UNSUPPORTED_TRACKERS
    ),
    ignored_rule("stats_logger.tensorboard.*", "`tensorboard/` of the run directory"),
    ignored_rule("perf_tracer.*", "`metrics.jsonl` has the time of every part of a step"),
)
"""What becomes of each."""
