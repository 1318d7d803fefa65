"""Codec of what a worker process answers: JSON, because the parent trusts nothing that it sends.

A worker runs the user's code, and that of whoever writes to the user's agent. Pickles of its would
run code in the driver.
"""

import builtins
import contextlib
import json
import numbers
from typing import Any

import msgspec
import numpy as np

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
from areal_hpc.jobs.processes.line_process import SHORTAGE_HINT
from areal_hpc.rollout.agent_errors import describe_errno_shortage, find_node_shortage
from areal_hpc.wire.agent_reward import Reward

MAX_ANSWER_BYTES = 16 * 1024 * 1024
"""More than the rewards of any episode take."""
_MAX_TEXT_CHARS = 2000
_SHORTAGES: dict[str, type[NodeResourceShortageError]] = {
    kind.__name__: kind for kind in (NodeResourceShortageError, SandboxStartError, WorkerStartError)
}
"""Raised on the other side as themselves: they are the node's, and no fault of the code there."""
_ENDS_OF_ITERATION = ("StopIteration", "StopAsyncIteration")
"""A coroutine cannot raise these as themselves."""


def encode_returned(value: Any) -> bytes:
    """One line: a number, text, a `Reward`, or a dict or list of these."""
    return json.dumps({"returned": _encode_as_tagged_builtins(value)}).encode() + b"\n"


def encode_raised(error: BaseException) -> bytes:
    """One line about an exception: its class, what it says, and what ours know beyond that."""
    error = find_node_shortage(error) or error
    problems = [[str(error)[:_MAX_TEXT_CHARS], "", ""]]
    if isinstance(error, ArealError):
        problems = [[one.message, one.key, one.hint] for one in error.problems]
    raised = {
        "name": type(error).__name__,
        "problems": problems,
        "kind": getattr(error, "kind", "") if isinstance(error, AgentError) else "",
        "trace": getattr(error, "trace", "") if isinstance(error, AgentError) else "",
    }
    return json.dumps({"raised": raised}).encode() + b"\n"


def decode_returned_or_raise(line: bytes) -> Any:
    """What the worker's code returned.

    Raises:
        AgentError: The line is no answer.
        Exception: What the worker's code raised: one of Python's own that a text makes, or of ours,
            as itself, and any other as an AgentError.
    """
    try:
        answer = json.loads(line)
        if "raised" not in answer:
            return _decode_tagged_builtins(answer["returned"])
        error = _rebuild_error(answer["raised"])
    except (ValueError, KeyError, TypeError, RecursionError, AttributeError) as wrong:
        raise AgentError(
            f"what the worker process answered cannot be read: {line[:100]!r} ({wrong})"
        ) from wrong
    raise error


def _encode_as_tagged_builtins(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, Reward):
        return ["reward", msgspec.to_builtins(value)]
    if isinstance(value, np.ndarray | np.generic) and value.size == 1:
        value = value.item()
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, dict):
        return [
            "dict",
            *(
                [_encode_as_tagged_builtins(key), _encode_as_tagged_builtins(one)]
                for key, one in value.items()
            ),
        ]
    if isinstance(value, list | tuple):
        return ["list", *map(_encode_as_tagged_builtins, value)]
    raise AgentError(
        f"{value!r:.200} ({type(value).__name__}) cannot be sent back from a worker process",
        hint="return a number, an areal_hpc.Reward, or a dict of these",
    )


def _decode_tagged_builtins(data: Any) -> Any:
    if not isinstance(data, list):
        return data
    word, *parts = data
    if word == "reward":
        return Reward(**parts[0])
    if word == "dict":
        return {
            _decode_tagged_builtins(key): _decode_tagged_builtins(value) for key, value in parts
        }
    if word == "list":
        return [_decode_tagged_builtins(one) for one in parts]
    raise ValueError(f"unknown form {word!r}")


def _rebuild_error(error_fields: dict[str, Any]) -> Exception:
    name, problems = (
        str(error_fields["name"]),
        [Problem(*map(str, one)) for one in error_fields["problems"]],
    )
    first = problems[0]
    if lacking := describe_errno_shortage(map(int, error_fields.get("errnos", ()))):
        return NodeResourceShortageError(f"{lacking}: {first.message}", hint=SHORTAGE_HINT)
    if name == "RecipeError":
        return RecipeError.from_problems(problems)
    if name == "InvalidRewardError":
        return InvalidRewardError(first.message)
    if name in _SHORTAGES:
        return _SHORTAGES[name](first.message, key=first.key, hint=first.hint)
    kind = getattr(builtins, name, None)
    is_raisable = name not in _ENDS_OF_ITERATION
    if is_raisable and isinstance(kind, type) and issubclass(kind, Exception):
        with contextlib.suppress(TypeError):  # one with further arguments, as UnicodeDecodeError
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
