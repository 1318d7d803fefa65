"""`PPOTrainer`, the entry point of AReaL training scripts."""

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import orjson
from omegaconf import OmegaConf

from areal_hpc.areal.api.cli_args import BaseExperimentConfig
from areal_hpc.areal.conversions import map_areal_module, map_areal_path_kwargs
from areal_hpc.areal.rules import find_rule_key
from areal_hpc.areal.translation import translate_to_recipe
from areal_hpc.dataset.sources import encode_row
from areal_hpc.errors import RecipeError
from areal_hpc.launch.run import run, submit
from areal_hpc.recipe.loading import build_recipe, read_site_values
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.rollout.episodes.episode_spec import check_task_limits
from areal_hpc.rollout.execution.agent_pickle import (
    PICKLED_AGENT_MODULE,
    get_import_path,
    is_unchanged_by_json,
    pickle_agent,
    save_agent_as_module,
)
from areal_hpc.rundir.files import write_atomic
from areal_hpc.rundir.paths import RunPaths

NEW_RUN_HINT = "use another trial_name to start a new run"
IMPORT_HOOK_MODULE = "areal_hpc.areal.import_hook"
"""Module that, if loaded here, the agent's processes must load, too, to import `areal`."""

EVALUATION_PICKLE_MODULE = f"{PICKLED_AGENT_MODULE}_for_evaluation"
"""Module of a pickled agent that only plays held-out tasks."""


