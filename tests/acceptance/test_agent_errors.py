"""Mistakes of agents and deaths of servers on the real stack: on the screen within two seconds."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support import broken_agents
from tests.support.commands import exit_code_of
from tests.support.deadlines import scaled
from tests.support.mistakes import AGENT_MISTAKES, AgentMistake
from tests.support.process_commands import find_processes, is_scheduler
from tests.support.run_files import events_of
from tests.support.small_run import SmallRun, await_none_left, interrupted_at_end, started_from
from tests.support.waiting import wait_for

pytestmark = pytest.mark.timeout(900)

MAX_DELAY_S = scaled(2.0)
"""Time from an event to its line on the screen."""
END_TIMEOUT_S = 150.0


@contextmanager
def running(folder: Path, model: Path, agent: type, *overrides: str) -> Iterator[SmallRun]:
    of_agent = f"rollout.workflow=tests.support.broken_agents.{agent.__name__}"
    run = SmallRun(folder / agent.__name__, *started_from(model), of_agent, *overrides)
    run.environ = {"PYTHONUNBUFFERED": "1"}
    with interrupted_at_end(run):
        run.start()
        yield run
    await_none_left(run, 30.0)


def await_line(run: SmallRun, start: str) -> tuple[float, str]:
    def find() -> str:
        lines = screen_of(run).rpartition("\n")[0].splitlines()
        return next((line for line in lines if line.startswith(start)), "")

    run.await_true(lambda: bool(find()), END_TIMEOUT_S)
    return time.time(), find()


def screen_of(run: SmallRun) -> str:
    return run.log.read_text()


def line_of(agent: type, text: str = "async def run") -> str:
    """`FILE:LINE` of the first line of an agent that has a text."""
    file = Path(broken_agents.__file__)
    lines = file.read_text().splitlines()
    first = lines.index(f"class {agent.__name__}:")
    return f"{file}:{next(at for at, line in enumerate(lines[first:], first + 1) if text in line)}"


@pytest.mark.parametrize("mistake", AGENT_MISTAKES, ids=lambda mistake: mistake.what)
def test_a_mistake_of_the_agent_is_told_at_once_and_ends_the_run(
    tmp_path: Path, model: Path, mistake: AgentMistake, capfd: pytest.CaptureFixture[str]
) -> None:
    error_text = mistake.said
    with running(tmp_path, model, mistake.agent) as run:
        shown_at, line = await_line(run, "agent  ")
        assert run.wait(END_TIMEOUT_S) == 70, run.said()
    assert line.startswith(f"agent    {error_text}")
    assert shown_at - events_of(run.paths, "episode_failed")[0]["time"] <= MAX_DELAY_S
    assert screen_of(run).count("agent    ") == 1
    error = screen_of(run).partition("\nerror: ")[2]
    assert error.startswith("the agent failed alike in the first 3 tickets; the last one: ")
    assert f"the agent {error_text}" in error.splitlines()[0]
    assert events_of(run.paths, "episode_unserved") == []
    assert [event["process"] for event in events_of(run.paths, "process_exited")] == ["trainer"]
    assert len(events_of(run.paths, "job_submitted")) == 2, "no job was started again"
    assert exit_code_of("why", run.paths.root) == 1
    assert error_text in capfd.readouterr().out.splitlines()[0]


def test_agents_that_hang_or_block_the_event_loop_are_told_with_their_line(
    tmp_path: Path, model: Path
) -> None:
    with running(tmp_path, model, broken_agents.Hangs) as run:
        shown_at, line = await_line(run, "agent    has run for ")
    assert line_of(broken_agents.Hangs, "Event().wait()") in line
    assert shown_at - events_of(run.paths, "episode_slow")[0]["time"] <= MAX_DELAY_S
    assert re.search(r"for [3-5]\d s without an end", line), "half a minute after it began"
    with running(tmp_path, model, broken_agents.BlocksLoop) as run:
        shown_at, line = await_line(run, "agent    blocks the event loop")
    assert line_of(broken_agents.BlocksLoop, "time.sleep") in line
    assert shown_at - events_of(run.paths, "event_loop_blocked")[0]["time"] <= MAX_DELAY_S


def test_a_server_that_dies_is_told_and_phases_are_in_words(tmp_path: Path, model: Path) -> None:
    with running(tmp_path, model, broken_agents.Hangs) as run:
        await_line(run, "phase    SGLang 0 of cell-0 ")
        await_line(run, "phase    evaluation of step 0: 0 of 8 held-out episodes")
        servers = find_processes(run.paths.root, in_environment=True)
        # Its title stands where its environment was.
        (scheduler,) = {child for p in servers for child in p.children() if is_scheduler(child)}
        scheduler.kill()
        shown_at, line = await_line(run, "server   SGLang 0 of cell-0 ")
        wait_for(lambda: bool(events_of(run.paths, "replica_died")))
    assert shown_at - events_of(run.paths, "replica_died")[0]["time"] <= MAX_DELAY_S
    assert "it is started again" in line
