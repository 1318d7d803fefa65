"""Agent whose tools are those of servers of the Model Context Protocol (MCP)."""

from collections.abc import Mapping
from typing import Any

from areal_hpc.agents.gyms.gym_agent import GymAgent
from areal_hpc.agents.gyms.gym_worker import get_host_of_url
from areal_hpc.agents.math_tools import SubprocessRewardFunction
from areal_hpc.errors import RecipeError
from areal_hpc.wire.agent_reward import Reward

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
