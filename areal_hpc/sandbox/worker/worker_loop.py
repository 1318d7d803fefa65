"""Loop of a worker: requests and answers, JSON lines, on the socket that is its standard input.

It imports nothing of areal_hpc, because it runs in the Python that a gym or a scorer needs. The
prepared process runs no code of a model: it forks for each episode, and kills the fork with all its
descendants, so that no episode affects a later one. Called as `WORKER.py SETTINGS`, in JSON.
"""

import asyncio
import builtins
import contextlib
import ctypes
import errno
import gc
import json
import os
import random
import resource
import shutil
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4
MAX_LINE_BYTES = 64 << 20
CLOSE_TIMEOUT_S = 10.0
"""Time limit for an episode's `close`, after which it is killed."""
_SCRATCH_FOLDERS = ("/tmp", "/dev/shm")
_EXCEPTION_GROUP_TYPE: Any = getattr(builtins, "BaseExceptionGroup", ())
"""Built-in of Python 3.11 and later."""
_NO_THREAD_TEXT = "can't start new thread"
"""Text as in `areal_hpc/rollout/execution/agent_errors.py`, which cannot be imported here."""


class Scorer:
    """Scorer that a worker serves: it answers each question in a fork of its own."""

    def prepare(self, task: dict[str, Any]) -> None:
        """Prepare a task in the process that is forked for all later questions."""

    def score(self, task: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError


class Gym:
    """Gym that a worker serves: it plays each episode in a fork of its own."""

    async def reset(self, task: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError

    async def step(self, reply: dict[str, Any]) -> dict[str, Any]:
        """Take the model's reply: `text`, and `calls` with `id`, `name` and `arguments` (JSON).

        Return `reward` and `done`, and `text` or `results` by the ids of calls.
        """
        raise NotImplementedError

    async def close(self) -> None:
        pass


def serve(build_gym: Callable[[dict[str, Any]], Gym | Scorer]) -> None:
    """Serve until the other end closes the link. The first line is the argument of `build_gym`."""
    settings: dict[str, Any] = json.loads(sys.argv[1])
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM):  # for the parent, which needs this process
        signal.signal(number, signal.SIG_IGN)
    if settings["is_first_process"]:  # of a sandbox; its forks, of the same user, may not trace it
        LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    else:
        sys.path.append(str(Path.cwd()))  # packages of the user lie where the run was started
    link = take_over_standard_input()
    if settings["proxy_port"] is not None:
        with socket.create_server(("127.0.0.1", settings["proxy_port"]), backlog=128) as listener:
            socket.send_fds(link, [b"."], [listener.fileno()])
    gc.freeze()  # a collection in a fork would copy the pages of these objects
    gym: Gym | Scorer | None = None
    episode: Episode | None = None
    for line in link.makefile("rb"):
        request = json.loads(line)
        try:
            if gym is None:
                gym, answer = build_gym(request), b"{}"
                if settings["memory_bytes"] is not None:
                    settings["memory_bytes"] += count_own_bytes()
            elif request["do"] == "reset":
                if episode is not None:
                    episode.end()
                    episode = None
                if isinstance(gym, Scorer):
                    gym.prepare(request["task"])
                    line = b""  # the fork has its task
                episode = Episode(gym, request["task"], link, settings)
                answer = episode.ask(line, settings["timeout_s"])
            elif episode is not None:
                is_end = request["do"] == "close"
                answer = episode.ask(line, CLOSE_TIMEOUT_S if is_end else settings["timeout_s"])
            else:
                answer = b"{}"
        except Exception as error:  # boundary: sent to the agent
            answer = encode_error(error, is_of_episode=False)
        is_over = settings["ends_with_answer"] or request.get("do") == "close"
        if episode is not None and (is_over or answer.startswith(b'{"error"')):
            episode.end()
            episode = None
        link.sendall(answer + b"\n")


class Episode:
    """Fork of the prepared process, and the socket to it."""

    def __init__(
        self,
        gym: Gym | Scorer,
        task: dict[str, Any],
        link: socket.socket,
        settings: dict[str, Any],
    ) -> None:
        self._is_alone = settings["is_first_process"] and os.getpid() == 1
        self._known = list_scratch_files()
        self._socket, fork_socket = socket.socketpair()
        worker_pid = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
                if os.getppid() != worker_pid:  # the worker ended before `prctl`
                    os._exit(0)
                os.close(link.fileno())  # `link.close` leaves it open for the loop that reads
                self._socket.close()
                os.setsid()
                for number in (signal.SIGINT, signal.SIGTERM):  # its child processes inherit these
                    signal.signal(number, signal.SIG_DFL)
                limit_memory(settings["memory_bytes"])
                if isinstance(gym, Scorer):
                    answer_question(gym, task, fork_socket)
                else:
                    reseed()
                    asyncio.run(play(gym, fork_socket))
            finally:
                os._exit(0)
        fork_socket.close()
        self._answers = self._socket.makefile("rb")

    def ask(self, line: bytes, timeout_s: float | None) -> bytes:
        """Send a line unless it is empty, and return the answer."""
        self._socket.settimeout(timeout_s)
        try:
            if line:
                self._socket.sendall(line)
            answer = self._answers.readline(MAX_LINE_BYTES)
        except TimeoutError:
            return json.dumps({"error": f"took longer than {timeout_s:g} s", "errnos": []}).encode()
        except OSError:
            answer = b""
        if not answer.endswith(b"\n"):
            return json.dumps({"error": "its process has ended", "errnos": []}).encode()
        return answer.rstrip()

    def end(self) -> None:
        """Kill the fork and all its descendants, and remove the files that they wrote."""
        if self._is_alone:
            os.kill(-1, signal.SIGKILL)  # all processes of this sandbox except the first
        else:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._pid, signal.SIGKILL)
        self._answers.close()
        self._socket.close()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1 if self._is_alone else self._pid, 0):
                pass
        for path in list_scratch_files() - self._known if self._is_alone else ():
            shutil.rmtree(path, ignore_errors=True)
            with contextlib.suppress(OSError):
                Path(path).unlink()


