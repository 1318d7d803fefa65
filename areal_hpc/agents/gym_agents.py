"""Agents that play gyms: the model gets observations and tool results, the gym gets replies."""

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
    """Agent that plays a gym for at most `max_turns` calls; each reply has its step's reward.

    Gyms are third-party code that reads model output. A fork of a worker plays each episode,
    isolated by `reward.isolation`; it sees the worker's Python and what the arguments name.

    Args:
        script: Program of the worker.
        config: Configuration of its gym.
        python: Python that has the gym's package; empty: this one.
        prompt: System prompt.
        max_turns: Maximum number of model calls of an episode.
        max_workers: Number of worker processes; an episode has one to itself.
        step_timeout_s: Time limit of one step.
        variables: Environment of the gym; the folders of its `PYTHONPATH` are shown, too.
        readonly_folders: Folders of the node that the gym sees at the same paths.
        hosts: Hosts that the gym may reach, as `HOST:PORT`, through the HTTP proxy that its
            environment names.
        request: Further arguments of model calls, such as `temperature`.
    """

    ends_with_answer: ClassVar[bool] = False
    """Whether the gym plays a whole episode by itself, and answers once."""
    named_hosts: ClassVar[tuple[str, ...]] = ()
    """Host names that stand for hosts which each episode names."""

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
        """Refuse an agent's sandbox, which a gym would not use."""
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
        """Play an episode, and return the rewards by reply id and the text of the last reply."""
        client, rewards, text = make_client(extra_kwargs), dict[str, float](), ""
        task = {name: value for name, value in data.items() if name not in ("messages", "sandbox")}
        async with self._workers.acquire() as worker, worker.reach_hosts(self._hosts):
            answer = await worker.request({"do": "reset", "task": task}, self.step_timeout_s)
            tools = {"tools": answer["tools"]} if answer.get("tools") else {}
            prompt = [{"role": "system", "content": self.prompt}] if self.prompt else []
            shown = [{"role": "user", "content": answer["text"]}] if answer["text"] else []
            messages = [*prompt, *answer.get("messages", ()), *data.get("messages", ()), *shown]
            try:
                for _ in range(self.max_turns):
                    reply: Any = await client.chat.completions.create(
                        model="default", messages=messages, **tools, **self.request
                    )
                    message = reply.choices[0].message
                    text = message.content or ""
                    answer = await worker.request(
                        {"do": "step", "reply": encode_reply_for_worker(message)},
                        self.step_timeout_s,
                    )
                    rewards[reply.id] = answer["reward"]
                    if answer["done"]:
                        break
                    messages += [message, *build_gym_answer_messages(answer)]
            finally:
                if worker.is_usable:
                    await worker.request({"do": "close"}, self.step_timeout_s)
        return rewards, text


def encode_reply_for_worker(message: Any) -> dict[str, Any]:
    calls = [
        {"id": call.id, "name": call.function.name, "arguments": call.function.arguments}
        for call in message.tool_calls or ()
    ]
    return {"text": message.content or "", "calls": calls}


def build_gym_answer_messages(gym_answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    results = gym_answer.get("results", ())
    if results:
        return [
            {"role": "tool", "tool_call_id": item["id"], "content": item["text"]}
            for item in results
        ]
    return [{"role": "user", "content": gym_answer["text"]}]


class GymnasiumAgent(GymAgent):
    """Agent for environments of gymnasium; the model writes actions as `<action>2</action>`.

    A task may have `seed` and `options`, for `reset`. With `env_kwargs: {render_mode: ansi}` the
    model reads the environment's text rendering.

    Args:
        env_id: Id of the environment for `gymnasium.make`.
        env_kwargs: Further arguments of `gymnasium.make`.
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
    """Agent for rows of NeMo Gym's data sets, unchanged: `train_dataset: {path: example.jsonl}`.

    A server with steps answers each reply; other servers offer tools, and verify the last reply.

    Args:
        server: Folder of the server in `resources_servers`, such as "blackjack".
        options: Further fields of the server's configuration.
        gym_agent_options: See `GymAgent`.
    """

    def __init__(
        self, server: str, options: Mapping[str, Any] | None = None, **gym_agent_options: Any
    ) -> None:
        config = {"server": server, "options": dict(options or {})}
        super().__init__("nemo_gym_worker.py", config, **gym_agent_options)


class OpenEnvAgent(GymAgent):
    """Agent for environments of OpenEnv; the model writes a text, or JSON in `<action>` tags.

    A task may have `reset`, arguments of the environment's `reset`.

    Args:
        base_url: URL of a running server; or
        app: `package.module:app` of a server, which each worker starts for itself.
        gym_agent_options: See `GymAgent`; `variables: {PYTHONPATH: ...}` names the folder of the
            app's package.
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
"""Variables that send calls of the model through the proxy, also to the node's loopback."""


class VerifiersAgent(GymAgent):
    """Agent for tasks of verifiers, whose harness calls the model and which computes the reward.

    A task has `index`, the task's index in the task set, by default 0.

    Args:
        taskset: `id` of the task set's package, and further fields of its configuration.
        harness: Configuration of the harness; `null` is a conversation without tools.
        env: Further configuration of the environment.
        timeout_s: Time limit of an episode.
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
            answer = await worker.request({"do": "reset", "task": task}, self.step_timeout_s)
        return Reward(answer["reward"], parts=answer["parts"], metrics=answer["metrics"])


_OPTIONAL_KEYS_BY_SERVER_KIND = {"command": {"env", "cwd"}, "url": {"headers"}}
"""Optional keys of an MCP server's configuration, by its required key."""


class McpAgent(GymAgent):
    """Agent with tools of MCP servers, up to the model's answer, which a reward function judges.

    Args:
        servers: By name, `{"command": [...]}` (stdio; with `env`, `cwd`) or `{"url": "http://..."}`
            (streamable HTTP; with `headers`). With several, a tool's name begins with that of its
            server and two underscores. Those of `command` run with the gym, and see the same files;
            those of `url` become reachable.
        reward_fn_path: Reward function of AReaL's signature, `package.module.function`.
        call_timeout_s: Time limit of one tool call.
        gym_agent_options: See `GymAgent`.
    """

    def __init__(
        self,
        servers: Mapping[str, Mapping[str, Any]],
        reward_fn_path: str,
        call_timeout_s: float = 30.0,
        **gym_agent_options: Any,
    ) -> None:
        for name, server in servers.items():
            check_server_config(name, server)
        config = {"servers": {**servers}, "call_timeout_s": call_timeout_s}
        hosts = [
            get_host_of_url(server["url"], f"rollout.workflow_kwargs.servers.{name}.url")
            for name, server in servers.items()
            if "url" in server
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
    fault = (
        f"unknown keys {sorted(unknown)}" if len(kinds) == 1 else f"keys {sorted(server_config)}"
    )
    raise RecipeError(
        f"the server {server_name!r} has {fault}",
        key=f"rollout.workflow_kwargs.servers.{server_name}",
        hint="give `command` (with `env`, `cwd`) or `url` (with `headers`)",
    )
