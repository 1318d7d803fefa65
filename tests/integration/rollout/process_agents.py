"""Agents for separate processes, which learn of the session from the environment alone."""

import contextlib
import json
import os
import stat
import time
import urllib.request
from pathlib import Path
from typing import Any


class Blocking:
    def __init__(self, reward: float = 1.0) -> None:
        self.reward = reward

    async def run(self, data: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
            json.dumps({"model": "m", "messages": data["messages"]}).encode(),
            {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
        )
        with urllib.request.urlopen(request) as answer:
            answer.read()
        return self.reward


class Hostile:
    """Agent that attacks its driver as a model's program might; `data["does"]` names the attack."""

    async def run(self, data: dict[str, Any]) -> Any:
        match data["does"]:
            case "returns an object with code":
                return _Planted(data["note"])
            case "answers half a message" | "answers no JSON":
                self._write_on_sockets(b"7 by" if "half" in data["does"] else b"\x80\x04K\x07.\n")
                time.sleep(600)
            case "answers too much":
                self._write_on_sockets(b"x" * (40 << 20))
            case "leaves a daemon and hangs":
                _start_daemon(data["note"])
                time.sleep(600)
        return 1.0

    @staticmethod
    def _write_on_sockets(content: bytes) -> None:
        """Write on each as much as its other end reads: one of them is that of the answers."""
        for path in Path("/proc/self/fd").iterdir():
            rest, waits = content, 0
            with contextlib.suppress(OSError):
                is_socket = stat.S_ISSOCK(os.fstat(int(path.name)).st_mode)
                while is_socket and rest and waits < 20:
                    try:
                        rest = rest[os.write(int(path.name), rest[: 1 << 20]) :]
                        waits = 0
                    except BlockingIOError:
                        time.sleep(0.01)
                        waits += 1


class _Planted:
    """Object whose pickle writes a file in the process that loads it."""

    def __init__(self, note: str) -> None:
        self.note = note

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(self.note),)


def _start_daemon(note: str) -> None:
    """Start a daemon by two forks and a session of its own; return when it runs."""
    if os.fork():
        os.wait()
        return
    os.setsid()
    if (pid := os.fork()) == 0:
        os.execvp("sleep", ["sleep", "600"])
    Path(note).write_text(str(pid))
    os._exit(0)
