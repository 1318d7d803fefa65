"""Agent for Harbor's tasks with the OpenAI SDK: the model runs commands, the task's tests judge.

It needs a folder of such tasks as `train_dataset.path`, and a sandbox, such as
`rollout.agent.isolation: bwrap`.
"""

import asyncio
import contextlib
import json
from typing import Any

from areal_hpc.agents.openai_agent import make_client
from areal_hpc.reward.harbor import find_harbor_task, judge_harbor_task
from areal_hpc.sandbox.sandbox import Sandbox
from areal_hpc.wire.agent_reward import Reward

COMMAND_TOOL: Any = {
    "type": "function",
    "function": {
        "name": "run_command",
        "description": "Run a shell command; its output and exit code come back.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}


class HarborAgent:
    """Agent that runs the model's commands up to a reply without a tool call, then the tests.

    Args:
        max_turns: Maximum number of model calls of an episode.
        command_timeout_s: Time limit of one command.
        max_shown_chars: Length of a command's output that the model reads, from its end.
        request: Further arguments of model calls, such as `temperature`.
    """

    def __init__(
        self,
        max_turns: int = 30,
        command_timeout_s: float = 120.0,
        max_shown_chars: int = 8000,
        **request: Any,
    ) -> None:
        self.max_turns = max_turns
        self.command_timeout_s = command_timeout_s
        self.max_shown_chars = max_shown_chars
        self.request = request

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> Reward:
        task = find_harbor_task(data)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(task.agent_timeout_s if task else None):
                await self._let_model_run_commands(data, extra_kwargs)
        return await judge_harbor_task(data)

    async def _let_model_run_commands(
        self, data: dict[str, Any], extra_kwargs: dict[str, Any]
    ) -> None:
        client, messages = make_client(extra_kwargs), list(data["messages"])
        for _ in range(self.max_turns):
            reply: Any = await client.chat.completions.create(
                model="default", messages=messages, tools=[COMMAND_TOOL], **self.request
            )
            message = reply.choices[0].message
            if not message.tool_calls:
                return
            messages.append(message)
            for call in message.tool_calls:
                output = await self._run_command_of_tool_call(
                    call.function.arguments, data["sandbox"]
                )
                messages.append({"role": "tool", "tool_call_id": call.id, "content": output})

    async def _run_command_of_tool_call(self, arguments: str, sandbox: Sandbox) -> str:
        try:
            command = json.loads(arguments)["command"]
            if not isinstance(command, str) or "\0" in command:
                raise TypeError
        except (ValueError, KeyError, TypeError, RecursionError):
            return 'expected {"command": "..."}'
        result = await sandbox.exec(command, timeout_s=self.command_timeout_s)
        timed_out, code = result.timed_out, result.exit_code
        ending = "was stopped, it took too long" if timed_out else f"exit code {code}"
        return f"{result.text[-self.max_shown_chars :]}\n({ending})"
