"""Runs and evaluations with killed or frozen processes: they go on, or are resumed.

The real stack. Writes `benchmarks/results/kill_matrix.json`, `elastic.json` and `freezes.json`.
"""

import json
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from areal_hpc.evaluation.set_names import STEP_OF_LOADED_WEIGHTS
from areal_hpc.metrics.step_metrics import read_metrics
from areal_hpc.rundir.jsonl import read_readable_records
from areal_hpc.rundir.lock import is_lock_held
from areal_hpc.rundir.manifests import read_evaluated_tickets
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.view.evaluation_report import read_report
from areal_hpc.view.transcripts.row_search import RowQuery, find_rows
from areal_hpc.wire.weight_version import WeightVersion
from tests.support.commands import areal_hpc, said_by, start_areal_hpc
from tests.support.deadlines import scaled
from tests.support.freezing import FreezableDisk, freezable_disk, freeze_job
from tests.support.killed_run import PARTIES, POINTS, SLOW, Kill, KilledRun, random_model
from tests.support.process_commands import find_processes
from tests.support.results import add_results, write_results
from tests.support.run_files import events_of, trained_steps
from tests.support.small_run import (
    CUT_DOWN,
    LIGHT,
    SmallRun,
    await_none_left,
    interrupted_at_end,
    kill_all,
    processes_of,
    started_from,
)
from tests.support.waiting import wait_for

pytestmark = pytest.mark.timeout(3600)


@pytest.mark.parametrize("party", PARTIES)
def test_a_run_whose_party_is_killed_at_every_point_completes(
    party: str, model: Path, tmp_path: Path
) -> None:
    kills = [Kill(party, point) for point in POINTS]
    run = KilledRun(tmp_path, model, kills)
    launches = run.run_to_the_end(most_launches=1 + len(kills) if party == "trainer" else 1)
    struck = run.struck()
    assert struck.keys() == {kill.name for kill in kills}, run.said()
    verdict = run.assert_complete()
    await_none_left(run, 20.0)
    again = f", {launches - 1} times by the same command" if launches > 1 else ""
    row = {
        **{kill.point: run.seconds_to_next_version(struck[kill.name]) for kill in kills},
        "went on": f"by itself{again}",
        "audit": f"`{verdict}`",
    }
    add_results("kill_matrix", **{party: row})


STOP_LIMIT_S = 20.0


def evaluates(paths: RunPaths) -> bool:
    endpoints = (paths.rendezvous_dir / f"{name}.json" for name in ("control-cell-0", "ledger"))
    return all(endpoint.exists() for endpoint in endpoints) and any(paths.generations_dir.glob("*"))


PHASES: Mapping[str, Callable[[RunPaths], bool]] = {
    "SFT": lambda paths: bool(read_readable_records(paths.sft_metrics)),
    "servers starting": lambda paths: any(paths.logs_dir.glob("latest/cell-0/*.log")),
    "first evaluation": evaluates,
    "training": lambda paths: trained_steps(paths) >= 1,
}
"""Conditions that tell when a run has come to them."""


def test_ctrl_c_in_every_phase_and_a_killed_launcher_then_the_run_completes(
    tmp_path: Path,
) -> None:
    run, other = (SmallRun(tmp_path / "runs") for _ in range(2))
    for phase in ("SFT", "servers starting", "first evaluation"):
        interrupt_in(run, phase)
    lose_the_launcher(run, other)
    interrupt_in(run, "training")
    assert trained_steps(run.paths) >= 1
    run.finish()
    assert [row["step"] for row in read_readable_records(run.paths.metrics)] == [0, 1, 2, 3]
    assert run.processes() == []


def interrupt_in(run: SmallRun, phase: str) -> None:
    seconds = run.interrupt_when(partial(PHASES[phase], run.paths))
    assert seconds <= scaled(STOP_LIMIT_S), f"{phase}: {seconds:.1f} s"
    assert run.processes() == [], phase
    for name in ("control-cell-0.json", "ledger.json"):
        (run.paths.rendezvous_dir / name).unlink(missing_ok=True)


