"""The complete product works end to end with real components, and survives kill -9."""

import signal
from functools import partial
from pathlib import Path

import pytest

import areal_hpc
from areal_hpc.jobs.config import get_interpreter
from areal_hpc.metrics.step_metrics import (
    STEP_PHASES,
    compute_time_shares_by_system_part,
    find_metric,
    read_metrics,
)
from areal_hpc.rundir.jsonl import read_readable_records
from areal_hpc.rundir.paths import format_step_dir
from tests.support.commands import exit_code_of, run_program, said_by
from tests.support.environments import CHECKOUT
from tests.support.killed_run import Kill, KilledRun
from tests.support.process_commands import find_processes
from tests.support.run_files import events_of
from tests.support.small_run import SmallRun, await_none_left

pytestmark = pytest.mark.timeout(900)

PHASES = {f"time/{phase.name}_s" for phase in STEP_PHASES}


def test_every_step_is_trained_and_told_and_nothing_is_left_running(finished: SmallRun) -> None:
    assert finished.processes() == []
    rows = read_readable_records(finished.paths.metrics)[:4]
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert [row["step"] for row in rows if "eval/reward" in row] == [0, 2, 3]
    for row in rows[1:]:
        assert row["tokens/trained"] > 0
        assert row["staleness/max"] == 0
        assert row["version"] == f"1.{row['step']}"
        phases = {"time/batch_wait_s", "time/train_s", "time/publish_s", "cells/idle_s"}
        assert phases <= row.keys()
        assert row["logprob/engine_trainer_max_abs_diff"] <= 1e-4
        assert row["logprob/compared_tokens"] == row["tokens/sampled"]
        assert row["entropy/mean"] > 0
        assert row["episode/failures"] == 0


def test_every_metric_is_in_the_catalogue_and_phases_cover_the_steps(finished: SmallRun) -> None:
    rows = read_metrics(finished.paths.metrics)
    assert {name for row in rows for name in row if find_metric(name) is None} == set()
    covered_s = 0.0
    for row in rows:
        covered_s += sum(seconds for name, seconds in row.items() if name in PHASES)
        # Steps this short may wait for a processor between two phases.
        assert sum(compute_time_shares_by_system_part(row).values()) >= 0.8, row["step"]
        assert row["limit"] in {phase.system_part for phase in STEP_PHASES}
        assert row["generation"] == (1 if row["step"] <= 3 else 2)  # another test asks for more
    assert covered_s >= 0.97 * sum(row["time/step_s"] for row in rows)
    times = [row["unix_time_s"] for row in rows]
    assert times == sorted(times)
    assert times[-1] <= finished.paths.finished_marker.stat().st_mtime + 1


def test_verify_finds_a_flipped_byte(finished: SmallRun, capfd: pytest.CaptureFixture[str]) -> None:
    verify = partial(exit_code_of, "shards", "verify", finished.paths.root)
    assert verify() == 0
    shard = sorted(finished.paths.shards_dir.glob("*.h5"))[0]
    content = shard.read_bytes()
    for position in (0, 100, len(content) // 3, len(content) // 2, len(content) - 1):
        damaged = bytearray(content)
        damaged[position] ^= 1
        shard.write_bytes(damaged)
        capfd.readouterr()
        assert verify() == 65
        assert shard.name in capfd.readouterr().out
    shard.write_bytes(content)
    assert verify() == 0


def test_what_the_model_said_can_be_read_held_out_episodes_as_well(
    finished: SmallRun, capfd: pytest.CaptureFixture[str]
) -> None:
    show = partial(exit_code_of, "shards", "show", finished.paths.root)
    assert show("--where", "kind=evaluation and step=2", "-n", "20") == 0
    output = capfd.readouterr().out
    assert output.count("held-out task ") == 8
    assert output.count("assistant  (") == 8
    assert show("--where", "step=1 and kind=train", "--sort", "length", "-n", "4") == 0
    assert capfd.readouterr().out.count("── row ") == 4
    assert show("--where", "stepp=1") == 78
    assert "there is no field 'stepp'" in capfd.readouterr().err
    assert show("0", "--tokens") == 0
    assert "logprob" in capfd.readouterr().out


def test_running_a_finished_run_says_so_and_changes_nothing(finished: SmallRun) -> None:
    before = finished.paths.metrics.read_bytes()
    steps = read_readable_records(finished.paths.metrics)[-1]["step"]  # another test asks for more
    assert finished.audited() == f"trained_once={4 * steps} duplicates=0 lost=0 open=0"
    finished.finish()
    assert "this run is finished" in finished.said()
    assert finished.paths.metrics.read_bytes() == before


@pytest.mark.thorough
def test_a_finished_run_goes_on_from_python_when_more_steps_are_asked_for(
    finished: SmallRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(CHECKOUT)
    handler = signal.getsignal(signal.SIGINT)
    result = areal_hpc.run(finished.paths.recipe, trainer={"total_steps": 4})
    assert "changed  trainer.total_steps: 3 -> 4" in capsys.readouterr().out
    last = read_readable_records(finished.paths.metrics)[-1]
    assert last["step"] == 4
    assert (result.run_dir, result.exit_reason) == (finished.paths.root, "finished")
    assert (result.step, result.reward) == (4, last["reward/mean"])
    assert result.heldout_reward == last["eval/reward"]
    assert finished.audited() == "trained_once=16 duplicates=0 lost=0 open=0"
    assert signal.getsignal(signal.SIGINT) is handler


def test_the_trained_model_loads_in_transformers(finished: SmallRun) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = finished.paths.export_dir("step_00000003")
    model = AutoModelForCausalLM.from_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert model.config.model_type == "qwen3"
    assert tokenizer.decode(tokenizer.encode("3 + 4 =")) == "3 + 4 ="


def test_a_checkpoint_is_exported_without_torch(finished: SmallRun, tmp_path: Path) -> None:
    export = (get_interpreter("agents", "auto"), "-m", "areal_hpc", "export", finished.paths.root)
    said_by(run_program(*export, "--out", tmp_path / "model"))
    newest = format_step_dir(read_readable_records(finished.paths.metrics)[-1]["step"])
    by_trainer = finished.paths.export_dir(newest)
    assert contents(tmp_path / "model") == contents(by_trainer)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_a_run_outlives_proxy_ledger_trainer_and_a_whole_job(model: Path, tmp_path: Path) -> None:
    kills = [Kill("proxy", "seal"), Kill("ledger", "step"), Kill("trainer", "checkpoint")]
    run = KilledRun(tmp_path, model, kills, steps=6)
    run.start()
    run.await_true(lambda: run.struck().keys() == {kill.name for kill in kills})
    supervisors = find_processes("submitit", run.paths.jobs_dir / "trainer")
    assert supervisors
    for process in supervisors:
        process.kill()
    assert run.wait() == 0, run.said()
    run.assert_complete()
    submitted = [event["job"] for event in events_of(run.paths, "job_submitted")]
    assert sorted(submitted) == ["cell-0", "trainer", "trainer"], "ranks start again within a job"
    await_none_left(run, 20.0)
