"""Agents that run commands in the sandbox of their episode."""

import asyncio
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

from areal_hpc.jobs.processes.process_ties import list_descendants
from areal_hpc.sandbox.sandbox import Sandbox

FAILED_START = "echo bwrap: no namespace: Resource temporarily unavailable >&2; exit 1"
CALL = """
import json, os, urllib.request
url = os.environ['OPENAI_BASE_URL'] + '/chat/completions'
body = json.dumps({'model': 'default', 'messages': [{'role': 'user', 'content': '2 + 2 ='}]})
headers = {'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']}
headers['Content-Type'] = 'application/json'
request = urllib.request.Request(url, body.encode(), headers)
print(json.load(urllib.request.urlopen(request, timeout=30))['object'])
"""


class Commanding:
    """Agent whose program in the sandbox calls the model, and that notes its processes then."""

    def __init__(self, note: str, then: str = "return", writes: int = 0) -> None:
        self.note, self.then, self.writes = Path(note), then, writes

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        sandbox: Sandbox = data["sandbox"]
        await sandbox.exec("setsid sleep 300 > /dev/null & echo of this episode > left")
        await sandbox.put("large", bytes(self.writes))
        result = await sandbox.exec(["python3", "-c", CALL])
        pids = [sandbox.pid, *list_descendants(sandbox.pid)]
        with self.note.open("a") as file:
            file.write(f"{os.getpid()} {' '.join(map(str, pids))}\n")
        if self.then == "hang":
            await asyncio.sleep(300)
        if self.then == "lose":
            os.kill(sandbox.pid, signal.SIGKILL)
            await sandbox.exec("sleep 5")
        return float(result.stdout == b"chat.completion\n")


class CommandingOnLoadedNode(Commanding):
    """Agent whose process finds the node full for bubblewrap, although the driver's did not."""

    def __init__(self, note: str) -> None:
        super().__init__(note)
        start = subprocess.Popen

        def start_nothing(command: object, **settings: Any) -> subprocess.Popen[bytes]:
            return start(["sh", "-c", FAILED_START], **settings)

        setattr(subprocess, "Popen", start_nothing)  # noqa: B010  # mypy knows a class there
