"""Agent of one command: the model's reply runs in the sandbox, and the task's tests judge it."""

from typing import Any

from areal_hpc.agents.openai_agent import make_client
from areal_hpc.reward.harbor import judge_harbor_task
from areal_hpc.wire.agent_reward import Reward


class CommandAgent:
    """Agent that runs the reply as a shell command. `request` goes into the model call."""

    def __init__(self, command_timeout_s: float = 10.0, **request: Any) -> None:
        self.command_timeout_s, self.request = command_timeout_s, request

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> Reward:
        reply = await make_client(extra_kwargs).chat.completions.create(
            model="default", messages=data["messages"], **self.request
        )
        command = (reply.choices[0].message.content or "").replace("\0", "")
        await data["sandbox"].exec(command or "true", timeout_s=self.command_timeout_s)
        return await judge_harbor_task(data)
