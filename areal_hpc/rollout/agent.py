"""The agent contract, and how the user's agent is found by its dotted path."""

import difflib
import importlib
import inspect
import pkgutil
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, Protocol

from areal_hpc.checkout import format_missing_module_hint
from areal_hpc.errors import RecipeError, describe_exception
from areal_hpc.wire.agent_reward import Reward

EXTRA_KWARG_NAMES = ("base_url", "api_key", "http_client", "session_id", "seed")
"""What every episode hands to the agent besides its task."""

_AGENT_SHAPE_HINT = (
    "a class with `async def run(self, data, **extra_kwargs) -> float | Reward | dict[str, float]`"
)


class Agent(Protocol):
    """One object per driver, built with `rollout.workflow_kwargs`; its runs overlap in time."""

    async def run(
        self, data: dict[str, Any], **extra_kwargs: Any
    ) -> float | Reward | Mapping[str, float | Reward]:
        """Work on one task and return how well it went.

        Args:
            data: One line of the task set. A fresh copy: it may be changed.
            extra_kwargs: `base_url` and `api_key` of an OpenAI-compatible endpoint that
                records this episode; `http_client`, shared by all episodes, fit for
                `AsyncOpenAI(http_client=...)`; `session_id`; `seed`, different for every episode.

        Returns:
            The reward of the last interaction, or a dict of rewards by interaction (the id of the
            completion). A reward is a finite number, or a `Reward` with its parts and metrics.
        """
        ...


class AgentWorkflow(ABC):
    """A base for agents whose author likes one (the name is AReaL's); none is needed."""

    @abstractmethod
    async def run(
        self, data: dict[str, Any], **extra_kwargs: Any
    ) -> float | Reward | Mapping[str, float | Reward]:
        """See `Agent.run`."""


def load_agent(
    workflow: Any, kwargs: Mapping[str, Any], extra_kwargs: Sequence[str] = EXTRA_KWARG_NAMES
) -> Agent:
    """The agent to run: a class, built with `kwargs`, or an instance; or the dotted path of either.

    `extra_kwargs` are the keywords that `run` must accept.

    Raises:
        RecipeError: There is nothing of the agent's shape, or the class refuses `kwargs`. The
            message names the part of the path that failed.
    """
    if isinstance(workflow, str):
        found, name = _import_dotted(workflow), workflow
    else:
        kind = workflow if inspect.isclass(workflow) else type(workflow)
        found, name = workflow, f"{kind.__module__}.{kind.__qualname__}"
    _check_run_method(found, name, extra_kwargs)
    if inspect.isclass(found):
        return _build_agent(found, name, kwargs)
    if kwargs:
        raise _build_workflow_recipe_error(
            f"{name!r} is already an instance; the arguments {', '.join(kwargs)} cannot be applied",
            "name its class, or drop the arguments",
            key="rollout.workflow_kwargs",
        )
    agent: Agent = found
    return agent


def _import_dotted(dotted_path: str) -> Any:
    module_path, dot, name = dotted_path.rpartition(".")
    if not dot or not module_path:
        raise _build_workflow_recipe_error(
            f"expected a dotted path `package.module.Class`, got {dotted_path!r}",
            "name the module and the class, such as `my_package.my_module.MyAgent`",
        )
    module = _import_module_by_parts(module_path, dotted_path)
    found = getattr(module, name, None)
    if found is None:
        raise _build_workflow_recipe_error(
            f"{dotted_path!r}: the module {module_path!r} has no {name!r}"
            f"{_format_name_suggestion(name, _list_classes(module))}",
            f"name one of its classes: {', '.join(_list_classes(module)) or 'it has none'}",
        )
    return found


def _import_module_by_parts(module_path: str, dotted_path: str) -> ModuleType:
    """Import part after part, so that the error can name the first one that fails."""
    parts = module_path.split(".")
    module: ModuleType | None = None
    for end in range(1, len(parts) + 1):
        prefix = ".".join(parts[:end])
        try:
            module = importlib.import_module(prefix)
        except ModuleNotFoundError as error:
            if error.name != prefix:
                raise _build_import_error(prefix, dotted_path, error) from error
            raise _build_workflow_recipe_error(
                f"{dotted_path!r}: there is no module {prefix!r}"
                f"{_format_name_suggestion(parts[end - 1], _list_submodules(module))}",
                format_missing_module_hint(prefix, "for cluster.agents.python"),
            ) from error
        except (Exception, SystemExit) as error:  # boundary: importing runs the user's code
            raise _build_import_error(prefix, dotted_path, error) from error
    assert module is not None
    return module


