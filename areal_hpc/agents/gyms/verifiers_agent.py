"""Agent for environments of verifiers 0.4 (`verifiers.v1`)."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from areal_hpc.agents.gyms.gym_worker import build_gym_worker_pool, parse_hosts, refuse_sandbox
from areal_hpc.sandbox.isolated_worker import WorkerSettings
from areal_hpc.sandbox.session_forwarder import format_host
from areal_hpc.wire.agent_reward import Reward

MODEL_HOST = "model:80"
"""Stands for the model's endpoint, which each episode names."""
_MODEL_BY_PROXY = {"NO_PROXY": "", "no_proxy": ""}
"""The model may be at an address of loopback, of the node and not of the worker."""


class VerifiersAgent:
    """Has verifiers play a task of a task set: its harness calls the model, its rewards count.

    A task has `index`, the place of the task in the task set (0).

    Args:
        taskset: `id` of the task set's package, and what else its configuration has.
        harness: Its harness; `null` is a conversation without tools.
        env: Further configuration of the environment.
        python: The Python that has verifiers and the task set; empty: this one.
        max_workers: Processes; an episode has one to itself.
        timeout_s: Time of an episode.
        variables: Environment of these processes, which are isolated as `GymAgent`'s.
        readonly_folders: See `GymAgent`.
        hosts: What they reach, as `HOST:PORT`, besides the model.
        request: What else goes into model calls, such as `temperature`.

    Raises:
        RecipeError: A host is no `HOST:PORT`.
    """

    def __init__(
        self,
        taskset: Mapping[str, Any],
        harness: Mapping[str, Any] | None = None,
        env: Mapping[str, Any] | None = None,
        *,
        python: str = "",
        max_workers: int = 16,
        timeout_s: float = 600.0,
        variables: Mapping[str, str] | None = None,
        readonly_folders: Sequence[str] = (),
        hosts: Sequence[str] = (),
        **request: Any,
    ) -> None:
        config = {
            "taskset": dict(taskset),
            "harness": dict(harness or {"id": "null"}),
            "env": dict(env or {}),
        }
        self.timeout_s, self.request, self._hosts = timeout_s, request, parse_hosts(hosts)
        self._workers = build_gym_worker_pool(
            "verifiers_worker.py",
            config,
            max_workers,
            python=python,
            variables=_MODEL_BY_PROXY | dict(variables or {}),
            readonly_folders=readonly_folders,
            settings=WorkerSettings(ends_with_answer=True, hosts=(*self._hosts, MODEL_HOST)),
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
            told = await worker.request({"do": "reset", "task": task}, self.timeout_s)
        return Reward(told["reward"], parts=told["parts"], metrics=told["metrics"])

    def check_isolation(self, isolation: str | None) -> None:
        refuse_sandbox(isolation)

    def close(self) -> None:
        self._workers.close_idle_workers()
