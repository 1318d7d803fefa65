"""Program that runs a user's agent with another Python, which need not have areal_hpc.

It imports the standard library alone. It reads requests as JSON lines from standard input, a
socket, and answers with lines as `process_pool.py` reads them. A reward may be any object with the
attributes of `areal_hpc.Reward`.
"""

import asyncio
import builtins
import ctypes
import errno
import importlib
import json
import numbers
import os
import signal
import socket
import sys
import traceback
from typing import Any

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
_MAX_TEXT_CHARS = 2000
NO_THREAD_TEXT = "can't start new thread"
"""Message of Python's `RuntimeError` when the system cannot start another thread."""
_EXCEPTION_GROUP_TYPE: Any = getattr(builtins, "BaseExceptionGroup", ())
"""Built-in of Python 3.11 and later."""
_AGENT_BY_PATH_AND_ARGUMENTS: dict[str, Any] = {}
"""Agents built in this process, by path and arguments."""


class InvalidAgentError(Exception):
    """Error in the agent's class, its path or its arguments."""


def load_agent_once(request: dict[str, Any]) -> Any:
    key = json.dumps([request["workflow"], request["kwargs"]])
    if key not in _AGENT_BY_PATH_AND_ARGUMENTS:
        _AGENT_BY_PATH_AND_ARGUMENTS[key] = build_agent(request["workflow"], request["kwargs"])
    return _AGENT_BY_PATH_AND_ARGUMENTS[key]


def build_agent(workflow: str, kwargs: dict[str, Any]) -> Any:
    """Import an agent, and build it if it is a class.

    Raises:
        InvalidAgentError: The import or the build failed.
    """
    module, _, name = workflow.rpartition(".")
    try:
        agent = getattr(importlib.import_module(module), name)
        agent = agent(**kwargs) if isinstance(agent, type) else agent
    except (Exception, SystemExit) as error:  # boundary: the user's code
        raise InvalidAgentError(f"{workflow!r} cannot be built: {describe_error(error)}") from error
    if not asyncio.iscoroutinefunction(getattr(agent, "run", None)):
        raise InvalidAgentError(f"{workflow!r} has no `async def run(self, data)`")
    return agent


def run_agent(request: dict[str, Any]) -> Any:
    os.environ.update(request["variables"])
    return asyncio.run(load_agent_once(request).run(request["data"]))


def encode_as_tagged_builtins(value: Any) -> Any:
    """Encode a number, text, reward, dict or list of these as `process_pool.py` decodes it."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, dict):
        return [
            "dict",
            *(
                [encode_as_tagged_builtins(key), encode_as_tagged_builtins(item)]
                for key, item in value.items()
            ),
        ]
    if isinstance(value, list | tuple):
        return ["list", *map(encode_as_tagged_builtins, value)]
    if hasattr(value, "value") and hasattr(value, "parts"):
        names = ("value", "parts", "metrics", "note", "answer")
        return ["reward", {name: getattr(value, name) for name in names if hasattr(value, name)}]
    if isinstance(value, numbers.Real):
        return float(value)
    if getattr(value, "size", 0) == 1:  # a scalar of NumPy
        return value.item()
    raise TypeError(
        f"{value!r:.200} ({type(value).__name__}) cannot be sent back from a worker process: "
        "return a number, an areal_hpc.Reward, or a dict of these"
    )


def describe_error(error: BaseException) -> str:
    parts = traceback.format_exception_only(error)
    return " ".join(next(part for part in parts if not part.startswith(" ")).split())


def list_causes(error: BaseException) -> list[BaseException]:
    """List an exception and its causes, each once (`raise error from error` makes a ring).

    The first exception in a group counts as the group's cause.
    """
    causes = [error]
    while True:
        last = causes[-1]
        is_group = isinstance(last, _EXCEPTION_GROUP_TYPE)
        cause = last.exceptions[0] if is_group else last.__cause__  # type: ignore[attr-defined]
        if cause is None or cause in causes:
            return causes
        causes.append(cause)


def list_errnos(error: BaseException) -> list[int]:
    """List the errnos in the chain of causes, by which the driver classifies the error."""
    errnos = list[int]()
    for cause in list_causes(error):
        if isinstance(cause, OSError) and cause.errno:
            errnos.append(cause.errno)
        elif isinstance(cause, RuntimeError) and NO_THREAD_TEXT in describe_error(cause):
            errnos.append(errno.EAGAIN)
    return errnos


def encode_raised_error(error: BaseException) -> dict[str, Any]:
    """Encode an exception as `process_pool.py` decodes it."""
    if isinstance(error, InvalidAgentError):
        hint = "the Python is that of rollout.agent.python; packages it needs belong there"
        problem = [str(error)[:_MAX_TEXT_CHARS], "rollout.workflow", hint]
        return {"name": "RecipeError", "problems": [problem], "kind": "", "trace": ""}
    trace = "".join(traceback.format_exception(error))[-2 * _MAX_TEXT_CHARS :]
    errnos = list_errnos(error)
    while isinstance(error, _EXCEPTION_GROUP_TYPE):  # the message of a group is generic
        error = error.exceptions[0]
    problem = [f"the agent raised {describe_error(error)}"[:_MAX_TEXT_CHARS], "", ""]
    return {
        "name": "AgentError",
        "problems": [problem],
        "kind": type(error).__name__,
        "trace": trace,
        "errnos": errnos,
    }


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Serve one request, and return the answer."""
    for folder in reversed(request["sys_path"]):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    try:
        if request["do"] == "build":
            load_agent_once(request)
            return {"returned": None}
        return {"returned": encode_as_tagged_builtins(run_agent(request))}
    except (Exception, SystemExit) as error:  # boundary: the user's code; sent to the driver
        return {"raised": encode_raised_error(error)}


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


def main() -> None:
    """Answer requests until the driver closes the link."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # so that the driver finds agents' orphans
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.path[0] = os.getcwd()  # noqa: PTH109  # not this file's folder
    link = take_over_standard_input()
    for line in link.makefile("rb"):
        link.sendall(json.dumps(answer(json.loads(line))).encode() + b"\n")


if __name__ == "__main__":
    main()