class PPOTrainer:
    """Trainer of an agent for scripts, here or with `scheduler.type=slurm` on a cluster.

    Rows and agent are stored in the run directory, and the agent runs with the script's Python. The
    run continues when the script is started again, and every command of `areal-hpc` works with it.

    Args:
        config: AReaL's configuration, or a subclass of the user's.
        train_dataset: Rows, each a dict; None: those of `config.train_dataset.path`.
        valid_dataset: Held-out rows.
    """

    def __init__(
        self,
        config: BaseExperimentConfig,
        train_dataset: Iterable[Mapping[str, Any]] | None = None,
        valid_dataset: Iterable[Mapping[str, Any]] | None = None,
    ) -> None:
        self._config = config
        datasets = {"train": train_dataset, "valid": valid_dataset}
        self._rows = {
            split: _encode_rows(rows) for split, rows in datasets.items() if rows is not None
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the rows; jobs have ended when `train` returns."""
        self._rows.clear()

    def train(
        self,
        workflow: Any = None,
        eval_workflow: Any = None,
        workflow_kwargs: Mapping[str, Any] | None = None,
        eval_workflow_kwargs: Mapping[str, Any] | None = None,
        dynamic_filter_fn: Any = None,
    ) -> None:
        """Run the jobs to their end, and show their progress.

        Args:
            workflow: Agent: its dotted path, its class or an instance; by default the
                configuration's. None in mode `online`.
            eval_workflow: Agent that plays held-out tasks; by default the same.
            workflow_kwargs: Arguments of the agent's constructor; by default those of the
                configuration beside its workflow.
            eval_workflow_kwargs: Arguments of the other agent; by default the same.
            dynamic_filter_fn: Function that returns whether to train a finished group; it must be
                importable, or `package.module:function`. It gets `{"rewards": array, "task": row}`.

        Raises:
            RecipeError: The configuration must change first; all problems at once.
            JobFailedError: A job failed for good.
            ClusterError: There is no Slurm here, or the run's jobs are queued already.
            SystemExit: The user stopped the run (130).
        """
        recipe, notes = self.prepare(
            workflow, eval_workflow, workflow_kwargs, eval_workflow_kwargs, dynamic_filter_fn
        )
        sys_path = (_get_script_dir(),)
        if self._config.scheduler.type == "slurm":
            result = submit(
                recipe, wait=True, sys_path=sys_path, notes=notes, new_run_hint=NEW_RUN_HINT
            )
        else:
            result = run(recipe, sys_path=sys_path, notes=notes, new_run_hint=NEW_RUN_HINT)
        if result.exit_code:
            raise SystemExit(result.exit_code)

    def prepare(
        self,
        workflow: Any = None,
        eval_workflow: Any = None,
        workflow_kwargs: Mapping[str, Any] | None = None,
        eval_workflow_kwargs: Mapping[str, Any] | None = None,
        dynamic_filter_fn: Any = None,
    ) -> tuple[Recipe, list[str]]:
        """Build the recipe for `train`, write rows and agents, and list ignored configuration keys.

        The arguments are those of `train`.

        Raises:
            RecipeError: The configuration must change before the run can start.
        """
        rows = self._rows.get("train")
        translation = translate_to_recipe(self._config, None if rows is None else len(rows))
        tree = translation.recipe
        rollout = tree.setdefault("rollout", {})
        configured = {} if workflow else rollout.get("workflow_kwargs", {})
        kwargs = map_areal_path_kwargs(configured if workflow_kwargs is None else workflow_kwargs)
        workflow = workflow or rollout.get("workflow")
        paths = RunPaths(_get_run_dir(self._config))
        rollout |= {"workflow_kwargs": kwargs, "workflow": ""}
        if workflow:
            rollout |= _save_agent(workflow, kwargs, paths, PICKLED_AGENT_MODULE)
        evaluation = tree.setdefault("evaluation", {})
        other_configured = evaluation.pop("workflow", None)
        other = eval_workflow or other_configured or workflow
        other_kwargs = (
            kwargs if eval_workflow_kwargs is None else map_areal_path_kwargs(eval_workflow_kwargs)
        )
        if other and not _is_same_agent(workflow, kwargs, other, other_kwargs):
            evaluation |= _save_agent(other, other_kwargs, paths, EVALUATION_PICKLE_MODULE)
        if dynamic_filter_fn is not None:
            rollout["should_accept"] = _get_filter_import_path(dynamic_filter_fn)
        for section in ("train_dataset", "valid_dataset"):
            tree.pop(section, None)  # the rows that the script passes replace it
        for split in self._rows:
            tree[f"{split}_dataset"] = {"path": str(paths.dataset(split))}
        tree["cluster"] = _build_cluster_section(self._config, tree.get("cluster", {}))
        recipe = build_recipe(tree)
        for split, lines in self._rows.items():
            _write_task_set_once(lines, paths.dataset(split), recipe, f"{split}_dataset")
        # Keys of the script itself and the paths of its rows are not ignored.
        return recipe, [
            f"ignored  {item.key}={item.value}: {item.reason}"
            for item in translation.untranslated
            if find_rule_key(item.key) and not item.key.endswith("_dataset.path")
        ]


def _build_cluster_section(
    config: BaseExperimentConfig, cluster_section: dict[str, Any]
) -> dict[str, Any]:
    site = read_site_values(Path(config.scheduler.site)) if config.scheduler.site else {}
    merged: Any = OmegaConf.to_container(OmegaConf.merge(site, cluster_section))
    # The images of containers have interpreters of their own.
    if merged.get("slurm", {}).get("container", {}).get("kind", "none") == "none":
        merged["agents"] = {"python": sys.executable, **merged.get("agents", {})}
    return dict(merged)


def _is_same_agent(
    workflow: Any, kwargs: Mapping[str, Any], other_workflow: Any, other_kwargs: Mapping[str, Any]
) -> bool:
    if isinstance(workflow, str) and isinstance(other_workflow, str):
        return (
            map_areal_module(workflow) == map_areal_module(other_workflow)
            and other_kwargs == kwargs
        )
    if other_workflow is workflow and other_kwargs == kwargs:
        return True
    return pickle_agent((workflow, kwargs)) == pickle_agent((other_workflow, other_kwargs))


def _get_run_dir(config: BaseExperimentConfig) -> Path:
    for name in ("experiment_name", "trial_name"):
        if not getattr(config, name):
            raise RecipeError("this key is required", key=name, hint=f"add {name}=... to the call")
    folder = Path(config.cluster.fileroot).expanduser()
    return (folder / config.experiment_name / config.trial_name).resolve()


def _save_agent(
    workflow: Any, kwargs: Mapping[str, Any], paths: RunPaths, module: str
) -> dict[str, Any]:
    alias = IMPORT_HOOK_MODULE in sys.modules
    path = map_areal_module(workflow) if isinstance(workflow, str) else get_import_path(workflow)
    if path is not None and is_unchanged_by_json(kwargs) and not alias:
        return {"workflow": path, "workflow_kwargs": dict(kwargs)}
    named_agent = path if path is not None else workflow
    path = save_agent_as_module(
        named_agent, kwargs, paths.agent_dir, (_get_script_dir(),), alias, module
    )
    return {"workflow": path, "workflow_kwargs": {}}


def _get_filter_import_path(function: Any) -> str:
    if isinstance(function, str):
        return function
    path = get_import_path(function)
    if path is None:
        raise RecipeError(
            "should_accept must be an importable function (not a lambda or a local function)",
            key="dynamic_filter_fn",
            hint="define it in a module next to the script",
        )
    return ":".join(path.rsplit(".", 1))


def _get_script_dir() -> str:
    return str(Path(sys.path[0] if sys.path else "").resolve())


def _encode_rows(rows: Iterable[Mapping[str, Any]]) -> list[bytes]:
    lines = []
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise RecipeError(f"row {number} is a {type(row).__name__}, expected a dict")
        lines.append(encode_row(dict(row), number))
    if not lines:
        raise RecipeError("the data set is empty", hint="pass at least one row")
    return lines


def _write_task_set_once(
    lines: list[bytes], target_path: Path, recipe: Recipe, error_key: str
) -> None:
    for line in lines:
        check_task_limits(recipe.rollout, recipe.proxy.session_timeout_s, orjson.loads(line))
    text = b"\n".join(lines) + b"\n"
    if not target_path.exists():
        write_atomic(target_path, text)
    elif target_path.read_bytes() != text:
        raise RecipeError(
            "this run was started with a different data set",
            key=error_key,
            hint="give another trial_name",
        )
