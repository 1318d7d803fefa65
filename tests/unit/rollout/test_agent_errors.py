"""What an agent's error says of the node, to the driver and to workers without its code."""

import errno
import importlib.util
import json
from itertools import pairwise
from typing import Any

import pytest

from areal_hpc.errors import AgentError, NodeResourceShortageError
from areal_hpc.rollout.execution import agent_worker
from areal_hpc.rollout.execution.agent_errors import (
    build_agent_error,
    describe_errno_shortage,
    find_node_shortage,
)
from areal_hpc.rollout.execution.process_pool import decode_answer
from areal_hpc.sandbox.isolated_worker import WORKER_LOOP_FILE


def load_gyms_worker_loop() -> Any:
    spec = importlib.util.spec_from_file_location("worker_loop", WORKER_LOOP_FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def chain(*errors: BaseException) -> BaseException:
    """The first, caused by the second, and so on."""
    for error, cause in pairwise(errors):
        error.__cause__ = cause
    return errors[0]


def make_own_cause(error: BaseException) -> BaseException:
    """As `raise error from error` leaves it."""
    return chain(error, error)


REFUSED = ConnectionRefusedError(errno.ECONNREFUSED, "refused")


@pytest.mark.parametrize(
    ("error", "is_short"),
    [
        (chain(ValueError("no tool"), OSError(errno.EMFILE, "no descriptor")), True),
        (chain(REFUSED, OSError(errno.EMFILE, "no descriptor")), True),
        (chain(ValueError("no tool"), RuntimeError(agent_worker.NO_THREAD_TEXT)), True),
        (RuntimeError("another"), False),
        (ExceptionGroup("two", [OSError(errno.EMFILE, "no descriptor"), KeyError("x")]), True),
        (make_own_cause(ValueError("no tool")), False),
        (chain(KeyError("x"), make_own_cause(OSError(errno.EMFILE, "no descriptor"))), True),
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), False),
        (OSError("without a number"), False),
    ],
)
def test_what_the_node_lacks_is_found_wherever_an_agent_runs(
    error: BaseException, is_short: bool
) -> None:
    assert (find_node_shortage(error) is not None) is is_short
    for worker in (agent_worker, load_gyms_worker_loop()):
        assert bool(describe_errno_shortage(worker.list_errnos(error))) is is_short
    told = json.dumps({"raised": agent_worker.encode_raised_error(error)}).encode()
    with pytest.raises(
        NodeResourceShortageError if is_short else AgentError, match="the agent raised"
    ):
        decode_answer(told)


def build_error_with_note() -> Exception:
    error = ValueError("no tool")
    error.add_note("see the manual")
    return error


NO_MESSAGE = "<exception str() failed>"


class WithoutMessageError(RuntimeError):
    def __str__(self) -> str:
        message: Any = None
        return str.__str__(message)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            ValueError("1 error\nplace\n  Field required"),
            "ValueError: 1 error place Field required",
        ),
        (build_error_with_note(), "ValueError: no tool"),
        (SyntaxError("bad", ("a.py", 3, 1, "a b\n")), "SyntaxError: bad"),
        (chain(ValueError("no\ntool"), KeyError("x")), "ValueError: no tool ('x')"),
        (chain(ValueError("no"), WithoutMessageError()), f"ValueError: no ({NO_MESSAGE})"),
    ],
)
def test_an_exception_is_told_with_all_lines_of_its_message(error: Exception, said: str) -> None:
    assert build_agent_error(error, None).problems[0].message == f"the agent raised {said}"
    assert agent_worker.describe_error(error) == said.partition(" (")[0]
    assert find_node_shortage(error) is None
    assert agent_worker.list_errnos(error) == []
