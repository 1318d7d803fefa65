"""Process pool for user code, in which a hung or dead worker costs one call.

The standard pools lose every call in flight when one process dies, and keep a hung one forever. A
worker runs code of the user and of model output, so it is not trusted: it answers with JSON,
because loading a pickle from it would run its code in the driver.
"""

import asyncio
import base64
import builtins
import contextlib
import fnmatch
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import cloudpickle

from areal_hpc.errors import (
    AgentError,
    ArealError,
    InvalidRewardError,
    NodeResourceShortageError,
    Problem,
    RecipeError,
    SandboxStartError,
    WorkerStartError,
)
from areal_hpc.jobs.processes.line_workers import SHORTAGE_HINT, LineProcess, WorkerPool
from areal_hpc.jobs.processes.process_ties import (
    become_child_subreaper,
    die_with_parent,
    kill_descendants,
    list_descendants,
)
from areal_hpc.recipe.sections.sandbox import ISOLATION_VARIABLE
from areal_hpc.rollout.execution.agent_errors import describe_errno_shortage, find_node_shortage
from areal_hpc.rollout.execution.agent_worker import encode_as_tagged_builtins
from areal_hpc.wire.agent_reward import Reward

START_TIMEOUT_S = 300.0
"""Time limit for a process's imports, which may lie on a slow file system."""
_IMPORT_HOOKS = ("areal_hpc.areal.import_hook",)
"""Modules that install import hooks; a child imports them if its parent has."""
_SERVE_SCRIPT = """
import importlib, json, os, socket, sys
link = socket.socket(fileno=os.dup(0))
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
sys.path[:], hooks = json.loads(sys.argv[1])
for hook in hooks:
    importlib.import_module(hook)
from areal_hpc.rollout.execution.process_pool import serve_calls
serve_calls(link, int(sys.argv[2]))
"""
"""Script of a child: it takes over its parent's `sys.path`, and moves the link to a descriptor that
its own child processes do not inherit."""
PASSED_VARIABLE_PATTERNS = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_*", "TZ", "TMPDIR", "XDG_*"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "LD_LIBRARY_PATH", "OMP_NUM_THREADS"),
)
"""Patterns of variables that programs need and that hold no secret."""
SAME_PYTHON_PASSED_VARIABLES = (
    *("PYTHONPATH", "PYTHONHASHSEED", "PYTHONWARNINGS", "VIRTUAL_ENV"),
    ISOLATION_VARIABLE,
    *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"),
)
"""Further variables, without secrets, for agents that run with the driver's Python."""
MAX_ANSWER_BYTES = 16 * 1024 * 1024
"""Maximum size of an answer, above the rewards of any episode."""
_MAX_TEXT_CHARS = 2000
_SHORTAGES: dict[str, type[NodeResourceShortageError]] = {
    kind.__name__: kind for kind in (NodeResourceShortageError, SandboxStartError, WorkerStartError)
}
"""Shortages of the node that keep their class in the driver, as they are no fault of the code."""
_ENDS_OF_ITERATION = ("StopIteration", "StopAsyncIteration")
"""Exceptions that a coroutine cannot raise, because Python turns them into `RuntimeError`."""


class WorkerProcess(LineProcess):
    async def request(self, line: bytes) -> Any:
        """Send a line, and return the result of the user's code or raise its exception.

        Raises:
            WorkerLostError: The process died.
            NodeResourceShortageError: The node lacks something; the process is not used again.
        """
        try:
            return decode_answer(await self.ask(line))
        except NodeResourceShortageError:
            self.mark_unusable_after_shortage()
            raise

    async def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call = cloudpickle.dumps((function, args, kwargs))
        return await self.request(base64.b64encode(call))