def _check_run_method(agent: object, dotted_path: str, extra_kwargs: Sequence[str]) -> None:
    is_class = inspect.isclass(agent)
    run = getattr(agent, "run", None)
    if run is None and not is_class:
        kind = type(agent).__name__
        raise _build_workflow_recipe_error(
            f"{dotted_path!r} is a {kind}, expected a class", f"make it {_AGENT_SHAPE_HINT}"
        )
    if not inspect.iscoroutinefunction(run):
        found = "has no method `run`" if run is None else "has a `run` that is not `async def`"
        raise _build_workflow_recipe_error(
            f"{dotted_path!r} {found}", f"make it {_AGENT_SHAPE_HINT}"
        )
    given: list[Any] = [None, {}] if is_class else [{}]
    try:
        inspect.signature(run).bind(*given, **dict.fromkeys(extra_kwargs))
    except TypeError as error:
        raise _build_workflow_recipe_error(
            f"{dotted_path!r}: `run{inspect.signature(run)}` cannot be called with `data` and the "
            f"keywords {', '.join(extra_kwargs)} ({error})",
            f"make it {_AGENT_SHAPE_HINT}, or set rollout.agent.mode=subproc",
        ) from error


def _build_agent(agent_class: Any, dotted_path: str, kwargs: Mapping[str, Any]) -> Agent:
    try:
        inspect.signature(agent_class).bind(**kwargs)
    except TypeError as error:
        raise _build_workflow_recipe_error(
            f"{dotted_path!r} cannot be built {_name_arguments(kwargs)} ({error})",
            f"match its constructor: {agent_class.__name__}{inspect.signature(agent_class)}",
            key="rollout.workflow_kwargs",
        ) from error
    try:
        agent: Agent = agent_class(**kwargs)
    except RecipeError:
        raise  # it says itself what must change
    except (Exception, SystemExit) as error:  # boundary: the constructor is the user's code
        raise _build_workflow_recipe_error(
            f"{dotted_path!r} cannot be built {_name_arguments(kwargs)}: "
            f"{_summarize_exception(error)}",
            "fix the constructor or its arguments",
            key="rollout.workflow_kwargs",
        ) from error
    return agent


def _name_arguments(kwargs: Mapping[str, Any]) -> str:
    """Arguments in words: their values may be secrets, and errors are kept and passed on."""
    return f"with the arguments {', '.join(kwargs)}" if kwargs else "without arguments"


def _build_import_error(module: str, dotted_path: str, error: BaseException) -> RecipeError:
    return _build_workflow_recipe_error(
        f"{dotted_path!r}: importing {module!r} failed: {_summarize_exception(error)}",
        "fix that module; packages that it needs belong to cluster.agents.python",
    )


def _build_workflow_recipe_error(
    message: str, hint: str, key: str = "rollout.workflow"
) -> RecipeError:
    return RecipeError(message, key=key, hint=hint)


def _summarize_exception(error: BaseException) -> str:
    """`ValueError: why (file.py:12)`: the deepest line that is not import machinery."""
    said = describe_exception(error)
    if isinstance(error, SyntaxError):
        return f"{said} ({error.filename}:{error.lineno}: {(error.text or '').strip()})"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "importlib" not in frame.filename and frame.filename != __file__
    ]
    return f"{said} ({frames[-1].filename}:{frames[-1].lineno})" if frames else said


def _list_submodules(package: ModuleType | None) -> list[str]:
    """Names importable from a package, or from the import path when None."""
    path = None if package is None else getattr(package, "__path__", [])
    return [entry.name for entry in pkgutil.iter_modules(path)]


def _list_classes(module: ModuleType) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if inspect.isclass(value) and value.__module__ == module.__name__
    ]


def _format_name_suggestion(unknown_name: str, names: Iterable[str]) -> str:
    found = difflib.get_close_matches(unknown_name, list(names), n=1, cutoff=0.8)
    return f"; did you mean {found[0]!r}?" if found else ""
