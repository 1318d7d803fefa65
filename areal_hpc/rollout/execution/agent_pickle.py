"""Pickles of agents that a user's script defines or passes as objects.

The pickle lies in the run directory beside a small module that loads it, so that a dotted path
names the agent like any other. Nothing else is unpickled: a user who can write these files could
place any code there.
"""

import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cloudpickle

from areal_hpc.errors import RecipeError
from areal_hpc.rollout.agent import Agent, load_agent
from areal_hpc.rundir.files import write_atomic_private

PICKLED_AGENT_MODULE = "handed_over"
"""Module of a pickled agent; `rollout.workflow` is then `handed_over.agent`."""

_AGENT_MODULE_TEMPLATE = '''"""The agent as a script handed it over."""

import sys

sys.path += [folder for folder in {folders!r} if folder not in sys.path]
{alias}
from areal_hpc.rollout.execution.agent_pickle import load_agent_pickle

agent = load_agent_pickle(__file__)
'''


def get_import_path(function_or_class: object) -> str | None:
    """Return the dotted path by which other processes can import this; None if they cannot."""
    module = getattr(function_or_class, "__module__", None)
    name = getattr(function_or_class, "__qualname__", None)
    if not module or not name or module == "__main__" or "." in name:
        return None
    try:
        imported = getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None
    return f"{module}.{name}" if imported is function_or_class else None


def save_agent_as_module(
    workflow: Any,
    kwargs: Mapping[str, Any],
    folder: Path,
    sys_path: Sequence[str],
    imports_areal_names: bool,
    module: str = PICKLED_AGENT_MODULE,
) -> str:
    """Save an agent as `module` in a folder, and return its dotted path for `rollout.workflow`.

    The module imports what the agent refers to from `sys_path`; with `imports_areal_names` AReaL's
    names can be imported, too.
    """
    data = pickle_agent((workflow, dict(kwargs)))
    source = _AGENT_MODULE_TEMPLATE.format(
        folders=list(sys_path),
        alias="import areal_hpc.areal.import_hook  # noqa: F401" if imports_areal_names else "",
    )
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in ((f"{module}.pkl", data), (f"{module}.py", source.encode())):
        write_atomic_private(folder / name, content)  # arguments may hold keys of other services
    return f"{module}.agent"


def pickle_agent(agent: Any) -> bytes:
    """Pickle an object by reference if its code can be imported, else by value.

    Raises:
        RecipeError: The object holds something that cannot be pickled.
    """
    try:
        data: bytes = cloudpickle.dumps(agent)
    except Exception as error:  # boundary: any object of the user's may refuse
        raise RecipeError(
            f"the workflow cannot be pickled ({type(error).__name__}: {error})",
            key="rollout.workflow",
            hint="create files, clients and locks inside `run`, or name the agent by its path",
        ) from error
    return data


def load_agent_pickle(module_file: str) -> Agent:
    workflow, kwargs = cloudpickle.loads(Path(module_file).with_suffix(".pkl").read_bytes())
    return load_agent(workflow, kwargs, extra_kwargs=())


def is_unchanged_by_json(kwargs: Mapping[str, Any]) -> bool:
    """Return whether a recipe can hold these arguments unchanged."""
    try:
        return bool(json.loads(json.dumps(kwargs)) == kwargs)
    except (TypeError, ValueError):
        return False
