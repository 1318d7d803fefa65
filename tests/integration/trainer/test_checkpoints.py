"""Checkpoints are written beside the training, appear whole, and fail loudly."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.rundir.paths import RunPaths
from tests.support.environments import CHECKOUT
from tests.support.rank_server import RankServer, TaskExit
from tests.support.recorded_run import record_run

INSPECTIONS = "tests.integration.trainer.checkpoint_inspections"
FIRST = ["step_00000001"]
BOTH = ["step_00000001", "step_00000002"]
STOPPED, STORAGE_FAILED, DATA_DAMAGED = 143, 75, 65


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_run(tmp_path_factory.mktemp("recorded"), 4).root


@pytest.fixture
def paths(recorded: Path, tmp_path: Path) -> RunPaths:
    return RunPaths(shutil.copytree(recorded, tmp_path / "run"))


def inspect(
    ranks: RankServer, paths: RunPaths, function: str, count: int = 1, **scenario: Any
) -> TaskExit:
    trainer = {"total_steps": 4, "parallel": {"dp": count}}
    name = f"{INSPECTIONS}:{function}"
    return ranks.run(paths, "inspect", count, trainer=trainer, inspect=name, **scenario)


def found_by(
    ranks: RankServer, paths: RunPaths, function: str, count: int = 1, **scenario: Any
) -> dict[str, Any]:
    outcome = inspect(ranks, paths, function, count, **scenario)
    assert outcome.codes == [0] * count, outcome.log
    return outcome.reports[0]


def test_training_goes_on_while_a_checkpoint_of_the_earlier_step_is_written(
    ranks: RankServer, paths: RunPaths
) -> None:
    assert found_by(ranks, paths, "training_goes_on") == {
        "polled": [False] * 3,
        "visible_before": FIRST,
        "became_durable": True,
        "visible_after": BOTH,
        "holds_step_2": True,
    }


def test_a_second_checkpoint_waits_for_the_first(ranks: RankServer, paths: RunPaths) -> None:
    found = found_by(ranks, paths, "second_checkpoint_waits")
    assert found["first_was_visible"]
    assert found["waited_s"] >= 0.4
    assert found["visible"] == ["step_00000002", "step_00000003"]


def test_the_end_of_the_loop_waits_for_the_checkpoint(ranks: RankServer, paths: RunPaths) -> None:
    assert found_by(ranks, paths, "stop_waits") == {"finished": True, "visible": BOTH}


def test_a_failure_waits_for_the_checkpoint(ranks: RankServer, paths: RunPaths) -> None:
    outcome = inspect(ranks, paths, "failure_waits", 2)
    assert [report["visible"] for report in outcome.reports] == [BOTH, BOTH]
    assert "the ledger stays away" in outcome.reports[0]["error"]


FAILURES: dict[str, tuple[str, tuple[str, ...]]] = {
    "disk_is_full": ("ClusterError", ("could not be written", "quota")),
    "storage_refuses": ("ClusterError", ("No such file or directory", "quota")),
    "writers_keep_dying": ("ClusterError", ("died 2 times, at last with exit code -9",)),
    "replaced_while_writing": ("SupersededTrainerError", ()),
    "checkpoint_is_damaged": ("ShardError", ("step_00000001",)),
}
"""What goes wrong with a checkpoint -> the error, and what it says."""


@pytest.mark.parametrize("failure", FAILURES)
def test_a_checkpoint_that_fails_says_why_and_leaves_the_earlier_one(
    ranks: RankServer, paths: RunPaths, failure: str
) -> None:
    kind, said = FAILURES[failure]
    found = found_by(ranks, paths, failure)
    assert found["kind"] == kind
    assert all(part in found["error"] for part in said), found["error"]
    assert found["visible"] == FIRST


def test_a_checkpoint_outlives_its_writer(ranks: RankServer, paths: RunPaths) -> None:
    found = found_by(ranks, paths, "writer_dies_once")
    assert found == {"visible": BOTH, "is_replaced": True, "holds_step_2": True}


def test_a_trainer_that_was_replaced_spares_the_checkpoint_of_its_successor(
    ranks: RankServer, paths: RunPaths
) -> None:
    found = found_by(ranks, paths, "successor_saved_first")
    assert found["kind"] == "SupersededTrainerError"
    assert found["generation"] == 9
    assert found["is_whole"]


def test_the_checkpoint_of_an_abandoned_generation_is_replaced(
    ranks: RankServer, paths: RunPaths
) -> None:
    found = found_by(ranks, paths, "abandoned_checkpoint_is_replaced")
    assert found == {"is_replaced": True, "visible": BOTH}


def test_cleaning_spares_what_a_later_generation_is_writing(
    ranks: RankServer, paths: RunPaths
) -> None:
    assert found_by(ranks, paths, "cleaned") == {"left": [".step_00000002.generation_5"]}


def test_training_and_saving_draw_no_random_numbers(ranks: RankServer, paths: RunPaths) -> None:
    assert found_by(ranks, paths, "draws_no_random_numbers") == {"unchanged": True}


def test_a_resume_takes_the_optimizer_settings_of_the_recipe(
    ranks: RankServer, paths: RunPaths
) -> None:
    found = found_by(ranks, paths, "other_settings")
    assert found["resumed"] == found["given"]
    assert found["resumed"]["steps"] == found["forgotten"]["steps"] == [1.0]
    for group in found["resumed"]["groups"]:
        assert (group["betas"], group["eps"]) == ([0.8, 0.9], 1e-6)
        assert group["weight_decay"] == pytest.approx(0.3 * group["wd_mult"])
    # Left alone, the optimizer would go on with those of the checkpoint.
    assert {tuple(group["betas"]) for group in found["forgotten"]["groups"]} == {(0.9, 0.95)}


def test_all_ranks_resume_from_what_rank_0_chose(ranks: RankServer, paths: RunPaths) -> None:
    outcome = inspect(ranks, paths, "only_rank_0_chooses", 2)
    assert outcome.codes == [0, 0], outcome.log
    assert outcome.reports == [{"step": 1}] * 2


def test_the_rank_that_cannot_see_the_checkpoint_says_so(
    ranks: RankServer, paths: RunPaths
) -> None:
    outcome = inspect(ranks, paths, "chosen_checkpoint_is_not_there", 2)
    assert outcome.codes == [STOPPED, STORAGE_FAILED]
    assert "this rank cannot see" in outcome.reports[1]["error"]


def test_the_rank_that_cannot_read_a_shard_says_so(ranks: RankServer, paths: RunPaths) -> None:
    faults = {"faulty_rank": 1, "faults": "shard.before_read=error"}
    outcome = inspect(ranks, paths, "rank_1_cannot_read", 2, **faults)
    assert outcome.codes == [STOPPED, DATA_DAMAGED]
    assert outcome.reports[0] == {}
    assert outcome.reports[1]["kind"] == "ShardError"
    assert "a fault at shard.before_read" in outcome.reports[1]["error"]


@pytest.mark.parametrize("failing", [0, 1])
def test_only_the_rank_that_failed_reports(
    ranks: RankServer, paths: RunPaths, failing: int
) -> None:
    outcome = inspect(ranks, paths, "one_rank_fails_alone", 2, failing=failing)
    assert outcome.codes[failing] == 70
    assert outcome.codes[1 - failing] == STOPPED, outcome.log
    assert outcome.reports[1 - failing] == {}


def test_what_is_not_a_number_on_one_rank_is_not_a_number_in_the_maximum(
    ranks: RankServer, paths: RunPaths
) -> None:
    outcome = inspect(ranks, paths, "odd_maxima", 2)
    assert outcome.reports == [{"odd": "nan", "huge": "inf", "plain": "2.0"}] * 2


def test_the_benchmark_ends_with_its_figures(tmp_path: Path) -> None:
    small = ["--hidden", "128", "--layers", "1", "--vocab", "512", "--rounds", "1"]
    out = tmp_path / "checkpoint.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.checkpoint", *small, "--step-s", "0.001",
         "--folder", str(tmp_path), "--out", str(out)],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=True,
    )  # fmt: skip
    figures = json.loads(done.stdout.splitlines()[-1])
    assert {"stall_s", "step_s", "stall_over_step", "state_bytes", "in_process_s"} <= set(figures)
    assert figures["state_bytes"] > 1e6
    assert json.loads(out.read_text()).items() >= figures.items()
