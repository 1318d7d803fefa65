"""Agents for processes of their own; they know of the session only what the environment says."""

import asyncio
import contextlib
import errno
import json
import os
import stat
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from areal_hpc import Reward


class Blocking:
    """Calls without `await`; the task says what happens then."""

    def __init__(self, reward: float = 1.0) -> None:
        self.reward = reward
        self.runs = 0

    async def run(self, data: dict[str, Any]) -> Any:
        self.runs += 1
        request = urllib.request.Request(
            f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
            json.dumps({"model": "m", "messages": data["messages"]}).encode(),
            {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
        )
        with urllib.request.urlopen(request) as answer:
            answer.read()
        match data.get("then"):
            case "hang":
                time.sleep(600)
            case "crash":
                os._exit(7)
            case "raise":
                raise ValueError("no idea")
            case "exit":
                sys.exit(2)
            case "run short":
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            case "environment":
                names = [name for name in os.environ if name.split("_")[0] in _SDKS]
                Path(data["note"]).write_text("\n".join(f"{n}={os.environ[n]}" for n in names))
            case "first environment":
                Path(data["note"]).write_bytes(Path("/proc/self/environ").read_bytes())
            case "overlap":
                _write(data["note"], "begin")
                await asyncio.sleep(0.2)
                _write(data["note"], "end")
                return float(self.runs)
        return self.reward


_SDKS = ("OPENAI", "ANTHROPIC")


def _write(note: str, what: str) -> None:
    with Path(note).open("a") as file:
        file.write(f"{what}\n")


class Unbuildable:
    def __init__(self) -> None:
        raise RuntimeError("no license")

    async def run(self, data: dict[str, Any]) -> float:
        return 1.0


class Graded:
    """Says what its reward was made of."""

    async def run(self, data: dict[str, Any]) -> Reward:
        from openai import OpenAI

        with OpenAI() as client:
            reply = client.chat.completions.create(model="default", messages=data["messages"])
        text = reply.choices[0].message.content or ""
        parts = {"correct": 0.8 * (data["answer"] in text), "format": 0.2 * ("Answer:" in text)}
        return Reward(
            sum(parts.values()),
            parts=parts,
            metrics={"reply_characters": len(text)},
            note="no answer" if "Answer:" not in text else "",
        )


class Hostile:
    """Does to its driver what the program of a model might make it do; `data["does"]` says what."""

    async def run(self, data: dict[str, Any]) -> Any:
        match data["does"]:
            case "returns an object with code":
                return _Planted(data["note"])
            case "answers half a message" | "answers no JSON":
                self._write_on_sockets(b"7 by" if "half" in data["does"] else b"\x80\x04K\x07.\n")
                time.sleep(600)
            case "answers too much":
                self._write_on_sockets(b"x" * (40 << 20))
            case "leaves a daemon":
                _start_daemon(data["note"])
            case "leaves a daemon and hangs":
                _start_daemon(data["note"])
                time.sleep(600)
        return 1.0

    @staticmethod
    def _write_on_sockets(content: bytes) -> None:
        """On each as much as its other end reads: one of them is that of the answers."""
        for path in Path("/proc/self/fd").iterdir():
            left, waits = content, 0
            with contextlib.suppress(OSError):
                is_socket = stat.S_ISSOCK(os.fstat(int(path.name)).st_mode)
                while is_socket and left and waits < 20:
                    try:
                        left = left[os.write(int(path.name), left[: 1 << 20]) :]
                        waits = 0
                    except BlockingIOError:
                        time.sleep(0.01)
                        waits += 1


class _Planted:
    """A pickle of it writes a file in the process that loads it."""

    def __init__(self, note: str) -> None:
        self.note = note

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(self.note),)


def _start_daemon(note: str) -> None:
    """Two forks and a session of its own; returns when it stands."""
    if os.fork():
        os.wait()
        return
    os.setsid()
    if (pid := os.fork()) == 0:
        os.execvp("sleep", ["sleep", "600"])
    Path(note).write_text(str(pid))
    os._exit(0)
