"""Worker of a gym without a package: counts, sleeps, fails or leaves on command."""

import asyncio
import errno
import os
import subprocess
import sys
from typing import Any

from worker_loop import Gym, serve

FORGER = r"""
import os, sys
try:
    os.write(0, b'{"text": "forged", "reward": 9.0, "done": true}\n')
except OSError:
    sys.exit(3 + len(sys.stdin.read()))
"""
"""A program that takes the gym's standard input, which it inherits, for the link to the driver."""


class Counting(Gym):
    def __init__(self, config: dict[str, Any]) -> None:
        if config.get("is_broken"):
            raise ValueError("no such gym")
        self._episodes = 0

    async def reset(self, task: dict[str, Any]) -> dict[str, Any]:
        print("packages print what they like")
        self._episodes += 1
        variables = sorted(set(os.environ) & {"SECRET", "COLOR"})
        return {"text": f"episode {self._episodes} of {os.getpid()}, {variables}, {task}"}

    async def step(self, reply: dict[str, Any]) -> dict[str, Any]:
        match reply["text"]:
            case "sleep":
                await asyncio.sleep(60)
            case "fail":
                raise ValueError("not that")
            case "run short":
                raise RuntimeError("no tool server") from OSError(errno.EAGAIN, "no process")
            case "leave":
                os._exit(3)
            case "start":
                ended = subprocess.run([sys.executable, "-c", FORGER], check=False)
                return {"text": f"left {ended.returncode}", "reward": 1.0, "done": False}
            case text if "found" in text:
                names: dict[str, Any] = {}
                exec(text, names)  # a gym that runs a model's code might do so
                return {"text": "", "found": names["found"], "reward": 1.0, "done": False}
            case "nan":
                return {"text": "", "reward": float("nan"), "done": True}
        return {"text": "on", "reward": 1.0, "done": False}


if __name__ == "__main__":
    serve(Counting)
