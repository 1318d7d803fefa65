"""Interface between agents and driver: classes, HTTP client, import of agents by dotted path."""

import importlib
import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from areal_hpc.errors import AgentError, RecipeError
from areal_hpc.recipe.user_functions import (
    describe_user_error,
    format_name_suggestion,
    import_user_module,
)
from areal_hpc.session.tree import Interaction
from areal_hpc.wire.agent_reward import Reward
from areal_hpc.wire.http import AsyncWireClient
from areal_hpc.wire.proxy import EngineAddress, RecordCallsReply, RecordCallsRequest

RECORD_TIMEOUT_S = 60.0
CONNECT_TIMEOUT_S = 10.0
MAX_RECORD_BATCH_BYTES = 4 << 20
"""Size of the interactions in one request, unless one alone is larger: the proxy refuses requests
of more than `max_request_bytes`, and sampling masks take up to 22 KB a token."""
EXTRA_KWARG_NAMES = ("base_url", "api_key", "http_client", "session_id", "seed")
"""Keyword arguments of `Agent.run` beside the task."""

_AGENT_SHAPE_HINT = (
    "a class with `async def run(self, data, **extra_kwargs) -> float | Reward | dict[str, float]`"
)


class Agent(Protocol):
    """Agent of a driver, built once with `rollout.workflow_kwargs`; its runs overlap in time."""

    async def run(
        self, data: dict[str, Any], **extra_kwargs: Any
    ) -> float | Reward | Mapping[str, float | Reward]:
        """Work on one task, and return the reward.

        Args:
            data: One line of the task set, as a copy that the agent may change.
            extra_kwargs: `base_url` and `api_key` of an OpenAI-compatible endpoint that
                records this episode; `http_client`, shared by all episodes, for
                `AsyncOpenAI(http_client=...)`; `session_id`; `seed`, different for every episode.

        Returns:
            The reward of the whole episode, with which all its complete replies are trained; or a
            dict of rewards by interaction (the id of the completion). A reward is a finite number,
            or a `Reward` with its parts and metrics.
        """
        ...


class AgentWorkflow(ABC):
    """Optional base class of agents, with AReaL's name."""

    @abstractmethod
    async def run(
        self, data: dict[str, Any], **extra_kwargs: Any
    ) -> float | Reward | Mapping[str, float | Reward]:
        """See `Agent.run`."""


class RolloutWorkflow(ABC):
    """Agent with AReaL's `arun_episode`; `rollout.agent.mode` must be `inline`.

    Its clients propagate rewards back themselves, so `trainer.objective.credit` has no effect.
    """

    @abstractmethod
    async def arun_episode(self, engine: EngineAddress, data: dict[str, Any]) -> Any:
        """Work on one task.

        Args:
            engine: Argument of `ArealOpenAI(engine=...)`.
            data: One line of the task set.

        Returns:
            The result of `ArealOpenAI.export_interactions`, or those of several clients merged;
            None or an empty dict if there is nothing to train.
        """

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> dict[str, Reward]:
        """Run the episode, and send the interactions that its clients recorded to the proxy.

        Raises:
            AgentError: There is nothing to train.
        """
        if "base_url" not in extra_kwargs:
            raise AgentError(
                "a RolloutWorkflow runs within the driver", hint="set rollout.agent.mode=inline"
            )
        url = extra_kwargs["base_url"].removesuffix("/v1")
        key = extra_kwargs["api_key"]
        exported = await self.arun_episode(EngineAddress(url, key), data)
        if not exported:
            raise AgentError(f"arun_episode returned {exported!r}, expected exported interactions")
        interactions = _list_row_interactions(exported)
        client = AsyncWireClient(url, timeout_s=RECORD_TIMEOUT_S)
        try:
            for batch in _iterate_record_batches(interactions):
                await client.call(
                    "/rl/record", RecordCallsRequest(batch), RecordCallsReply, key=key
                )
        finally:
            await client.close()
        return {name: _build_reward(row) for name, row in exported.items()}


def _list_row_interactions(exported: object) -> list[Interaction]:
    rows: list[Any] = list(exported.values()) if isinstance(exported, Mapping) else [exported]
    if not all(hasattr(row, "plan") for row in rows):
        raise AgentError(
            f"arun_episode returned {exported!r:.200}, expected what export_interactions returns"
        )
    by_id = {call.interaction_id: call for row in rows for call in row.plan.path}
    # The client numbers replicas by itself, so its numbers are not those of the cell.
    return [msgspec.structs.replace(call, reward=None, replica=-1) for call in by_id.values()]


def _iterate_record_batches(interactions: Iterable[Interaction]) -> Iterator[list[msgspec.Raw]]:
    batch: list[msgspec.Raw] = []
    size_bytes = 0
    for interaction in interactions:
        encoded = msgspec.json.encode(interaction)
        if batch and size_bytes + len(encoded) > MAX_RECORD_BATCH_BYTES:
            yield batch
            batch, size_bytes = [], 0
        batch.append(msgspec.Raw(encoded))
        size_bytes += len(encoded)
    if batch:
        yield batch


def _build_reward(row: Any) -> Reward:
    final_reward: Reward = row.plan.path[-1].given_reward or Reward(0.0)
    return msgspec.structs.replace(final_reward, value=row.reward or 0.0)


