"""Mistakes of a user's agent, in runs by the real launcher: told at once, as the agent's.

`tests/acceptance/test_agent_errors.py` has more of them, and rollout/test_trial_tasks.py the tasks.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import broken_agents
from tests.support.commands import exit_code_of
from tests.support.run_files import events_of
from tests.support.screened_run import MAX_DELAY_S, ScreenedRun, line_of
from tests.support.small_run import WITHOUT_SETS
from tests.support.standin_run import SERVER_START_VARIABLE, write_served_model

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(240)]
OVERRIDES = (
    *WITHOUT_SETS,
    *("sft=null", "model.tiny=null", "evaluation.tasks=8", "rollout.n_samples=4"),
    *("train_dataset.generator=tests.support.sums:tasks", "train_dataset.kwargs.size=64"),
    *("valid_dataset.generator=tests.support.sums:tasks", "valid_dataset.kwargs.size=8"),
    *("rollout.max_concurrent_rollouts=16", "trainer.batch_size=4", "trainer.total_steps=1"),
    "rollout.trial_tasks=0",  # unless a test is about them: tickets show the rest
)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., ScreenedRun]]:
    """Starts the run of an agent; no process of it is left."""
    runs: list[ScreenedRun] = []

    def start_run(agent: type, *overrides: str, **environ: str) -> ScreenedRun:
        model = f"model.path={write_served_model(tmp_path / 'model')}"
        program = "tests.support.standin_run"
        words = (*OVERRIDES, model, *overrides)
        run = ScreenedRun(tmp_path, agent, *words, program=program, environ=environ)
        runs.append(run)
        return run

    yield start_run
    for run in runs:
        run.stop()


def test_an_agent_that_fails_its_trial_tasks_ends_the_run_before_any_ticket(
    start: Callable[..., ScreenedRun], capfd: pytest.CaptureFixture[str]
) -> None:
    agent = broken_agents.RaisesKeyError
    run = start(agent, "rollout.trial_tasks=3", **{SERVER_START_VARIABLE: "1"})
    assert run.end() == 70, run.screen
    shown_at, line = run.await_line("agent  ")
    failed = events_of(run.paths, "episode_failed")
    assert shown_at - failed[0]["time"] <= MAX_DELAY_S
    assert line.startswith("agent    raised KeyError: 'anwser'")
    assert {one["trial"] for one in failed} == {0, 1, 2}
    assert events_of(run.paths, "ticket_dropped") == []
    assert "error: the agent failed all 3 trial tasks, 3 times each: the agent raised" in run.screen
    assert f"at: {line_of(agent, 'anwser')}" in run.screen
    assert "started again" not in run.screen
    assert exit_code_of("why", run.paths.root) == 1
    assert "raised KeyError: 'anwser'" in capfd.readouterr().out.splitlines()[0]
    assert exit_code_of("status", run.paths.root) == 1
    state, reason = capfd.readouterr().out.splitlines()[:2]
    assert state == "quickstart/demo: failed"
    assert re.match(r" +reason +the agent .*raised KeyError: 'anwser'", reason)
