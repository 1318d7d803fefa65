"""Real runs with one fault each: `why --slow` names what limits them, and who is to blame."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from areal_hpc.launch.tiny_model import make_tiny_model
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.view.answers.slow_run import explain_slow_run
from tests.support.freezing import FreezableDisk, freezable_disk
from tests.support.process_commands import command_of, is_scheduler
from tests.support.run_files import events_of
from tests.support.small_run import SmallRun

pytestmark = pytest.mark.timeout(600)
QUESTIONS = ["State the final answer to the following arithmetic problem: 1 + 2 = Answer: 3"]
AGENTS = "rollout.workflow=tests.support.slow_agent"


def run_to_its_end(
    tmp_path: Path, *overrides: str, fileroot: Path | None = None
) -> tuple[SmallRun, str]:
    """A finished run from a tiny model, and the headline on it."""
    model = tmp_path / "model"
    make_tiny_model(
        model, QUESTIONS, hidden=64, heads=2, kv_heads=2, head_dim=32, ffn=128, vocab=320
    )
    run = SmallRun(
        fileroot or tmp_path / "runs",
        *("sft=null", "model.tiny=null", f"model.path={model}", "valid_dataset=null"),
        *("trainer.total_steps=4", "trainer.checkpoint_every_steps=4", *overrides),
    )
    run.finish()
    answer = explain_slow_run(run.paths)
    print(answer)
    return run, answer.headline


@contextmanager
def holding_servers_up(runs: Path, cell: str) -> Iterator[None]:
    """Servers of a cell stand still for nine tenths of the time, as if their node were slow."""
    is_over = threading.Event()

    def hold() -> None:
        config = f"jobs/{cell}/inference.json"
        paths = RunPaths(runs / "quickstart" / "demo")
        while not any(one["role"] == cell for one in events_of(paths, "replica_ready")):
            if is_over.wait(0.2):
                return
        (job,) = (
            one
            for one in psutil.process_iter()
            if str(runs) in (words := " ".join(command_of(one))) and config in words
        )
        while not is_over.wait(0.03):
            with suppress(psutil.NoSuchProcess):
                servers = job.children(recursive=True)
                stop_for(0.3, [one for one in servers if is_scheduler(one)])

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def stop_for(seconds: float, processes: Sequence[psutil.Process]) -> None:
    """Stop processes for so long."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.suspend()
    time.sleep(seconds)
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.resume()


@contextmanager
def slowing_down(disk: FreezableDisk, paths: RunPaths) -> Iterator[None]:
    """The disk takes nothing for seven eighths of the time, once the trainer is at work."""
    is_over = threading.Event()

    def freeze() -> None:
        while not events_of(paths, "state_loaded"):
            if is_over.wait(0.2):
                return
        while not is_over.wait(0.2):
            disk.freeze(1.4)

    thread = threading.Thread(target=freeze)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def test_a_slow_judge_of_answers_is_named(tmp_path: Path) -> None:
    late = f"{AGENTS}.LateAgent"
    _, said = run_to_its_end(tmp_path, late, "rollout.workflow_kwargs={judged_after_s: 4.0}")
    assert said.startswith("the run is limited by tools: ")
    assert "; after the last reply (rewards) takes 4." in said


def test_one_long_episode_is_named_with_its_cell(tmp_path: Path) -> None:
    count = tmp_path / "count"
    kwargs = f"rollout.workflow_kwargs={{count: {count}, every: 16, pause_s: 12.0}}"
    _, said = run_to_its_end(tmp_path, f"{AGENTS}.StragglingAgent", kwargs)
    assert said.startswith("the run is limited by tools: ")
    assert "the last episodes of batches were awaited for" in said
    assert " on cell-0 took 1" in said


def test_evaluation_too_often_is_named_with_its_key(tmp_path: Path) -> None:
    _, said = run_to_its_end(
        tmp_path,
        "valid_dataset.generator=examples.quickstart.task:valid_tasks",
        "evaluation.every_steps=1",
        "evaluation.tasks=64",
        "valid_dataset.kwargs.size=64",
    )
    assert said.startswith("the run is limited by evaluation: ")
    assert said.endswith("; evaluation.every_steps=1")


def test_a_slow_cell_is_named(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    with holding_servers_up(runs, "cell-1"):
        run, said = run_to_its_end(tmp_path, "inference.cells=2", "trainer.total_steps=16")
    told = "\n".join(one.text for one in explain_slow_run(run.paths).findings)
    assert said.startswith("the run is limited by generation: ")
    assert said.endswith("; replica 0 of cell-1 is slow")
    assert "replica 0 of cell-1 generates" in told


def test_slow_storage_is_named(tmp_path: Path) -> None:
    with freezable_disk(tmp_path) as disk:
        runs = disk.root / "runs"
        with slowing_down(disk, RunPaths(runs / "quickstart" / "demo")):
            run, said = run_to_its_end(
                tmp_path, "trainer.checkpoint_every_steps=1", "trainer.total_steps=6", fileroot=runs
            )
            told = "\n".join(one.text for one in explain_slow_run(run.paths).findings)
    # Metrics and journals wait as well: whether one part is the largest is chance.
    assert "storage is slow" in said or "wait for the run directory's storage" in told


def test_a_run_without_a_fault_blames_nobody(tmp_path: Path) -> None:
    _, said = run_to_its_end(tmp_path)
    limited, _, blamed = said.partition("; ")
    assert limited.startswith(("the run is limited by generation", "the run is limited by train"))
    assert not blamed
