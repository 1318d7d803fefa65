"""Mistakes of agents and deaths of servers on the real stack: on the screen within two seconds."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.support import broken_agents
from tests.support.commands import exit_code_of
from tests.support.mistakes import AGENT_MISTAKES, AgentMistake
from tests.support.process_commands import is_scheduler
from tests.support.run_files import events_of
from tests.support.screened_run import MAX_DELAY_S, ScreenedRun, line_of
from tests.support.small_run import CUT_DOWN
from tests.support.waiting import wait_for

pytestmark = pytest.mark.timeout(900)

NO_TRIAL = "rollout.trial_tasks=0"


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
        runs.append(ScreenedRun(tmp_path, agent, *overrides, program="areal_hpc", environ={}))
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
    assert said in run.screen.partition("\nerror: ")[2]
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
