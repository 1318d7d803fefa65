"""All views show the same state of a run; a notebook opens it, and a look imports little."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import areal_hpc
from areal_hpc.errors import RecipeError
from areal_hpc.metrics.step_line import describe_step_times
from areal_hpc.rundir.jobs import JobSpec, LaunchFile, Submission, TaskExit, write_task_exit
from areal_hpc.rundir.lock import hold_lock
from areal_hpc.rundir.manifests import EvaluationResult, write_evaluation
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.slurm.queue import QueueSnapshot
from areal_hpc.view.answers.slow_run import measure_mean_step_parts
from areal_hpc.view.batch_episodes import sum_batch_waits
from areal_hpc.view.dashboard.report import write_report
from areal_hpc.view.dashboard.run_pages import describe_run_overview
from areal_hpc.view.formatting import get_program_command
from areal_hpc.view.state.jobs import JobView, RunJobs
from areal_hpc.view.state.live_progress import PlainReporter
from areal_hpc.view.state.run_data import Columns
from areal_hpc.view.state.run_view import (
    HeldResources,
    RunView,
    RunViewer,
    find_slurm_output_files,
    read_exit_records,
)
from areal_hpc.view.state.summary import describe_idle_time, measure_cell_wait_s
from tests.support.commands import exit_code_of
from tests.support.counted_reads import counted_reads
from tests.support.environments import CHECKOUT
from tests.support.made_run import MadeEpisode, MadeRun
from tests.support.sample_trajectories import seal_in, trajectory

BATCH = [MadeEpisode(task=task, reward=float(task % 2)) for task in range(8)]
FAILED_TRY = {"eval_step": -1, "reason": "KeyError: 'x'"}


def start(run: MadeRun) -> None:
    """Leave the run without a trained step."""


def train(run: MadeRun) -> None:
    for index in range(4):
        run.add_step(BATCH, {"train": 1.0 + index, "checkpoint": 0.5}, reward__std=0.5)


def fail_agents(run: MadeRun) -> None:
    for _ in range(9):
        run.add_event("driver-cell-0", "episode_failed", **FAILED_TRY)


def fail_rank(run: MadeRun) -> None:
    train(run)
    job = run.paths.job("trainer")
    job.root.mkdir(parents=True)
    job.launch.write_bytes(
        msgspec.json.encode(LaunchFile(JobSpec("trainer", "train", []), "", "", "", {}))
    )
    write_task_exit(job, 0, TaskExit(70, "trainer", "ValueError: not a number"))


def learn_nothing(run: MadeRun) -> None:
    for _ in range(4):
        run.add_step(BATCH, grad_norm=0.0)


def limit_by_evaluation(run: MadeRun) -> None:
    run.add_step(BATCH, {"eval": 30.0}, eval__reward=0.25)


def finish(run: MadeRun) -> None:
    train(run)
    run.finish()


def finish_long_run(run: MadeRun) -> None:
    for index in range(60):
        run.add_step(BATCH[:4], {"publish": 2.0 if index < 30 else 0.1})
    run.finish()


def cancel(run: MadeRun) -> None:
    train(run)
    run.paths.cancelled_marker.touch()


def stop_by_signal(run: MadeRun) -> None:
    train(run)
    run.add_event("launcher", "launcher_ended", signal="SIGINT")


def fill_disk(run: MadeRun) -> None:
    run.add_step(BATCH, disk__free_bytes=1 << 20)


RECORDED: list[tuple[Callable[[MadeRun], None], str]] = [
    *((start, "stopped"), (train, "stopped"), (fail_agents, "stopped"), (fail_rank, "failed")),
    *((learn_nothing, "stopped"), (limit_by_evaluation, "stopped"), (finish, "finished")),
    *((finish_long_run, "finished"), (cancel, "cancelled"), (stop_by_signal, "stopped")),
    (fill_disk, "stopped"),
]


@pytest.mark.parametrize(("record", "state"), RECORDED)
def test_status_why_list_page_report_and_terminal_agree(
    record: Callable[[MadeRun], None],
    state: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = MadeRun(tmp_path)
    reporter = PlainReporter(run.paths, 100, 0)
    record(run)
    view = RunView(run.paths)
    assert view.state == state
    reporter.close()
    output = capsys.readouterr().out
    assert output.count("\nstep ") + output.startswith("step ") == len(view.steps)
    status_code = exit_code_of("status", view.paths.root)
    status = capsys.readouterr().out
    assert status.startswith(f"made/run: {state}\n")
    why_code = exit_code_of("why", view.paths.root)
    why = capsys.readouterr().out
    assert exit_code_of("list", view.paths.root) == 0
    assert f"made/run  {state} " in capsys.readouterr().out
    (page,) = map(describe_run_overview, RunViewer().view([run.paths]))
    out = tmp_path / "report.html"
    write_report([run.paths], out, tmp_path / "cache")
    (data,) = re.findall(r'id="report">(.*?)</script>', out.read_text())
    report = json.loads(data)
    (row,) = report["list"]["runs"]
    reported = report["runs"]["made/run"]["overview"]
    for part in ("state", "alerts", "step_times"):
        assert reported[part] == json.loads(json.dumps(page[part]))
    assert page["state"] == row["state"] == state
    assert row["step"] == view.step
    reasons = [line.strip() for line in status.splitlines() if line.startswith("  reason ")]
    assert [line for line in page["progress"] if line.startswith("reason ")] == reasons
    assert reported["progress"][: len(reasons)] == reasons
    assert page["alerts"] == [
        {"level": alert.level, "rule": alert.rule, "message": alert.message, "hint": alert.hint}
        for alert in view.alerts
    ]
    assert all(alert.message in status for alert in view.alerts)
    assert all(f"({alert.rule}; try: " in output for alert in view.alerts if alert.step > 0)
    assert bool(view.failure_alerts) == bool(row["failures"]) == bool(status_code)
    assert why_code or not status_code
    times = view.step_times
    if times is None:
        assert page["step_times"] is None
        return
    sentence = describe_step_times(times)
    assert sentence in status
    assert sum(sentence in line for line in page["progress"]) == 1
    assert page["step_times"]["shares"] == times.shares
    if view.state == "finished":
        assert f"  {sentence}\n" in why
    exit_code_of("why", view.paths.root, "--slow")
    slow = capsys.readouterr().out
    assert f"s of the {times.mean_s:.1f} s of a step" in slow
    rows = view.steps[-times.steps :]
    parts = measure_mean_step_parts(rows, sum_batch_waits(rows, []))
    waiting = {"generation", "tools", "waiting for a replica"}
    seconds = sum(took for name, took in parts.items() if name in waiting)
    assert seconds == pytest.approx(times.shares["generation"] * times.mean_s)


@pytest.mark.parametrize(
    ("rewards", "told"),
    [
        ([0.9] * 6 + [0.25] * 6, "fell: 0.900 in the first 5 steps, 0.250 in the last 5 steps"),
        ([0.0, 0.5], "rose: 0.000 in the first step, 0.500 in the last step"),
        ([0.5] * 4, "did not change: 0.500 in the first 2 steps, 0.500 in the last 2 steps"),
        ([0.5], None),
    ],
)
def test_why_says_what_became_of_the_reward(
    rewards: list[float],
    told: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = MadeRun(tmp_path)
    for reward in rewards:
        run.add_step(BATCH, reward__mean=reward)
    run.finish()
    exit_code_of("why", run.paths.root)
    why = capsys.readouterr().out
    assert ("its reward " in why) == (told is not None)
    assert told is None or f"  its reward {told}\n" in why


def test_a_run_at_work_here_is_running(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = MadeRun(tmp_path)
    with hold_lock(run.paths.lock):
        exit_code_of("status", run.paths.root)
        exit_code_of("why", run.paths.root)
        shown = capsys.readouterr().out
        (view,) = RunViewer().view([run.paths])
        assert (view.state, view.is_running) == ("running here", True)
    assert "made/run: running here\n" in shown
    assert "the run is running, and nothing has failed" in shown


def test_another_look_reads_what_has_changed(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    view = RunView(run.paths)
    assert (view.step, view.state) == (0, "stopped")
    train(run)
    assert view.step == 0
    view.look_again()
    steps = view.steps
    run.paths.finished_marker.touch()
    view.look_again()
    assert view.steps is steps, "they are parsed when their files change"
    assert (view.step, view.state) == (4, "finished")


@pytest.mark.parametrize("words", [("--help",), ("status",), ("why",), ("list",)])
def test_a_command_that_reads_a_run_imports_no_more(tmp_path: Path, words: tuple[str, ...]) -> None:
    run = MadeRun(tmp_path)
    train(run)
    arguments = [*words, *([] if words == ("--help",) else [str(run.paths.root)])]
    heavy = ("torch", "numpy", "pydantic", "omegaconf", "httpx", "aiohttp", "asyncio", "rich")
    program = (
        "import sys\nfrom areal_hpc.cli.main import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit:\n    pass\n"
        f"print([one for one in {heavy!r} if one in sys.modules], file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stderr == "[]\n"


def write_job(paths: RunPaths, name: str, tasks: int, gpus: int, nodes: int | None) -> None:
    job = paths.job(name)
    job.root.mkdir(parents=True)
    spec = JobSpec(name, "agents", [], tasks=tasks, gpus_per_task=gpus)
    job.launch.write_bytes(msgspec.json.encode(LaunchFile(spec, "", "", "", {})))
    if nodes is not None:
        job.script.write_text(f"#!/bin/bash\n#SBATCH --nodes={nodes}\n")


@pytest.mark.parametrize(
    ("gpus", "expected"), [(0, HeldResources("node", 4, 2, 2)), (2, HeldResources("GPU", 16, 4, 2))]
)
def test_a_run_holds_gpus_or_else_nodes(gpus: int, expected: HeldResources, tmp_path: Path) -> None:
    paths = MadeRun(tmp_path).paths
    assert RunView(paths).held_resources is None
    write_job(paths, "sft", 8, gpus, 4)
    write_job(paths, "trainer", 8, gpus, 4)
    write_job(paths, "cell-0", 1, gpus, 1)
    write_job(paths, "cell-1", 1, gpus, None)
    assert RunView(paths).held_resources == expected


def test_hours_are_those_that_each_side_waited_for_the_other() -> None:
    rows: list[dict[str, Any]] = [
        {"time/step_s": 1800.0, "time/batch_wait_s": 600.0, "time/cell_wait_s": 300.0},
        {"time/step_s": 1800.0, "time/batch_wait_s": None, "cells/idle_s": 1800.0},
        {"step": 3, "eval/reward": 0.5},
    ]
    assert describe_idle_time(rows, HeldResources("GPU", 8, 4, 2)) == [
        "trainer waiting for cells 2.00 of 8.00 GPU-hours",
        "cells waiting for the trainer 1.00 of 4.00 GPU-hours",
    ]


def test_cells_that_started_before_the_first_step_wait_no_longer_than_the_steps() -> None:
    rows = [{"time/step_s": 1800.0, "cells/idle_s": 9000.0}]
    idle = describe_idle_time(rows, HeldResources("node", 8, 4, 2))[1]
    assert idle == "cells waiting for the trainer 2.00 of 2.00 node-hours"


def test_a_trainer_without_any_cell_waits_until_one_is_found() -> None:
    wait = {"time": 1000.0, "event": "no_cell", "waited_s": 60.0}
    discovery = {"time": 1500.0, "event": "cell_found", "waited_s": 560.0}
    assert measure_cell_wait_s([], 2000.0) is None
    assert measure_cell_wait_s([discovery, wait], 1100.0) == 160.0
    assert measure_cell_wait_s([wait, discovery], 2000.0) is None


def test_the_output_of_a_job_is_found_below_a_folder_with_a_space(tmp_path: Path) -> None:
    folder = tmp_path / "my runs"
    folder.mkdir()
    outputs = [folder / "12_0_log.out", folder / "12_1_log.out"]
    for path in outputs:
        path.touch()
    script = folder / "job.sbatch"
    script.write_text(
        f"#SBATCH --output='{folder}/%j_0_log.out'\nsrun --output '{folder}/%j_%t_log.out' python\n"
    )
    assert find_slurm_output_files(Submission("trainer", "12", 1, 0.0, str(script))) == outputs


def test_an_exit_that_a_new_start_has_just_removed_is_left_out(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    exits = {rank: TaskExit(70) for rank in (0, 1)}
    write_task_exit(paths.job("trainer"), 1, exits[1])
    run = RunJobs(paths, (JobView("trainer", None, None, exits),), QueueSnapshot(), ())
    assert [record.rank for record in read_exit_records(run)] == [1]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def made(tmp_path: Path) -> MadeRun:
    """Two steps of two groups each; the second group of each earns the same."""
    run = MadeRun(tmp_path)
    for _ in range(2):
        differing = [MadeEpisode(reward=reward, reply=(7, 8)) for reward in (0.0, 1.0, 1.0, 0.0)]
        run.add_step([*differing, *[MadeEpisode(reward=0.5, calls=3)] * 4])
    valid = EvaluationResult(2, 2, 0.5, [0.0, 1.0], {}, 1)
    samples = [[1.0, 0.0], [0.0, 0.0]]
    aime = EvaluationResult(2, 2, 0.25, [0.5, 0.0], {}, 1, samples, [["4", "5"], ["", ""]])
    write_evaluation(run.paths, "aime", aime)
    write_evaluation(run.paths, "valid", valid)
    return run


def test_columns_hold_what_was_recorded(made: MadeRun) -> None:
    run = areal_hpc.open_run(made.paths.root)
    assert run.recipe["trainer"]["batch_size"] == 2
    assert run.metrics["step"].tolist() == [1, 2]
    rows = run.trajectories
    assert (rows.n_rows, set(rows["kind"])) == (16, {"train"})
    assert rows["step"].tolist() == [1] * 8 + [2] * 8
    assert rows["length"].tolist() == ([2] * 4 + [3] * 4) * 2
    assert rows["calls"].dtype == np.float64
    assert run.groups["reward_std"].tolist() == [0.5, 0.0] * 2
    assert run.groups["episodes"].tolist() == [4] * 4
    assert run.calls.n_rows == 2 * (4 * 2 + 4 * 3)
    assert np.allclose(run.calls["answered_at"] - run.calls["asked_at"], 1.0)


def test_columns_read_a_shard_as_a_whole_and_not_row_by_row(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    seal_in(run.paths, [trajectory(ticket, 0) for ticket in range(100)])
    made = areal_hpc.open_run(run.paths.root)
    with counted_reads() as reads:
        assert (made.trajectories.n_rows, made.calls.n_rows) == (100, 0)
    assert len(reads) < 50


def test_a_column_takes_values_of_any_shape() -> None:
    columns = Columns([{"ranks": [0, 1]}, {"ranks": [2, 3]}])
    assert columns["ranks"].tolist() == [[0, 1], [2, 3]]


def test_an_episode_of_several_rows_counts_as_their_mean(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    rewards = {0: (1.0, 0.0), 1: (0.0, 1.0), 2: (0.5, 0.5)}
    rows = [
        replace(trajectory(7, episode, reward=reward), row=row)
        for episode, of_rows in rewards.items()
        for row, reward in enumerate(of_rows)
    ]
    seal_in(run.paths, rows)
    groups = areal_hpc.open_run(run.paths.root).groups
    assert groups["episodes"].tolist() == [3]
    assert groups["reward_mean"].tolist() == [0.5]
    assert groups["reward_std"].tolist() == [0.0]


def test_evaluations_have_a_row_per_sample(made: MadeRun) -> None:
    rows = areal_hpc.open_run(made.paths.root).evaluations
    assert rows["set"].tolist() == ["valid"] * 2 + ["aime"] * 4
    assert rows["reward"].tolist() == [0, 1, 1, 0, 0, 0]
    assert rows["sample"].tolist() == [0, 0, 0, 1, 0, 1]
    assert rows["answer"].tolist() == ["", "", "4", "5", "", ""]


def test_a_run_without_anything_has_empty_columns_with_their_names(tmp_path: Path) -> None:
    run = areal_hpc.open_run(MadeRun(tmp_path).paths.root)
    assert {one.n_rows for one in (run.trajectories, run.calls, run.groups, run.evaluations)} == {0}
    assert run.evaluations["reward"].tolist() == []


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="not the directory of a run"):
        areal_hpc.open_run(tmp_path)


def test_the_example_of_the_documentation_runs(made: MadeRun) -> None:
    text = (CHECKOUT / "docs" / "notebooks.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert "~/runs/quickstart/demo" in block
    names: dict[str, object] = {}
    exec(block.replace("~/runs/quickstart/demo", str(made.paths.root)), names)
    assert names["last_step"] == 2
    assert names["taught_nothing"] == 0.5
    assert names["surprise"] == pytest.approx(0.5)
    assert names["mean_length"] == 2.5


def test_printed_commands_name_the_program_as_the_shell_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "areal-hpc"
    program.touch(0o755)
    monkeypatch.setattr(sys, "argv", [str(program)])
    monkeypatch.setenv("PATH", str(tmp_path))
    assert get_program_command() == "areal-hpc"
    monkeypatch.setenv("PATH", "/nowhere")
    assert get_program_command() == str(program)
