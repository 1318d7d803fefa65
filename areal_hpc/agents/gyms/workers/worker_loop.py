"""Loop of a gym's worker: requests on standard input, answers on standard output, JSON lines.

Imports nothing of areal_hpc: it runs with whatever Python a gym needs.
"""

import asyncio
import builtins
import ctypes
import errno
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

PR_SET_PDEATHSIG = 1
_EXCEPTION_GROUP_TYPE: Any = getattr(builtins, "BaseExceptionGroup", ())
"""Since Python 3.11."""
_NO_THREAD_TEXT = "can't start new thread"
"""As in `areal_hpc/rollout/agent_errors.py`, which cannot be imported here."""


class Gym:
    """What a worker serves: one episode after the other."""

    async def reset(self, task: dict[str, Any]) -> dict[str, Any]:
        """Begin an episode; `text` is what the model sees first, `tools` what it may call."""
        raise NotImplementedError

    async def step(self, reply: dict[str, Any]) -> dict[str, Any]:
        """Take the model's reply: `text`, and `calls` with `id`, `name` and `arguments` (JSON).

        The answer has `reward` and `done`, and `text` or `results` by the ids of calls.
        """
        raise NotImplementedError

    async def close(self) -> None:
        """End the episode."""


def serve(build_gym: Callable[[dict[str, Any]], Gym]) -> None:
    """Serve until the other end closes. The first line is what the gym is built from."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    requests, answers = take_over_standard_streams()
    sys.path.append(str(Path.cwd()))  # where a run was started from, packages of the user's lie
    asyncio.run(_serve(build_gym, requests, answers))


def take_over_standard_streams() -> tuple[IO[str], IO[str]]:
    """Requests and answers, on descriptors that no program inherits.

    Standard input reads nothing from now on: it is the same socket as standard output, on which a
    program that a gym starts could give an answer. What a package prints is none either.
    """
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, answers


def list_errnos(error: BaseException | None) -> list[int]:
    """Numbers of the system's errors in the chain of causes, by which the driver judges it."""
    found, looked_at = list[int](), list[BaseException]()
    while error is not None and error not in looked_at:  # `raise error from error` makes a ring
        looked_at.append(error)
        if isinstance(error, OSError) and error.errno:
            found.append(error.errno)
        elif isinstance(error, RuntimeError) and _NO_THREAD_TEXT in str(error):
            found.append(errno.EAGAIN)
        error = error.exceptions[0] if isinstance(error, _EXCEPTION_GROUP_TYPE) else error.__cause__
    return found


async def _serve(
    build_gym: Callable[[dict[str, Any]], Gym], requests: IO[str], answers: IO[str]
) -> None:
    gym: Gym | None = None
    while line := await asyncio.to_thread(requests.readline):
        request = json.loads(line)
        try:
            if gym is None:
                gym, answer = build_gym(request), {}
            elif request["do"] == "reset":
                answer = await gym.reset(request["task"])
            elif request["do"] == "step":
                answer = await gym.step(request["reply"])
            else:
                await gym.close()
                answer = {}
            told = json.dumps(answer, allow_nan=False)
        except Exception as error:  # boundary: told to the agent
            said = f"{type(error).__name__}: {error}"[:2000]
            told = json.dumps({"error": said, "errnos": list_errnos(error)})
        answers.write(told + "\n")
        answers.flush()
