"""Agents that play Harbor's tasks without the help of a model."""

import os
from typing import Any

import httpx

from areal_hpc.reward.harbor import find_harbor_task, judge_harbor_task
from areal_hpc.wire.agent_reward import Reward
from tests.integration.rollout.test_episode import ask


class Playing:
    """Agent that calls the model and then runs the task's solution or another command."""

    def __init__(self, command: str = "") -> None:
        self.command = command

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> Reward:
        if extra_kwargs:
            await ask(extra_kwargs)
        else:
            async with httpx.AsyncClient() as client:
                url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
                await ask({"http_client": client, "base_url": url, "api_key": key})
        task, sandbox = find_harbor_task(data), data["sandbox"]
        assert task is not None
        result = await sandbox.exec("pwd; ls /tests /solution /logs")
        assert result.stdout.decode() == "/app\n/logs:\n\n/solution:\n\n/tests:\n", result.text
        if self.command:
            await sandbox.exec(self.command)
        else:
            await task.run_solution_script(sandbox)
        return await judge_harbor_task(data)