def answer_question(scorer: Scorer, task: dict[str, Any], channel: socket.socket) -> None:
    """Answer one question, without an event loop, whose start would take longer than the score."""
    try:
        answer = json.dumps(scorer.score(task), allow_nan=False).encode()
    except Exception as error:  # boundary: third-party code; sent to the caller
        answer = encode_error(error)
    channel.sendall(answer + b"\n")


async def play(gym: Gym, channel: socket.socket) -> None:
    """Answer requests until the end of the episode."""
    loop, received = asyncio.get_running_loop(), b""
    channel.setblocking(False)
    while piece := await loop.sock_recv(channel, 1 << 16):
        received += piece
        if not received.endswith(b"\n"):
            continue
        line, received = received, b""
        request = json.loads(line)
        try:
            if request["do"] == "reset":
                answer = await gym.reset(request["task"])
            elif request["do"] == "step":
                answer = await gym.step(request["reply"])
            else:
                await gym.close()
                answer = {}
            encoded = json.dumps(answer, allow_nan=False).encode()
        except Exception as error:  # boundary: sent to the agent
            encoded = encode_error(error)
        await loop.sock_sendall(channel, encoded + b"\n")


def encode_error(error: Exception, *, is_of_episode: bool = True) -> bytes:
    message = f"{type(error).__name__}: {error}"[:2000]
    answer = {"error": message, "errnos": list_errnos(error), "is_of_episode": is_of_episode}
    return json.dumps(answer).encode()


def take_over_standard_input() -> socket.socket:
    """Move the link to the driver to a descriptor that no child process inherits.

    Standard input becomes empty: a child process that inherited the link could send an answer.
    """
    link = socket.socket(fileno=os.dup(0))
    link.setblocking(True)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return link


def limit_memory(max_bytes: int | None) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if max_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))


def count_own_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def reseed() -> None:
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def find_action_tags(text: str) -> list[str]:
    """List the contents of `<action>...</action>`, each up to the first end, in linear time.

    A regular expression would search for the end again from each opening.
    """
    pieces = text.split("<action>")[1:]
    return [piece.partition("</action>")[0] for piece in pieces if "</action>" in piece]


def list_scratch_files() -> set[str]:
    return {entry.path for folder in _SCRATCH_FOLDERS for entry in os.scandir(folder)}


def list_errnos(error: BaseException | None) -> list[int]:
    """List the errnos in the chain of causes, by which the driver classifies the error."""
    errnos, seen = list[int](), list[BaseException]()
    while error is not None and error not in seen:  # `raise error from error` makes a ring
        seen.append(error)
        if isinstance(error, OSError) and error.errno:
            errnos.append(error.errno)
        elif isinstance(error, RuntimeError) and _NO_THREAD_TEXT in str(error):
            errnos.append(errno.EAGAIN)
        error = error.exceptions[0] if isinstance(error, _EXCEPTION_GROUP_TYPE) else error.__cause__
    return errnos
