"""Processes that run a gym in its own Python, and the JSON lines to and from them."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from areal_hpc.errors import AgentError, RecipeError

WORKERS_DIR = Path(__file__).with_name("workers")
MAX_LINE_BYTES = 64 << 20
"""An observation may be long."""
_PIECE_BYTES = 1 << 16
START_TIMEOUT_S = 300.0
"""Large packages on a loaded file system."""
PASSED_VARIABLES = (
    *("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "USER", "TZ"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR"),
)
"""Of this process's environment, what a gym sees; `variables` adds to it."""


class GymWorker:
    """One process, which plays one episode at a time. It belongs to no event loop."""

    def __init__(self, process: subprocess.Popen[bytes], link: socket.socket, name: str) -> None:
        self._process, self._link, self._name = process, link, name
        self._received = bytearray()
        self._is_asked = False

    @classmethod
    async def start(
        cls, python: str, script: str, config: Mapping[str, Any], variables: Mapping[str, str]
    ) -> "GymWorker":
        """A worker that has built its gym.

        Raises:
            RecipeError: There is no such Python, or the gym cannot be built.
        """
        passed = {name: os.environ[name] for name in PASSED_VARIABLES if name in os.environ}
        link, theirs = socket.socketpair()
        link.setblocking(False)
        with theirs:
            try:
                process = subprocess.Popen(
                    [python, str(WORKERS_DIR / script)],
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    env=passed | dict(variables),
                    start_new_session=True,
                )
            except OSError as error:
                link.close()
                raise RecipeError(
                    f"there is no Python for this gym at {python}: {error.strerror}",
                    key="rollout.workflow_kwargs.python",
                    hint="scripts/setup_gyms.sh makes one",
                ) from error
        worker = cls(process, link, script)
        try:
            await worker.ask(config, START_TIMEOUT_S)
        except AgentError as error:
            worker.close()
            raise RecipeError(
                f"the gym cannot be built: {error.problems[0].message}",
                key="rollout.workflow_kwargs",
                hint="see what it printed; scripts/setup_gyms.sh has its packages",
            ) from error
        except BaseException:  # boundary: cancelled; nothing stays
            worker.close()
            raise
        return worker

    @property
    def is_usable(self) -> bool:
        """It lives, and waits for a request."""
        return not self._is_asked and self._process.poll() is None

    async def ask(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """What it answers.

        Raises:
            AgentError: It fails, ends, takes too long or answers too much.
        """
        self._is_asked = True
        line = json.dumps(request).encode() + b"\n"
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.get_running_loop().sock_sendall(self._link, line)
                told = await self._read_line()
        except TimeoutError:
            raise AgentError(f"{self._name} did not answer within {timeout_s:g} s") from None
        except OSError as error:
            raise AgentError(f"{self._name} cannot be talked to: {error}") from error
        self._is_asked = False
        answer: dict[str, Any] = json.loads(told)
        if "error" in answer:
            raise AgentError(f"{self._name} failed: {answer['error']}")
        return answer

    async def _read_line(self) -> bytes:
        while b"\n" not in self._received[-_PIECE_BYTES:]:
            piece = await asyncio.get_running_loop().sock_recv(self._link, _PIECE_BYTES)
            if not piece:
                raise AgentError(f"{self._name} has ended; see what it printed")
            self._received += piece
            if len(self._received) > MAX_LINE_BYTES:
                raise AgentError(f"{self._name} answered more than {MAX_LINE_BYTES >> 20} MiB")
        line, _, rest = self._received.partition(b"\n")
        self._received = bytearray(rest)
        return bytes(line)

    def close(self) -> None:
        """End it, with all that it started in its session."""
        if self._process.poll() is None:  # else its number may be another's
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._link.close()


class GymWorkers:
    """At most so many workers, started when they are needed and used again."""

    def __init__(
        self,
        python: str,
        script: str,
        config: Mapping[str, Any],
        variables: Mapping[str, str],
        size: int,
    ) -> None:
        self._python, self._script = python, script
        self._config, self._variables = dict(config), dict(variables)
        self._size = size
        self._idle: list[GymWorker] = []
        self._places: asyncio.Semaphore | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[GymWorker]:
        """A worker to oneself; waits while all are taken."""
        async with self._get_places():
            worker = await self._take()
            try:
                yield worker
            finally:
                if worker.is_usable:
                    self._idle.append(worker)
                else:
                    worker.close()

    def close(self) -> None:
        """End those that wait."""
        while self._idle:
            self._idle.pop().close()

    def _get_places(self) -> asyncio.Semaphore:
        """Those of this event loop: a process of mode `subproc` has one per episode."""
        loop = asyncio.get_running_loop()
        if self._places is None or self._loop is not loop:
            self._places, self._loop = asyncio.Semaphore(self._size), loop
        return self._places

    async def _take(self) -> GymWorker:
        while self._idle:
            worker = self._idle.pop()
            if worker.is_usable:
                return worker
            worker.close()
        return await GymWorker.start(self._python, self._script, self._config, self._variables)