class ProcessPool(WorkerPool[WorkerProcess]):
    """Pool of processes that each run one call of a plain function at a time.

    Functions and arguments are pickled, by value if the child cannot import them; results are JSON.
    Descendants that a call started are killed at its end. The processes' environment is `environ`,
    by default that of this process.
    """

    def __init__(self, size: int, environ: Mapping[str, str] | None = None) -> None:
        super().__init__(size, partial(_start_call_process, environ))

    async def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function in a process, and return its result; cancelling kills the process."""
        async with self.acquire() as process:
            return await process.call(function, *args, **kwargs)


async def _start_call_process(environ: Mapping[str, str] | None) -> WorkerProcess:
    hooks = [name for name in _IMPORT_HOOKS if name in sys.modules]
    script = [sys.executable, "-c", _SERVE_SCRIPT, json.dumps([sys.path, hooks]), str(os.getpid())]
    try:
        process = WorkerProcess(
            {"args": script, "env": environ}, "the worker process", MAX_ANSWER_BYTES
        )
    except OSError as error:
        raise WorkerStartError(f"{sys.executable} cannot be started: {error}") from error
    try:
        await process.ask(b"", START_TIMEOUT_S)
    except BaseException as error:  # boundary: after any error, or when cancelled, the process ends
        await asyncio.to_thread(process.close)
        if isinstance(error, AgentError):
            raise WorkerStartError(
                f"{error.problems[0].message} before it took a call",
                hint=f"read its output; {SHORTAGE_HINT}",
            ) from error
        raise
    return process


def serve_calls(link: socket.socket, parent_pid: int) -> None:
    """Answer calls in a child until the parent closes the link."""
    die_with_parent(signal.SIGKILL)
    become_child_subreaper()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C, and ends workers
    if os.getppid() != parent_pid:
        return
    with link, link.makefile("rb") as lines:
        link.sendall(lines.readline())  # reports that the process is ready
        for line in lines:
            earlier_children = frozenset(list_descendants(os.getpid()))
            answer = _answer_call(line)
            kill_descendants(os.getpid(), earlier_children)
            link.sendall(answer)


def _answer_call(line: bytes) -> bytes:
    try:
        function, args, kwargs = cloudpickle.loads(base64.b64decode(line))
        return encode_returned(function(*args, **kwargs))
    except (Exception, SystemExit) as error:  # boundary: the user's code, imported and called
        return encode_raised(error)


def select_passed_variables(
    environ: Mapping[str, str], extra_patterns: Sequence[str]
) -> dict[str, str]:
    """Select the variables that match `PASSED_VARIABLE_PATTERNS` or further patterns."""
    allowed = (*PASSED_VARIABLE_PATTERNS, *extra_patterns)
    return {
        name: value
        for name, value in environ.items()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in allowed)
    }


def select_driver_python_variables(
    environ: Mapping[str, str], extra_patterns: Sequence[str]
) -> dict[str, str]:
    return select_passed_variables(environ, (*SAME_PYTHON_PASSED_VARIABLES, *extra_patterns))


# Answers ------------------------------------------------------------------------------------------


def encode_returned(value: Any) -> bytes:
    """Encode a number, text, a `Reward`, or a dict or list of these as one line."""
    return json.dumps({"returned": encode_as_tagged_builtins(value)}).encode() + b"\n"


def encode_raised(error: BaseException) -> bytes:
    """Encode an exception as one line: its class, its message, and the fields of our own errors."""
    error = find_node_shortage(error) or error
    problems = [[str(error)[:_MAX_TEXT_CHARS], "", ""]]
    if isinstance(error, ArealError):
        problems = [[item.message, item.key, item.hint] for item in error.problems]
    raised = {
        "name": type(error).__name__,
        "problems": problems,
        "kind": getattr(error, "kind", "") if isinstance(error, AgentError) else "",
        "trace": getattr(error, "trace", "") if isinstance(error, AgentError) else "",
    }
    return json.dumps({"raised": raised}).encode() + b"\n"


def decode_answer(line: bytes) -> Any:
    """Decode the result of the worker's code, or raise its exception.

    Raises:
        AgentError: The line is no answer.
        Exception: The worker's exception: as itself if its class is ours, or Python's and takes one
            text; any other as an AgentError.
    """
    try:
        answer = json.loads(line)
        if "raised" not in answer:
            return _decode_tagged_builtins(answer["returned"])
        error = _rebuild_error(answer["raised"])
    except (ValueError, KeyError, TypeError, RecursionError, AttributeError) as decode_error:
        raise AgentError(
            f"the answer of the worker process cannot be read: {line[:100]!r} ({decode_error})"
        ) from decode_error
    raise error


def _decode_tagged_builtins(data: Any) -> Any:
    if not isinstance(data, list):
        return data
    kind, *parts = data
    if kind == "reward":
        return Reward(**parts[0])
    if kind == "dict":
        return {
            _decode_tagged_builtins(key): _decode_tagged_builtins(value) for key, value in parts
        }
    if kind == "list":
        return [_decode_tagged_builtins(part) for part in parts]
    raise ValueError(f"unknown form {kind!r}")


def _rebuild_error(error_fields: dict[str, Any]) -> Exception:
    name = str(error_fields["name"])
    problems = [Problem(*map(str, fields)) for fields in error_fields["problems"]]
    first = problems[0]
    if shortage := describe_errno_shortage(map(int, error_fields.get("errnos", ()))):
        return NodeResourceShortageError(f"{shortage}: {first.message}", hint=SHORTAGE_HINT)
    if name == "RecipeError":
        return RecipeError.from_problems(problems)
    if name == "InvalidRewardError":
        return InvalidRewardError(first.message)
    if name in _SHORTAGES:
        return _SHORTAGES[name](first.message, key=first.key, hint=first.hint)
    kind = getattr(builtins, name, None)
    is_raisable = name not in _ENDS_OF_ITERATION
    if is_raisable and isinstance(kind, type) and issubclass(kind, Exception):
        with contextlib.suppress(TypeError):  # it takes more arguments, as UnicodeDecodeError
            error: Exception = kind(first.message)
            return error
    is_ours = name == "AgentError"
    return AgentError(
        first.message if is_ours else f"{name}: {first.message}",
        key=first.key,
        hint=first.hint,
        kind=str(error_fields["kind"]) if is_ours else name,
        trace=str(error_fields["trace"]),
    )
