"""A job's process raises its limit of open files, reports its error, and finds its descendants."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.errors import (
    AgentError,
    ArealError,
    ClusterError,
    LostTrainerRankError,
    RecipeError,
    ShardError,
    SupersededTrainerError,
)
from areal_hpc.jobs.processes.process_main import select_error_to_report
from areal_hpc.rundir.jobs import LOST_RANK_EXIT_CODE
from tests.support.commands import run_program, said_by
from tests.support.environments import CHECKOUT

LOW = 200


def write_limit(config: dict[str, Any]) -> None:
    Path(config["out"]).write_text(str(resource.getrlimit(resource.RLIMIT_NOFILE)[0]))


def test_a_process_may_open_as_many_files_as_the_machine_allows(tmp_path: Path) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard > LOW
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"out": str(tmp_path / "limit")}))
    entry = ("areal_hpc.jobs.processes.process_main", f"{__name__}:write_limit", str(config))
    limited = ("bash", "-c", f'ulimit -Sn {LOW}; exec "$@"', "-", sys.executable, "-m", *entry)
    environ = {**os.environ, "AREAL_HPC_SUPERVISOR_PID": str(os.getpid())}
    said_by(run_program(*limited, environ=environ))
    assert int((tmp_path / "limit").read_text()) == hard


def lose_peer(config: dict[str, Any]) -> None:
    raise LostTrainerRankError("another trainer rank disappeared: Connection closed by peer")


def test_a_rank_that_lost_another_says_so_without_a_traceback(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text("{}")
    entry = ("areal_hpc.jobs.processes.process_main", f"{__name__}:lose_peer", str(config))
    environ = {**os.environ, "AREAL_HPC_SUPERVISOR_PID": str(os.getpid())}
    ended = run_program(sys.executable, "-m", *entry, environ=environ)
    assert ended.returncode == LOST_RANK_EXIT_CODE
    assert "ERROR" in ended.stderr
    assert "another trainer rank disappeared: Connection closed by peer" in ended.stderr
    assert "Traceback" not in ended.stderr, "`why` would take it for the cause"


@pytest.mark.parametrize(
    ("caught", "expected"),
    [
        (ClusterError("a"), "a"),
        (ExceptionGroup("", [ExceptionGroup("", [ClusterError("a"), ClusterError("b")])]), "a"),
        (ExceptionGroup("", [ClusterError("a"), RecipeError("b")]), "b"),
        (ExceptionGroup("", [LostTrainerRankError("a"), ShardError("b"), AgentError("c")]), "c"),
        (ExceptionGroup("", [LostTrainerRankError("a"), ClusterError("b")]), "b"),
        (ExceptionGroup("", [RecipeError("a"), SupersededTrainerError("b")]), "b"),
        (ExceptionGroup("", [ClusterError("a"), ValueError("b")]), None),
        (ValueError("a"), None),
    ],
    ids=[
        *("one", "tasks alike", "what no start mends", "beside an echo", "no echo", "superseded"),
        *("with a bug", "a bug"),
    ],
)
def test_tasks_that_failed_at_once_are_told_as_one_error(
    caught: Exception, expected: str | None
) -> None:
    error = select_error_to_report(caught)
    assert (str(error) if isinstance(error, ArealError) else None) == expected


DEEP = """
import os, signal, sys, time
from areal_hpc.jobs.processes.process_ties import list_descendants
ready, said = os.pipe()
first = os.fork()
if first == 0:
    for _ in range(119):
        if os.fork():
            time.sleep(60)
            os._exit(0)
    os.write(said, b"1")
    time.sleep(60)
    os._exit(0)
os.read(ready, 1)
sys.setrecursionlimit(90)
found = list_descendants(os.getpid())
for pid in found:
    os.kill(pid, signal.SIGKILL)
print(len(found), found[0] == first)
"""


def test_a_deep_chain_of_processes_is_found() -> None:
    command = [sys.executable, "-c", DEEP]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=CHECKOUT)
    assert result.stdout == "120 True\n", result.stderr
