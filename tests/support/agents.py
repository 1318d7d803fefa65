"""Agents of runs under test."""

import asyncio
import json
import os
import random
import time
from pathlib import Path
from typing import Any

from areal_hpc.jobs.processes.process_ties import list_descendants
from areal_hpc.reward.harbor import judge_harbor_task
from areal_hpc.sandbox.sandbox import Sandbox
from areal_hpc.wire.agent_reward import Reward
from examples.quickstart.agent import ArithmeticAgent

BITE_BYTES = 64 * 1024**2
MOST_BITES = 96
"""6 GiB: a host without limits survives this."""


class SlowAgent(ArithmeticAgent):
    """Agent that waits before it asks, now and then for long, so that a run of it lasts."""

    def __init__(self, mean_pause_s: float) -> None:
        super().__init__()
        self._mean_pause_s = mean_pause_s

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        await asyncio.sleep(random.expovariate(1.0 / self._mean_pause_s))
        return await super().run(data, **extra_kwargs)


class LateAgent(ArithmeticAgent):
    """Agent that waits between reply and reward: its tokens are old when trained."""

    def __init__(self, judged_after_s: float) -> None:
        super().__init__()
        self._judged_after_s = judged_after_s

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        reward = await super().run(data, **extra_kwargs)
        await asyncio.sleep(self._judged_after_s)
        return reward


class HungryAgent(SlowAgent):
    """Slow agent; the episode that removes the file `food` allocates until killed."""

    def __init__(self, mean_pause_s: float, food: str) -> None:
        super().__init__(mean_pause_s)
        self._food = Path(food)

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        try:
            self._food.unlink()
        except FileNotFoundError:
            return await super().run(data, **extra_kwargs)
        eaten = [b"x" * BITE_BYTES for _ in range(MOST_BITES)]
        raise MemoryError(f"nobody stopped an agent that took {len(eaten) * BITE_BYTES} bytes")


TURNS = 2


class Repairing:
    """Agent that runs all that a tiny model writes, and notes its sandbox's processes in `note`."""

    def __init__(self, note: str) -> None:
        self._note = Path(note)

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> Reward:
        sandbox: Sandbox = data["sandbox"]
        await sandbox.exec("setsid sleep 600 > /dev/null 2>&1 &")
        self._tell(sandbox)
        messages = list(data["messages"])
        for _ in range(TURNS):
            reply = await extra_kwargs["http_client"].post(
                f"{extra_kwargs['base_url']}/chat/completions",
                headers={"authorization": f"Bearer {extra_kwargs['api_key']}"},
                json={"model": "default", "messages": messages, "max_completion_tokens": 16},
            )
            command = reply.raise_for_status().json()["choices"][0]["message"]["content"] or "true"
            result = await sandbox.exec(command.replace("\0", ""), timeout_s=10)
            messages += [{"role": "assistant", "content": command}]
            messages += [{"role": "user", "content": f"exit code {result.exit_code}"}]
        await asyncio.sleep(0.5)
        return await judge_harbor_task(data)

    def _tell(self, sandbox: Sandbox) -> None:
        pids = [sandbox.pid, *list_descendants(sandbox.pid)]
        mounts = {str(Path(f"/proc/{pid}/ns/mnt").readlink()) for pid in pids}
        own = str(Path("/proc/self/ns/mnt").readlink())
        line = {"driver": os.getpid(), "pids": pids, "namespaces": sorted(mounts - {own})}
        with self._note.open("a") as file:
            file.write(json.dumps(line) + "\n")


class ChatAgent:
    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        await self.ask(data, extra_kwargs)
        return 1.0

    async def ask(self, data: dict[str, Any], session: dict[str, Any], **settings: Any) -> str:
        reply = await session["http_client"].post(
            f"{session['base_url']}/chat/completions",
            headers={"authorization": f"Bearer {session['api_key']}"},
            json={"model": "default", "messages": data["messages"], **settings},
        )
        if reply.status_code != 200:
            raise RuntimeError(reply.text)
        message = reply.json()["choices"][0]["message"]
        return str(message["content"])


class TwoTurnAgent(ChatAgent):
    """Agent of two turns, the first of them streamed; it blocks its event loop between."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        reply = await self.ask(data, extra_kwargs)
        time.sleep(0.2)
        print(*(f"line {number}" for number in range(9)), sep="\n")
        turns = [{"role": "assistant", "content": reply}, {"role": "user", "content": "Sure?"}]
        await self.ask({"messages": [*data["messages"], *turns]}, extra_kwargs)
        return 0.5


class DelegatingAgent(ChatAgent):
    """Agent that asks a second one for help, and earns more than usual."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        await self.ask(data, extra_kwargs)
        await self.ask(data, extra_kwargs, metadata={"agent_id": "helper"})
        return 2.0 if data["answer"] == "42" else 0.0


class GreedyAgent(ChatAgent):
    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        await self.ask(data, extra_kwargs, temperature=0, max_tokens=4)
        return 1.0


class ProcessAgent:
    """Agent for mode `subproc`: a program that finds its session in the environment."""

    async def run(self, data: dict[str, Any]) -> float:
        import json
        import os
        import urllib.request

        request = urllib.request.Request(
            f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
            json.dumps({"model": "default", "messages": data["messages"]}).encode(),
            {
                "authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
                "content-type": "application/json",
            },
        )
        with urllib.request.urlopen(request) as reply:
            json.load(reply)
        return 2.0
