"""Loop of a gym's worker: requests on standard input, answers on standard output, JSON lines.

Imports nothing of areal_hpc: it runs with whatever Python a gym needs.
"""

import asyncio
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
_SHORTAGE_ERRORS = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC)
_NO_THREAD_TEXT = "can't start new thread"
"""Both as in `areal_hpc/rollout/agent_errors.py`, which cannot be imported here."""


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


def find_errno(error: BaseException | None) -> int:
    """The number of the system's error that caused this one; 0 if none did.

    Of several it is that of what the node lacks, which may be behind another: a server that found
    no descriptor refuses connections.
    """
    found = 0
    while error is not None:
        number = (isinstance(error, OSError) and error.errno) or 0
        if isinstance(error, RuntimeError) and _NO_THREAD_TEXT in str(error):
            number = errno.EAGAIN
        if number in _SHORTAGE_ERRORS:
            return number
        found = found or number
        error = error.__cause__
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
            told = json.dumps({"error": said, "errno": find_errno(error)})
        answers.write(told + "\n")
        answers.flush()
