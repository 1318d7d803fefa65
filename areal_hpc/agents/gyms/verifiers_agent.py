"""Agent for environments of verifiers 0.4 (`verifiers.v1`)."""

import os
from collections.abc import Mapping
from typing import Any

from areal_hpc.agents.gyms.gym_agent import GymAgent
from areal_hpc.sandbox.session_forwarder import format_host
from areal_hpc.wire.agent_reward import Reward

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