def make_http_client(request_timeout_s: float) -> Any:
    """Make a client for `AsyncOpenAI(http_client=...)` that all episodes of the process share.

    A client per episode would cost 14-27 ms of CPU (it builds an SSL context), a shared one costs
    0.03 ms. The SDK's aiohttp transport is preferred: for every request the pool of httpx searches
    all its connections, a cost that grows with the square of the concurrency.

    Call it in a running event loop. Without the SDK it makes a plain `httpx.AsyncClient`.
    """
    for name in ("httpx", "httpx2"):
        # They log every request at INFO: hundreds of lines a second would hide all others.
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        sdk = importlib.import_module("openai")
        wants_httpx2 = int(sdk.__version__.split(".")[0]) >= 3
        http = importlib.import_module("httpx2" if wants_httpx2 else "httpx")
    except ModuleNotFoundError:
        sdk = None
        http = importlib.import_module("httpx")
    options = {
        "timeout": http.Timeout(request_timeout_s, connect=CONNECT_TIMEOUT_S),
        "limits": http.Limits(max_connections=None, max_keepalive_connections=None),
        # The proxy is on this node: proxy variables of the site must not apply.
        "trust_env": False,
    }
    if sdk is None:
        return http.AsyncClient(**options)
    try:
        return sdk.DefaultAioHttpClient(**options)
    except (AttributeError, RuntimeError):  # an SDK before 1.92, or without its aiohttp extra
        return sdk.DefaultAsyncHttpxClient(**options)


def load_agent(
    workflow: Any, kwargs: Mapping[str, Any], extra_kwargs: Sequence[str] = EXTRA_KWARG_NAMES
) -> Agent:
    """Load an agent from a class, built with `kwargs`, an instance, or the dotted path of either.

    `extra_kwargs` are the keywords that `run` must accept.

    Raises:
        RecipeError: The object is missing or no agent, or the class refuses `kwargs`. The message
            names the part of the path that failed.
    """
    if isinstance(workflow, str):
        loaded, name = _import_dotted(workflow), workflow
    else:
        kind = workflow if inspect.isclass(workflow) else type(workflow)
        loaded, name = workflow, f"{kind.__module__}.{kind.__qualname__}"
    _check_run_method(loaded, name, extra_kwargs)
    if inspect.isclass(loaded):
        return _build_agent(loaded, name, kwargs)
    if kwargs:
        raise _build_workflow_recipe_error(
            f"{name!r} is already an instance; the arguments {', '.join(kwargs)} cannot be applied",
            "name its class, or drop the arguments",
            key="rollout.workflow_kwargs",
        )
    agent: Agent = loaded
    return agent


def _import_dotted(dotted_path: str) -> Any:
    module_path, _, name = dotted_path.rpartition(".")
    if not module_path or ":" in dotted_path:
        example = dotted_path.replace(":", ".") if ":" in dotted_path else "my_module.MyAgent"
        raise _build_workflow_recipe_error(
            f"expected a dotted path `package.module.Class`, got {dotted_path!r}",
            f"name the module and the class, such as `{example}`",
        )
    module = import_user_module(
        module_path, dotted_path, "rollout.workflow", "for cluster.agents.python"
    )
    value = getattr(module, name, None)
    if value is None:
        classes = [
            name
            for name, value in vars(module).items()
            if inspect.isclass(value) and value.__module__ == module.__name__
        ]
        raise _build_workflow_recipe_error(
            f"{dotted_path!r}: the module {module_path!r} has no {name!r}"
            f"{format_name_suggestion(name, classes)}",
            f"name one of its classes: {', '.join(classes) or 'it has none'}",
        )
    return value


def _check_run_method(agent: object, dotted_path: str, extra_kwargs: Sequence[str]) -> None:
    is_class = inspect.isclass(agent)
    run = getattr(agent, "run", None)
    if run is None and not is_class:
        kind = type(agent).__name__
        raise _build_workflow_recipe_error(
            f"{dotted_path!r} is a {kind}, expected a class", f"make it {_AGENT_SHAPE_HINT}"
        )
    if not inspect.iscoroutinefunction(run):
        fault = "has no method `run`" if run is None else "has a `run` that is not `async def`"
        raise _build_workflow_recipe_error(
            f"{dotted_path!r} {fault}", f"make it {_AGENT_SHAPE_HINT}"
        )
    arguments: list[Any] = [None, {}] if is_class else [{}]
    try:
        inspect.signature(run).bind(*arguments, **dict.fromkeys(extra_kwargs))
    except TypeError as error:
        raise _build_workflow_recipe_error(
            f"{dotted_path!r}: `run{inspect.signature(run)}` cannot be called with `data` and the "
            f"keywords {', '.join(extra_kwargs)} ({error})",
            f"make it {_AGENT_SHAPE_HINT}, or set rollout.agent.mode=subproc",
        ) from error


def _build_agent(agent_class: Any, dotted_path: str, kwargs: Mapping[str, Any]) -> Agent:
    # The message has names only: values may be secrets, and errors are stored and sent.
    arguments = f"with the arguments {', '.join(kwargs)}" if kwargs else "without arguments"
    try:
        inspect.signature(agent_class).bind(**kwargs)
    except TypeError as error:
        raise _build_workflow_recipe_error(
            f"{dotted_path!r} cannot be built {arguments} ({error})",
            f"match its constructor: {agent_class.__name__}{inspect.signature(agent_class)}",
            key="rollout.workflow_kwargs",
        ) from error
    try:
        agent: Agent = agent_class(**kwargs)
    except RecipeError:
        raise  # its message names the change to make
    except (Exception, SystemExit) as error:  # boundary: the constructor is the user's code
        raise _build_workflow_recipe_error(
            f"{dotted_path!r} cannot be built {arguments}: {describe_user_error(error)}",
            "fix the constructor or its arguments",
            key="rollout.workflow_kwargs",
        ) from error
    return agent


def _build_workflow_recipe_error(
    message: str, hint: str, key: str = "rollout.workflow"
) -> RecipeError:
    return RecipeError(message, key=key, hint=hint)
