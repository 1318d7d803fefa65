"""Agent that runs what a model says as commands in the sandbox of a Harbor task."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

from areal_hpc.jobs.processes.descendants import list_descendants
from areal_hpc.reward.harbor import judge_harbor_task
from areal_hpc.sandbox.sandbox import Sandbox
from areal_hpc.wire.agent_reward import Reward

TURNS = 2


class Repairing:
    """Whatever a tiny model says is run; every sandbox's processes are a line of `note`."""

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
            said = reply.raise_for_status().json()["choices"][0]["message"]["content"] or "true"
            told = await sandbox.exec(said.replace("\0", ""), timeout_s=10)
            messages += [{"role": "assistant", "content": said}]
            messages += [{"role": "user", "content": f"exit code {told.exit_code}"}]
        await asyncio.sleep(0.5)
        return await judge_harbor_task(data)

    def _tell(self, sandbox: Sandbox) -> None:
        pids = [sandbox.pid, *list_descendants(sandbox.pid)]
        mounts = {str(Path(f"/proc/{pid}/ns/mnt").readlink()) for pid in pids}
        own = str(Path("/proc/self/ns/mnt").readlink())
        line = {"driver": os.getpid(), "pids": pids, "namespaces": sorted(mounts - {own})}
        with self._note.open("a") as file:
            file.write(json.dumps(line) + "\n")
