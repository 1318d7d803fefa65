"""Conversation between the model and a gym: observations and results in, replies out."""

import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from areal_hpc.agents.gym_worker import GymWorker, get_host_of_url, parse_hosts
from areal_hpc.agents.math_tools import SubprocessRewardFunction
from areal_hpc.agents.openai_agent import make_client
from areal_hpc.errors import RecipeError
from areal_hpc.jobs.processes.line_workers import WorkerPool
from areal_hpc.sandbox.isolated_worker import WorkerSettings
from areal_hpc.sandbox.session_forwarder import format_host
from areal_hpc.wire.agent_reward import Reward


class GymAgent:
    """Plays a gym until it is done, `max_turns` at most; each reply has the reward of its step.

    Gyms are others' code that meets what the model writes: each episode is played by a fork of a
    process that is isolated as `reward.isolation` says, and sees its Python and what is named here.

    Args:
        script: The worker's program.
        config: What its gym is built from.
        python: The Python that has the gym's package; empty: this one.
        prompt: What the model is told before all else.
        max_turns: Model calls of an episode.
        max_workers: Processes of the gym; an episode has one to itself.
        step_timeout_s: Time of one step.
        variables: Environment of the gym; of its `PYTHONPATH` the folders are shown, too.
        readonly_folders: Folders of the node that the gym sees, at their own places.
        hosts: What the gym reaches, as `HOST:PORT`, through the proxy of HTTP that its environment
            names; else nothing.
        request: What else goes into model calls, such as `temperature`.
    """

    ends_with_answer: ClassVar[bool] = False
    """The gym plays a whole episode by itself, and answers once."""
    named_hosts: ClassVar[tuple[str, ...]] = ()
    """Hosts that each episode names."""

    def __init__(
        self,
        script: str,
        config: Mapping[str, Any],
        *,
        python: str = "",
        prompt: str = "",
        max_turns: int = 20,
        max_workers: int = 16,
        step_timeout_s: float = 60.0,
        variables: Mapping[str, str] | None = None,
        readonly_folders: Sequence[str] = (),
        hosts: Sequence[str] = (),
        **request: Any,
    ) -> None:
        self.prompt, self.max_turns, self.request = prompt, max_turns, request
        self.step_timeout_s, self._hosts = step_timeout_s, parse_hosts(hosts)
        start = partial(
            GymWorker.start,
            python or sys.executable,
            script,
            config,
            variables or {},
            readonly_folders,
            WorkerSettings(
                ends_with_answer=self.ends_with_answer, hosts=(*self._hosts, *self.named_hosts)
            ),
        )
        self._workers = WorkerPool(max_workers, start)

    async def run(
        self, data: dict[str, Any], **extra_kwargs: Any
    ) -> float | Reward | dict[str, float]:
        rewards, _ = await self.play(data, extra_kwargs)
        return rewards

    def check_isolation(self, isolation: str | None) -> None:
        """Refuse a sandbox that this agent would not use."""
        if isolation is not None:
            raise RecipeError(
                f"rollout.agent.isolation is {isolation}, and a gym runs in no sandbox of an "
                "agent's",
                key="rollout.agent.isolation",
                hint="remove it: reward.isolation is how a gym is isolated",
            )

    def close(self) -> None:
        self._workers.close_idle_workers()

    async def play(
        self, data: dict[str, Any], extra_kwargs: dict[str, Any]
    ) -> tuple[dict[str, float], str]:
        """The rewards of replies, and the last words of the model."""
        client, rewards, text = make_client(extra_kwargs), dict[str, float](), ""
        task = {name: value for name, value in data.items() if name not in ("messages", "sandbox")}
        async with self._workers.acquire() as worker, worker.reach_hosts(self._hosts):
            told = await worker.request({"do": "reset", "task": task}, self.step_timeout_s)
            tools = {"tools": told["tools"]} if told.get("tools") else {}
            prompt = [{"role": "system", "content": self.prompt}] if self.prompt else []
            shown = [{"role": "user", "content": told["text"]}] if told["text"] else []
            messages = [*prompt, *told.get("messages", ()), *data.get("messages", ()), *shown]
            try:
                for _ in range(self.max_turns):
                    reply: Any = await client.chat.completions.create(
                        model="default", messages=messages, **tools, **self.request
                    )
                    message = reply.choices[0].message
                    text = message.content or ""
                    told = await worker.request(
                        {"do": "step", "reply": encode_reply_for_worker(message)},
                        self.step_timeout_s,
                    )
                    rewards[reply.id] = told["reward"]
                    if told["done"]:
                        break
                    messages += [message, *build_gym_answer_messages(told)]
            finally:
                if worker.is_usable:
                    await worker.request({"do": "close"}, self.step_timeout_s)
        return rewards, text


