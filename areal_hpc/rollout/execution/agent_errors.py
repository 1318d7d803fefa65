"""Errors that end an episode: the agent's, with the line that raised, or the node's shortages."""

import asyncio
import difflib
import errno
import os
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import areal_hpc
from areal_hpc.errors import (
    AgentError,
    NodeResourceShortageError,
    describe_exception,
    escape_surrogates,
)
from areal_hpc.jobs.processes.line_workers import SHORTAGE_HINT
from areal_hpc.rollout.execution.agent_worker import list_causes, list_errnos

MAX_TRACEBACK_CHARS = 1500
MAX_MESSAGE_CHARS = 500
MAX_SHOWN_COLUMNS = 10
SHORTAGE_ERRNOS = frozenset((errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC))
"""Errors of a node or job without a free process, memory, descriptor or space. `MemoryError` is not
among them: an agent that computes what a model requests may raise it on any node."""
_PACKAGE_DIR = str(Path(areal_hpc.__file__).parent) + os.sep
_STDLIB_DIR = sysconfig.get_path("stdlib") + os.sep
_INSTALLED_DIRS = {"site-packages", "dist-packages"}

CodeLine = tuple[str, int | None]
"""File, and line number in it."""


def build_agent_error(error: BaseException, trace: TracebackType | None) -> AgentError:
    """Build the error for an agent's exception: its message, line, and the end of the traceback.

    A traceback that contains frames of the user's code is cut to these frames. For an exception
    group, as `asyncio.TaskGroup` raises it, the first exception in it is reported.
    """
    if isinstance(error, BaseExceptionGroup):
        first: BaseException = error.exceptions[0]
        return build_agent_error(first, first.__traceback__)
    stack = traceback.extract_tb(trace)
    user_frames = [frame for frame in stack if _is_user_code(frame.filename)]
    text = "".join(
        [
            *("Traceback (most recent call last):\n", *traceback.format_list(user_frames or stack)),
            *traceback.format_exception_only(error),
        ]
    )
    frames = [(frame.filename, frame.lineno) for frame in stack]
    return AgentError(
        f"the agent raised {escape_surrogates(_describe_exception(error))}",
        key=format_deepest_user_line(frames),
        kind=type(error).__name__,
        trace=escape_surrogates(text[-MAX_TRACEBACK_CHARS:].strip()),
    )


def find_node_shortage(error: BaseException) -> NodeResourceShortageError | None:
    """Return the shortage of the node that caused an agent's error; None if none did."""
    for cause in list_causes(error):
        if isinstance(cause, NodeResourceShortageError):
            return cause
    if shortage := describe_errno_shortage(list_errnos(error)):
        return NodeResourceShortageError(
            f"{shortage} while the agent ran: {escape_surrogates(_describe_exception(error))}",
            hint=SHORTAGE_HINT,
        )
    return None


def describe_errno_shortage(errnos: Iterable[int]) -> str:
    return next((os.strerror(number) for number in errnos if number in SHORTAGE_ERRNOS), "")


def _describe_exception(error: BaseException) -> str:
    body = getattr(error, "body", None)
    if isinstance(body, dict) and isinstance(body.get("message"), str):
        return f"{type(error).__name__}: {body['message']}"[:MAX_MESSAGE_CHARS]
    message, first = describe_exception(error), list_causes(error)[-1]
    _, _, reason = describe_exception(first).partition(": ")
    if first is not error and reason and reason not in message:
        message = f"{message} ({reason})"
    return message[:MAX_MESSAGE_CHARS]


def format_missing_column_hint(column: str, data: dict[str, Any]) -> str:
    """Write a hint for a key that an agent's task lacks; empty if the task has it."""
    if column in data:
        return ""
    similar = difflib.get_close_matches(column, list(data), n=1)
    suggestion = f"did you mean {similar[0]!r}? " if similar else ""
    return f"{suggestion}the task has {', '.join(list(data)[:MAX_SHOWN_COLUMNS]) or 'no columns'}"


def format_deepest_user_line(frames: Sequence[CodeLine]) -> str:
    """Return `FILE:LINE` of the innermost frame in user code, else of the innermost; else empty.

    `frames` come outermost first. User code is neither installed nor part of areal_hpc.
    """
    user_frames = [frame for frame in frames if _is_user_code(frame[0])]
    return next((f"{file}:{line}" for file, line in reversed(user_frames or frames)), "")


def _is_user_code(file: str) -> bool:
    is_installed = not _INSTALLED_DIRS.isdisjoint(Path(file).parts)
    return not (is_installed or file.startswith(("<", _STDLIB_DIR, _PACKAGE_DIR)))


def find_agent_run_definition(agent: object) -> str:
    code = getattr(getattr(agent, "run", None), "__code__", None)  # a method has its function's
    return f"{code.co_filename}:{code.co_firstlineno}" if code else ""


def find_waiting_line(task: asyncio.Task[Any]) -> str:
    return format_deepest_user_line(list(_iterate_awaited_lines(task.get_coro())))


def _iterate_awaited_lines(awaited: Any) -> Iterator[CodeLine]:
    while awaited is not None:
        frame: FrameType | None = None
        awaits = None
        for prefix, attribute in (("cr", "cr_await"), ("gi", "gi_yieldfrom"), ("ag", "ag_await")):
            if hasattr(awaited, attribute):
                frame, awaits = getattr(awaited, f"{prefix}_frame"), getattr(awaited, attribute)
        if frame is None:
            return
        yield frame.f_code.co_filename, frame.f_lineno
        awaited = awaits


def find_running_line(frame: FrameType | None) -> str:
    """Return `FILE:LINE` of the user's code in a running thread, given its innermost frame."""
    if frame is None:
        return ""
    frames = [(step.f_code.co_filename, line) for step, line in traceback.walk_stack(frame)]
    return format_deepest_user_line(frames[::-1])
