"""A run killed anywhere and resumed ends with the same bits as the one that was left alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.rundir.jsonl import read_lines
from areal_hpc.rundir.paths import RunPaths
from tests.support.rank_server import RankServer, TaskExit
from tests.support.recorded_run import claim_dropout, record_run

STEPS = 6
COMMITS = ["step_00000004", "step_00000006"]

KILLS: dict[str, set[int]] = {
    # fault point @ visit -> the steps that a resume may go on from
    "train.before_step@1": {0},
    "train.before_step@5": {2, 4},
    "train.before_forward@10": {0, 2},
    "optimizer.before_step@7": {0, 2},
    "optimizer.after_step@7": {0, 2},
    "train.after_step@4": {0, 2},
    "checkpoint.before_copy@2": {2},
    "checkpoint.after_copy@2": {2},
    "checkpoint.while_writing@2": {2},
    "checkpoint.before_marker@2": {2},
    "checkpoint.before_rename@2": {2},
    "checkpoint.after_rename@3": {6},
    "checkpoint.after_write@2": {4},
}

KILLS_OF_TWO: dict[tuple[int, str], set[int]] = {
    (1, "optimizer.before_step@7"): {0, 2},
    (1, "checkpoint.while_writing@2"): {2},
    (0, "checkpoint.before_rename@2"): {2},
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_run(tmp_path_factory.mktemp("recorded"), STEPS).root


@pytest.fixture
def paths(recorded: Path, tmp_path: Path) -> RunPaths:
    return RunPaths(shutil.copytree(recorded, tmp_path / "run"))


def train(ranks: RankServer, paths: RunPaths, dp: int = 1, **scenario: Any) -> TaskExit:
    settings = {"total_steps": STEPS, "minibatches": 2, "parallel": {"dp": dp}}
    return ranks.run(paths, "replay", dp, trainer=settings, **scenario)


def uninterrupted(ranks: RankServer, recorded: Path, folder: Path, dp: int) -> list[Any]:
    paths = RunPaths(shutil.copytree(recorded, folder / "run"))
    outcome = train(ranks, paths, dp)
    assert outcome.codes == [0] * dp, outcome.log
    return [report["digests"] for report in outcome.reports]


@pytest.fixture(scope="module")
def expected(
    ranks: RankServer, recorded: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[Any]:
    return uninterrupted(ranks, recorded, tmp_path_factory.mktemp("single"), 1)


@pytest.fixture(scope="module")
def expected_of_two(
    ranks: RankServer, recorded: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[Any]:
    return uninterrupted(ranks, recorded, tmp_path_factory.mktemp("two"), 2)


def check_complete(paths: RunPaths, outcome: TaskExit, began_at: set[int]) -> None:
    assert set(outcome.codes) == {0}, outcome.log
    for report in outcome.reports:
        assert report["began_at"] in began_at
        assert report["consumed"] == list(range(1, STEPS + 1))
    names = sorted(path.name for path in paths.checkpoints_dir.iterdir())
    # A kill can leave a third one for the next checkpoint to delete; nothing half-written stays.
    assert names[-2:] == COMMITS
    assert names[:-2] in ([], ["step_00000002"])
    assert [line["step"] for line in read_lines(paths.metrics)] == list(range(1, STEPS + 1))


@pytest.mark.parametrize("fault", KILLS)
def test_a_killed_run_ends_with_the_same_bits(
    ranks: RankServer, paths: RunPaths, expected: list[Any], fault: str
) -> None:
    assert train(ranks, paths, faults=f"{fault}=kill").codes == [-9]
    resumed = train(ranks, paths)
    check_complete(paths, resumed, KILLS[fault])
    assert resumed.reports[0]["digests"] == expected[0]


@pytest.mark.parametrize(("rank", "fault"), KILLS_OF_TWO)
def test_a_run_of_two_ranks_that_loses_one_ends_with_the_same_bits(
    ranks: RankServer, paths: RunPaths, expected_of_two: list[Any], rank: int, fault: str
) -> None:
    codes = train(ranks, paths, 2, faulty_rank=rank, faults=f"{fault}=kill").codes
    assert codes[rank] == -9
    # Rank 0 says that it lost a peer (75); without rank 0 there is nobody to say so to (143).
    assert codes[1 - rank] == (75 if rank else 143)
    resumed = train(ranks, paths, 2)
    check_complete(paths, resumed, KILLS_OF_TWO[rank, fault])
    assert [report["digests"] for report in resumed.reports] == expected_of_two


def test_a_run_killed_again_and_again_ends_with_the_same_bits(
    ranks: RankServer, paths: RunPaths, expected: list[Any]
) -> None:
    # The fifth step begins after the second checkpoint, which has waited for the first.
    deaths = 0
    while (outcome := train(ranks, paths, faults="train.before_step@5=kill")).codes == [-9]:
        deaths += 1
        assert deaths < STEPS
    assert deaths >= 1
    check_complete(paths, outcome, {2, 4})
    assert outcome.reports[0]["digests"] == expected[0]


def test_a_model_that_asks_for_dropout_trains_to_the_same_bits(
    ranks: RankServer, paths: RunPaths, expected: list[Any]
) -> None:
    claim_dropout(paths)
    outcome = train(ranks, paths)
    check_complete(paths, outcome, {0})
    assert outcome.reports[0]["digests"] == expected[0]


def test_a_killed_sft_stage_ends_with_the_same_bits(
    ranks: RankServer, paths: RunPaths, tmp_path: Path
) -> None:
    demonstrations = tmp_path / "demonstrations.jsonl"
    with demonstrations.open("w") as stream:
        for word in ("one", "two", "three", "one two", "three two one"):
            messages = [
                {"role": "user", "content": word},
                {"role": "assistant", "content": f"{word} three"},
            ]
            stream.write(json.dumps({"messages": messages}) + "\n")

    def fine_tune(root: Path, **scenario: Any) -> TaskExit:
        shutil.copytree(paths.root, root, dirs_exist_ok=True)
        config = {
            "run_dir": str(root),
            "model_path": str(paths.tiny_model_dir),
            "dataset_path": str(demonstrations),
            "seed": 3,
            "sft": {"total_steps": 8, "batch_size": 3, "checkpoint_every_steps": 3},
            "device": "cpu",
            "dtype": "float32",
        }
        return ranks.run(RunPaths(root), "fine_tune", sft=config, **scenario)

    expected = fine_tune(tmp_path / "left-alone")
    assert expected.codes == [0], expected.log
    faults = {"optimizer.before_step@7": {3, 6}, "checkpoint.before_rename@2": {3}}
    for fault, began_at in faults.items():
        root = tmp_path / fault
        assert fine_tune(root, faults=f"{fault}=kill").codes == [-9]
        resumed = fine_tune(root)
        assert resumed.codes == [0], resumed.log
        assert resumed.reports[0]["began_at"] in began_at
        assert resumed.reports[0]["digests"] == expected.reports[0]["digests"]
