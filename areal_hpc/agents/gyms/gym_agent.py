"""Conversation between the model and a gym: observations and results in, replies out."""

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from areal_hpc.agents.gyms.gym_worker import GymWorker, parse_hosts
from areal_hpc.agents.openai_agent import make_client
from areal_hpc.errors import RecipeError
from areal_hpc.jobs.processes.line_workers import WorkerPool
from areal_hpc.sandbox.isolated_worker import WorkerSettings
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
