"""Mistakes of agents and deaths of servers on the real stack: on the screen within two seconds."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from areal_hpc.rundir.paths import RunPaths
from tests.support import broken_agents
from tests.support.commands import exit_code_of
from tests.support.deadlines import scaled
from tests.support.environments import CHECKOUT
from tests.support.mistakes import AGENT_MISTAKES, AgentMistake
from tests.support.process_commands import is_scheduler
from tests.support.run_files import events_of
from tests.support.small_run import CUT_DOWN, processes_of
from tests.support.waiting import wait_for

pytestmark = pytest.mark.timeout(900)

NO_TRIAL = "rollout.trial_tasks=0"
MAX_DELAY_S = scaled(2.0)
"""From an event to its line on the screen."""
END_TIMEOUT_S = 150.0


class ScreenedRun:
    """A run in the foreground, and each line of its screen with the time at which it came."""

    def __init__(self, folder: Path, agent: type, *overrides: str) -> None:
        self.paths = RunPaths(folder / "quickstart" / "demo")
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "areal_hpc", "run"),
                *("recipes/quickstart.yaml", f"cluster.fileroot={folder}", *overrides),
                f"rollout.workflow=tests.support.broken_agents.{agent.__name__}",
            ],
            cwd=CHECKOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines: list[tuple[float, str]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.time(), line.rstrip()))

    @property
    def screen(self) -> str:
        return "\n".join(line for _, line in self.lines)

    def find(self, start: str) -> tuple[float, str] | None:
        """The first line that begins so, and when it came."""
        return next((one for one in self.lines if one[1].startswith(start)), None)

    def await_line(self, start: str) -> tuple[float, str]:
        def found() -> bool:
            assert self.process.poll() is None or self.find(start), self.screen
            return self.find(start) is not None

        wait_for(found, END_TIMEOUT_S, lambda: self.screen)
        line = self.find(start)
        assert line is not None
        return line

    def end(self) -> int:
        code = self.process.wait(scaled(END_TIMEOUT_S))
        self._reader.join(scaled(10.0))
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    def stop(self) -> None:
        """End it, if it has not ended; no process of it is left."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            self.end()
        self.await_no_process()

    def await_no_process(self) -> None:
        wait_for(lambda: processes_of(self.paths.root) == [], 30.0)


def line_of(agent: type, text: str = "async def run") -> str:
    """`FILE:LINE` of the first line of an agent that has a text."""
    file = Path(broken_agents.__file__)
    lines = file.read_text().splitlines()
    first = lines.index(f"class {agent.__name__}:")
    return f"{file}:{next(at for at, line in enumerate(lines[first:], first + 1) if text in line)}"


@pytest.fixture
def start(tmp_path: Path, model: Path) -> Iterator[Callable[..., ScreenedRun]]:
    """Starts the run of an agent; no process of it is left."""
    runs: list[ScreenedRun] = []

    def start_run(agent: type, *more: str) -> ScreenedRun:
        overrides = [one for one in CUT_DOWN if not one.startswith("sft.")]
        overrides += ["sft=null", "model.tiny=null", f"model.path={model}"]
        overrides += [
            f"{split}_dataset.generator=tests.support.sums:tasks" for split in ("train", "valid")
        ]
        overrides += more
        runs.append(ScreenedRun(tmp_path, agent, *overrides))
        return runs[-1]

    yield start_run
    for run in reversed(runs):  # they have one directory: no process of it may be left
        run.stop()


@pytest.mark.parametrize("mistake", AGENT_MISTAKES, ids=lambda mistake: mistake.what)
def test_a_mistake_of_the_agent_is_told_at_once_and_ends_the_run(
    start: Callable[..., ScreenedRun],
    mistake: AgentMistake,
    capfd: pytest.CaptureFixture[str],
) -> None:
    run, said = start(mistake.agent), mistake.said
    assert run.end() == 70, run.screen
    shown_at, line = run.await_line("agent  ")
    assert line.startswith(f"agent    {said}")
    assert shown_at - events_of(run.paths, "episode_failed")[0]["time"] <= MAX_DELAY_S
    assert run.screen.count("agent    ") == 1
    error = run.screen.partition("\nerror: ")[2]
    assert error.startswith(f"the agent failed all 3 trial tasks, 3 times each: the agent {said}")
    assert events_of(run.paths, "ticket_dropped") == []
    assert events_of(run.paths, "episode_unserved") == []
    assert [one["process"] for one in events_of(run.paths, "process_exited")] == ["driver"]
    assert len(events_of(run.paths, "job_submitted")) == 2, "no job was started again"
    assert exit_code_of("why", run.paths.root) == 1
    assert said in capfd.readouterr().out.splitlines()[0]


def test_agents_that_hang_or_block_the_event_loop_are_told_with_their_line(
    start: Callable[..., ScreenedRun],
) -> None:
    run = start(broken_agents.Hangs, NO_TRIAL)
    shown_at, line = run.await_line("agent    has run for ")
    assert line_of(broken_agents.Hangs, "Event().wait()") in line
    assert shown_at - events_of(run.paths, "episode_slow")[0]["time"] <= MAX_DELAY_S
    assert re.search(r"for [3-5]\d s without an end", line), "half a minute after it began"
    run.stop()
    run = start(broken_agents.BlocksLoop, NO_TRIAL)
    shown_at, line = run.await_line("agent    blocks the event loop")
    assert line_of(broken_agents.BlocksLoop, "time.sleep") in line
    assert shown_at - events_of(run.paths, "event_loop_blocked")[0]["time"] <= MAX_DELAY_S


def test_a_server_that_dies_is_told_and_phases_are_in_words(
    start: Callable[..., ScreenedRun],
) -> None:
    run = start(broken_agents.Hangs, NO_TRIAL)
    run.await_line("phase    SGLang 0 of cell-0 ")
    run.await_line("phase    evaluation of step 0: 0 of 8 held-out episodes")
    (scheduler,) = [
        one
        for one in psutil.process_iter()
        # Its title stands where its environment was.
        if is_scheduler(one) and str(run.paths.root) in " ".join(one.parent().environ().values())
    ]
    scheduler.kill()
    shown_at, line = run.await_line("server   SGLang 0 of cell-0 ")
    wait_for(lambda: bool(events_of(run.paths, "replica_died")))
    assert shown_at - events_of(run.paths, "replica_died")[0]["time"] <= MAX_DELAY_S
    assert "it is started again" in line