def lose_the_launcher(run: SmallRun, other: SmallRun) -> None:
    """Another launcher is refused meanwhile; when the first is killed, the run stops."""
    run.start()
    run.await_true(lambda: is_lock_held(run.paths.lock))
    other.start()
    assert other.wait() == 75
    assert "another process is running this recipe" in other.said()
    run.await_true(lambda: evaluates(run.paths))
    assert run.process is not None
    os.kill(run.process.pid, signal.SIGKILL)
    run.wait()
    await_none_left(run, STOP_LIMIT_S)


STEPS_JUDGED = 8
TASKS_JUDGED = 96
"""Enough for training to go on while they are played."""


def begun(paths: RunPaths) -> list[dict[str, Any]]:
    return events_of(paths, "evaluation_begun")


def step_of(event: dict[str, Any]) -> int:
    return WeightVersion.parse(event["version"]).step


def rewards(paths: RunPaths) -> dict[int, float]:
    lines = read_metrics(paths.metrics)
    return {line["step"]: line["eval/reward"] for line in lines if "eval/reward" in line}


def is_judging_earlier_weights(paths: RunPaths) -> bool:
    """Training has gone on while an evaluation is under way."""
    events = begun(paths)
    if not events or step_of(events[-1]) in rewards(paths):
        return False
    return step_of(events[-1]) < trained_steps(paths)


def process_of(paths: RunPaths, config: str) -> psutil.Process:
    return find_processes(paths.jobs_dir / f"{config}.json")[0]


@pytest.fixture
def run(model: Path, tmp_path: Path) -> Iterator[SmallRun]:
    run = SmallRun(
        tmp_path / "runs",
        *started_from(model),
        "evaluation.separate_cell=true",
        f"evaluation.tasks={TASKS_JUDGED}",
        f"valid_dataset.kwargs.size={TASKS_JUDGED}",
        f"trainer.total_steps={STEPS_JUDGED}",
    )
    yield run
    if run.process is not None and run.process.poll() is None:  # the test failed on the way
        run.press_ctrl_c()
    await_none_left(run, 20.0)


def test_a_run_and_its_evaluations_outlive_trainer_and_evaluation_server(run: SmallRun) -> None:
    paths = run.paths
    run.start()
    run.await_true(lambda: is_judging_earlier_weights(paths))
    process_of(paths, "trainer/trainer").kill()
    run.await_true(lambda: begun(paths)[-1]["version"].startswith("2."))
    run.await_true(lambda: is_judging_earlier_weights(paths))
    judged = begun(paths)[-1]
    servers = process_of(paths, "evaluation/inference").children()
    next(p for p in servers if "areal_hpc.inference.cpu.sglang_cpu" in p.cmdline()).kill()
    assert run.wait(400) == 0, run.said()

    lines = read_metrics(paths.metrics)
    assert [line["step"] for line in lines] == list(range(STEPS_JUDGED + 1))
    means = rewards(paths)
    assert STEPS_JUDGED in means, run.said()
    for step, reward in means.items():
        result = json.loads(paths.evaluation(step).read_bytes())
        assert (result["n_tasks"], result["mean_reward"]) == (TASKS_JUDGED, reward)
        assert result["failures"] == {}
    assert set(means) <= {step_of(event) for event in begun(paths)}
    given_up = [event["given_up"] for event in begun(paths) if event["given_up"]]
    assert given_up == [judged["version"]] or step_of(judged) in means  # over just before the kill
    assert paths.list_attempts() == [1]
    logged = {path.name for path in paths.log_dir(1).glob("*")}
    assert logged == {"cell-0", "evaluation", "trainer"}
    assert run.audited() == f"trained_once={4 * STEPS_JUDGED} duplicates=0 lost=0 open=0"


TASKS = 24
FEW = "{dataset: {generator: 'tests.support.sums:tasks', kwargs: {size: 6, seed: 5, terms: 2}}, "
SAMPLED = "n_samples: 2, sampling: {temperature: 1.0, max_new_tokens: 24}, metrics: [pass@k]}"