def encode_reply_for_worker(message: Any) -> dict[str, Any]:
    calls = [
        {"id": one.id, "name": one.function.name, "arguments": one.function.arguments}
        for one in message.tool_calls or ()
    ]
    return {"text": message.content or "", "calls": calls}


def build_gym_answer_messages(gym_answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    results = gym_answer.get("results", ())
    if results:
        return [
            {"role": "tool", "tool_call_id": one["id"], "content": one["text"]} for one in results
        ]
    return [{"role": "user", "content": gym_answer["text"]}]


class GymnasiumAgent(GymAgent):
    """The model reads observations and writes actions, `<action>2</action>`.

    A task may have `seed` and `options`, for `reset`. With `env_kwargs: {render_mode: ansi}` the
    model sees what the environment draws.

    Args:
        env_id: As `gymnasium.make` takes it.
        env_kwargs: Its other arguments.
        imports: Modules that register environments.
        gym_agent_options: See `GymAgent`.
    """

    def __init__(
        self,
        env_id: str,
        env_kwargs: Mapping[str, Any] | None = None,
        imports: Sequence[str] = (),
        **gym_agent_options: Any,
    ) -> None:
        config = {"env_id": env_id, "env_kwargs": dict(env_kwargs or {}), "imports": [*imports]}
        super().__init__("gymnasium_worker.py", config, **gym_agent_options)


class NemoGymAgent(GymAgent):
    """Plays rows of NeMo Gym's data sets, as they are: `train_dataset: {path: example.jsonl}`.

    A server with steps answers each reply; another offers its tools, and verifies the last reply.

    Args:
        server: Its folder in `resources_servers`, such as "blackjack".
        options: Further fields of its configuration.
        gym_agent_options: See `GymAgent`.
    """

    def __init__(
        self, server: str, options: Mapping[str, Any] | None = None, **gym_agent_options: Any
    ) -> None:
        config = {"server": server, "options": dict(options or {})}
        super().__init__("nemo_gym_worker.py", config, **gym_agent_options)


class OpenEnvAgent(GymAgent):
    """The model reads observations and writes actions: a text, or JSON in `<action>` tags.

    A task may have `reset`, arguments of the environment's `reset`.

    Args:
        base_url: A server that runs already; or
        app: `package.module:app` of one, which each worker starts for itself.
        gym_agent_options: See `GymAgent`; `variables: {PYTHONPATH: ...}` tells where the app's
            package is.
    """

    def __init__(self, base_url: str = "", app: str = "", **gym_agent_options: Any) -> None:
        if bool(base_url) == bool(app):
            raise RecipeError(
                f"give one of base_url and app, got {base_url!r} and {app!r}",
                key="rollout.workflow_kwargs.base_url",
                hint="app=package.module:app starts a server of its own",
            )
        config = {"base_url": base_url.rstrip("/"), "app": app}
        if base_url:
            host = get_host_of_url(base_url, "rollout.workflow_kwargs.base_url")
            gym_agent_options["hosts"] = [*gym_agent_options.get("hosts", ()), host]
        super().__init__("openenv_worker.py", config, **gym_agent_options)


_MODEL_BY_PROXY = {"NO_PROXY": "", "no_proxy": ""}
"""The model may be at an address of loopback, of the node and not of the worker."""


class VerifiersAgent(GymAgent):
    """Has verifiers play a task of a task set: its harness calls the model, its rewards count.

    A task has `index`, the place of the task in the task set (0).

    Args:
        taskset: `id` of the task set's package, and what else its configuration has.
        harness: Its harness; `null` is a conversation without tools.
        env: Further configuration of the environment.
        timeout_s: Time of an episode.
        variables: See `GymAgent`.
        gym_agent_options: See `GymAgent`.
    """

    ends_with_answer = True
    named_hosts = ("model:80",)  # stands for the model's endpoint

    def __init__(
        self,
        taskset: Mapping[str, Any],
        harness: Mapping[str, Any] | None = None,
        env: Mapping[str, Any] | None = None,
        *,
        timeout_s: float = 600.0,
        variables: Mapping[str, str] | None = None,
        **gym_agent_options: Any,
    ) -> None:
        config = {
            "taskset": dict(taskset),
            "harness": dict(harness or {"id": "null"}),
            "env": dict(env or {}),
        }
        super().__init__(
            "verifiers_worker.py",
            config,
            step_timeout_s=timeout_s,
            variables=_MODEL_BY_PROXY | dict(variables or {}),
            **gym_agent_options,
        )

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> Reward:
        task = {
            "task": {"index": data.get("index", 0)},
            "base_url": extra_kwargs.get("base_url") or os.environ["OPENAI_BASE_URL"],
            "api_key": extra_kwargs.get("api_key") or os.environ["OPENAI_API_KEY"],
            "sampling": self.request,
        }
        hosts = (*self._hosts, format_host(str(task["base_url"])))
        async with self._workers.acquire() as worker, worker.reach_hosts(hosts):
            told = await worker.request({"do": "reset", "task": task}, self.step_timeout_s)
        return Reward(told["reward"], parts=told["parts"], metrics=told["metrics"])


_OPTIONAL_KEYS_BY_SERVER_KIND = {"command": {"env", "cwd"}, "url": {"headers"}}
"""What a server has: one of these, and what may stand beside it."""


class McpAgent(GymAgent):
    """The model calls tools until it answers; a reward function judges the answer.

    Args:
        servers: By name, `{"command": [...]}` (stdio; with `env`, `cwd`) or `{"url": "http://..."}`
            (streamable HTTP; with `headers`). With several, a tool's name begins with that
            of its server and two underscores. Those of `command` run where the gym does, and see
            what it sees; those of `url` are reached.
        reward_fn_path: Reward function of AReaL's signature, `package.module.function`.
        call_timeout_s: Time of one tool call.
        gym_agent_options: See `GymAgent`.
    """

    def __init__(
        self,
        servers: Mapping[str, Mapping[str, Any]],
        reward_fn_path: str,
        call_timeout_s: float = 30.0,
        **gym_agent_options: Any,
    ) -> None:
        for name, how in servers.items():
            check_server_config(name, how)
        config = {"servers": {**servers}, "call_timeout_s": call_timeout_s}
        hosts = [
            get_host_of_url(how["url"], f"rollout.workflow_kwargs.servers.{name}.url")
            for name, how in servers.items()
            if "url" in how
        ]
        gym_agent_options["hosts"] = [*gym_agent_options.get("hosts", ()), *hosts]
        super().__init__("mcp_worker.py", config, **gym_agent_options)
        self.reward = SubprocessRewardFunction(reward_fn_path)

    async def run(
        self, data: dict[str, Any], **extra_kwargs: Any
    ) -> float | Reward | dict[str, float]:
        _, text = await self.play(data, extra_kwargs)
        return await self.reward(text, data)


def check_server_config(server_name: str, server_config: Mapping[str, Any]) -> None:
    kinds = [kind for kind in _OPTIONAL_KEYS_BY_SERVER_KIND if kind in server_config]
    if len(kinds) == 1 and not (
        unknown := server_config.keys() - {kinds[0]} - _OPTIONAL_KEYS_BY_SERVER_KIND[kinds[0]]
    ):
        return
    found = (
        f"unknown keys {sorted(unknown)}" if len(kinds) == 1 else f"keys {sorted(server_config)}"
    )
    raise RecipeError(
        f"the server {server_name!r} has {found}",
        key=f"rollout.workflow_kwargs.servers.{server_name}",
        hint="give `command` (with `env`, `cwd`) or `url` (with `headers`)",
    )
