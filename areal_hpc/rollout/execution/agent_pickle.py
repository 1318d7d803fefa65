"""Pickling of agents and functions defined in a user's script.

A script may define its agent in itself, or hand over an object. Such an agent lies in the run
directory, as a pickle beside a module of its own: from there it is named by a dotted path, as
any other agent. Whoever can write there could put any code there; nothing else is unpickled.
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
"""Holds an agent that was handed over; `rollout.workflow` is then `handed_over.agent`."""

_AGENT_MODULE_TEMPLATE = '''"""The agent as a script handed it over."""

import sys

sys.path += [folder for folder in {folders!r} if folder not in sys.path]
{alias}
from areal_hpc.rollout.execution.agent_pickle import load_agent_pickle

agent = load_agent_pickle(__file__)
'''


def get_import_path(function_or_class: object) -> str | None:
    """The dotted path by which another process can import a class or function; None without."""
    module, name = (
        getattr(function_or_class, "__module__", None),
        getattr(function_or_class, "__qualname__", None),
    )
    if not module or not name or module == "__main__" or "." in name:
        return None
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None
    return f"{module}.{name}" if found is function_or_class else None


def save_agent_as_module(
    workflow: Any,
    kwargs: Mapping[str, Any],
    folder: Path,
    sys_path: Sequence[str],
    imports_areal_names: bool,
    module: str = PICKLED_AGENT_MODULE,
) -> str:
    """The dotted path, for `rollout.workflow`, of an agent that is put into a folder as `module`.

    Modules that it refers to are imported from `sys_path`; with `imports_areal_names` they import
    AReaL's names.
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
    """An object by value where its code has no name, else by reference.

    Raises:
        RecipeError: It holds something that cannot travel.
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
    """Whether a recipe can hold these arguments as they are."""
    try:
        return bool(json.loads(json.dumps(kwargs)) == kwargs)
    except (TypeError, ValueError):
        return False