def list_arguments(model: Path, fileroot: Path) -> list[str]:
    return [
        *("eval", str(model), "--recipe", "recipes/quickstart.yaml"),
        *CUT_DOWN,
        *LIGHT,
        f"cluster.fileroot={fileroot}",
        f"evaluation.tasks={TASKS}",
        f"valid_dataset.kwargs.size={TASKS}",
        # Few at a time: there is a moment to kill it.
        *("rollout.n_samples=2", "rollout.max_concurrent_rollouts=2"),
        f"evaluation.sets.few={FEW}{SAMPLED}",
    ]


def test_an_evaluation_that_was_killed_repeats_no_task_and_compares_with_itself(
    model: Path, tmp_path: Path
) -> None:
    arguments = list_arguments(model, tmp_path / "runs")
    paths = RunPaths(tmp_path / "runs" / "quickstart" / f"eval-{model.name}")
    launcher = start_areal_hpc(*arguments, environ=os.environ)
    wait_for(
        lambda: (
            launcher.poll() is not None
            or len(read_evaluated_tickets(paths, STEP_OF_LOADED_WEIGHTS)) >= 4
        ),
        200,
    )
    kill_all(launcher, paths.root)
    launcher.communicate()
    done = {ticket.ticket_id for ticket in read_evaluated_tickets(paths, STEP_OF_LOADED_WEIGHTS)}
    assert 4 <= len(done) < TASKS + 6

    output = said_by(areal_hpc(*arguments, timeout_s=200))
    assert "valid" in output
    assert "pass@2" in output
    report = read_report(paths.root)
    assert [len(report.sets[name].samples) for name in ("valid", "few")] == [TASKS, 6]
    assert {len(samples) for samples in report.sets["few"].samples} == {2}
    rows = Counter(row.read().ticket_id for row in find_rows(paths.root, RowQuery())[0])
    assert {ticket: rows[ticket] for ticket in done} == {
        ticket: 2 if ticket >= TASKS else 1 for ticket in done
    }
    assert not paths.evaluated_tickets(STEP_OF_LOADED_WEIGHTS).exists()
    assert processes_of(paths.root) == []

    # Everything is there: nothing is started, and it is as good as itself, to the last task.
    again = said_by(areal_hpc(*arguments, "--compare", str(paths.evaluation_report)))
    assert again.startswith("set ")
    assert "no difference is shown" in again
    assert json.loads(paths.evaluation_report.read_text())["model"] == str(model.resolve())

    # Of another model by the same name, or by other settings, these are not the results.
    other = shutil.copytree(model, tmp_path / "other" / model.name)
    mistaken = areal_hpc(*list_arguments(other, tmp_path / "runs"), "evaluation.n_samples=3")
    assert mistaken.returncode == 78
    assert f"not of {other}" in mistaken.stderr
    assert "set valid was played with 1, got 3" in mistaken.stderr


CELLS = 3
STEPS_WITH_CHANGES = 400
STEPS_OF_A_SIZE = 5
MOST_MEMBERSHIP_S = 5.0
NOTICED_S = 60.0
START_TIMEOUT_S = 300.0


class ElasticRun(KilledRun):
    """A run of three cells that can be sent away and called back."""

    def __init__(self, root: Path, model: Path) -> None:
        super().__init__(
            root,
            model,
            [],
            STEPS_WITH_CHANGES,
            f"inference.cells={CELLS}",
            *SLOW,
            "rollout.max_head_offpolicyness=1",
        )
        self._away: dict[int, psutil.Process] = {}

    def send_away(self, cell: int) -> None:
        supervisor = find_processes("submitit", self.paths.jobs_dir / f"cell-{cell}")[0]
        supervisor.suspend()
        for child in supervisor.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
        self._away[cell] = supervisor

    def call_back(self) -> None:
        for supervisor in self._away.values():
            supervisor.send_signal(signal.SIGCONT)
        self._away.clear()

    def published(self) -> list[dict[str, Any]]:
        return events_of(self.paths, "weights_published")

    def await_replicas(self, count: int, timeout_s: float) -> None:
        """Wait until `STEPS_OF_A_SIZE` steps in a row were published to so many replicas."""

        def are_so_many() -> bool:
            last = self.published()[-STEPS_OF_A_SIZE:]
            return [row["replicas"] for row in last] == [count] * STEPS_OF_A_SIZE

        self.await_true(are_so_many, timeout_s)


def test_replicas_leave_and_join_and_the_trainer_stays(model: Path, tmp_path: Path) -> None:
    run = ElasticRun(tmp_path, model)
    seen: list[dict[str, Any]] = []
    run.start()
    run.await_replicas(CELLS, START_TIMEOUT_S)
    for left in (2, 1):
        began, known = time.time(), len(run.published())
        run.send_away(left)
        run.await_replicas(left, NOTICED_S)
        seen.append(change(run, f"{left + 1} -> {left}", began, known))
    began, known = time.time(), len(run.published())
    run.send_away(0)
    time.sleep(20.0)
    paused_at = trained_steps(run.paths)
    time.sleep(10.0)
    assert trained_steps(run.paths) == paused_at, "nothing can be trained on without a replica"
    run.call_back()
    run.await_replicas(CELLS, START_TIMEOUT_S)
    seen.append(change(run, "1 -> 0 -> 3", began, known))
    run.press_ctrl_c()
    await_none_left(run, 20.0)
    died = [event["process"] for event in events_of(run.paths, "process_exited")]
    assert not [process for process in died if "trainer" in process], died
    write_results("elastic", seen)
    assert max(row["longest_update_s"] for row in seen) <= scaled(MOST_MEMBERSHIP_S), seen


def change(run: ElasticRun, name: str, began: float, known: int) -> dict[str, Any]:
    """Summarize the publications of one change of membership."""
    publications = run.published()[known:]
    return {
        "change": name,
        "seconds": round(time.time() - began, 1),
        "longest_update_s": max(sum(row["seconds"].values()) for row in publications),
        "failed_updates": sum(bool(row["failed"]) for row in publications),
        "publications": len(publications),
    }


STORAGE_HANGS_S, NODE_FROZEN_S = 65.0, 70.0
"""Periods above `inference.health_timeout_s`, after which a silent server is restarted."""
GOES_ON_WITHIN_S = 120.0
STEPS_BETWEEN = 2


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[FreezableDisk]:
    with freezable_disk(tmp_path) as disk:
        yield disk


def test_what_stands_still_with_its_storage_or_node_is_not_restarted(
    disk: FreezableDisk, tmp_path: Path
) -> None:
    run = KilledRun(disk.root, random_model(tmp_path / "model"), [], 10_000, *SLOW)

    def await_steps(count: int, within_s: float) -> float:
        began, goal = time.monotonic(), trained_steps(run.paths) + count
        run.await_true(lambda: trained_steps(run.paths) >= goal, within_s)
        return round(time.monotonic() - began, 1)

    with interrupted_at_end(run):
        run.start()
        await_steps(STEPS_BETWEEN, START_TIMEOUT_S)
        freezes: dict[str, tuple[float, Callable[[], object]]] = {
            "storage hung": (STORAGE_HANGS_S, lambda: disk.freeze(STORAGE_HANGS_S)),
            "node frozen": (
                NODE_FROZEN_S,
                lambda: freeze_job(run.paths.job("cell-0").root, NODE_FROZEN_S),
            ),
        }
        measured = {}
        for name, (seconds, freeze) in freezes.items():
            freeze()
            measured[name] = {
                "seconds": seconds,
                "seconds_to_next_step": await_steps(1, GOES_ON_WITHIN_S),
                "servers_restarted": len(events_of(run.paths, "replica_died")),
                "processes_restarted": len(events_of(run.paths, "process_exited")),
            }
            await_steps(STEPS_BETWEEN, GOES_ON_WITHIN_S)
        assert len(events_of(run.paths, "replica_ready")) == 1, run.said()
    run.steps = trained_steps(run.paths) + STEPS_BETWEEN
    run.override(f"trainer.total_steps={run.steps}")
    run.finish()
    verdict = run.assert_complete()
    await_none_left(run, 20.0)
    write_results("freezes", {"freezes": measured, "steps": run.steps, "audit": verdict})
    assert all(not row["servers_restarted"] for row in measured.values()), measured
    assert all(not row["processes_restarted"] for row in measured.values()), measured
