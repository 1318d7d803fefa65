"""A run killed anywhere, or with its optimizer in host memory, ends with the same bits."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import areal_hpc.trainer.model.cpu.megatron_cpu  # noqa: F401  (before anything of Megatron)
from areal_hpc.launch.tiny_model import make_tiny_model
from areal_hpc.rundir.jobs import LOST_RANK_EXIT_CODE, STOPPED_EXIT_CODE
from areal_hpc.rundir.jsonl import read_readable_records
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.trainer.optimizer import switch_adamw_to_fused_kernel
from tests.integration.trainer.conftest import STEPS
from tests.support.rank_server import RankServer, TaskExit
from tests.support.recorded_run import VOCAB, claim_dropout, sft_config
from tests.support.replay_worker import (
    Scenario,
    make_learner,
    moments_of,
    state_of,
    take_step,
)
from tests.support.replayed_run import (
    check_killed_run_ends_alike,
    record_routed_run,
    train_run,
)
from tests.support.thoroughness import choose

COMMITS = ["step_00000004", "step_00000006"]

ONE_RANK = {
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
"""Fault point @ visit -> the steps that a resume may go on from."""
KILLS = [
    *((1, 0, fault, began_at) for fault, began_at in ONE_RANK.items()),
    (2, 1, "optimizer.before_step@7", {0, 2}),
    (2, 1, "checkpoint.before_copy@2", {2}),
    (2, 1, "checkpoint.after_copy@2", {2}),
    (2, 1, "checkpoint.while_writing@2", {2}),
    (2, 0, "checkpoint.before_rename@2", {2}),
]
REPRESENTATIVES = [
    *(
        (1, 0, fault, ONE_RANK[fault])
        for fault in (
            "train.before_forward@10",
            "optimizer.before_step@7",
            "checkpoint.while_writing@2",
            "checkpoint.after_rename@3",
        )
    ),
    (2, 1, "optimizer.before_step@7", {0, 2}),
]
"""Kills before and within a step, within a checkpoint and after it; and one rank of two."""


def train(ranks: RankServer, paths: RunPaths, dp: int = 1, **scenario: Any) -> TaskExit:
    return train_run(ranks, paths, {}, {"dp": dp}, steps=STEPS, **scenario)


@pytest.fixture(scope="module")
def expected(
    ranks: RankServer, recorded: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, list[Any]]:
    """Return the final digests of every rank of an uninterrupted run, by the number of ranks."""
    digests = {}
    for dp in (1, 2):
        run = tmp_path_factory.mktemp("uninterrupted") / "run"
        outcome = train(ranks, RunPaths(shutil.copytree(recorded, run)), dp)
        assert outcome.codes == [0] * dp, outcome.log
        digests[dp] = [report["digests"] for report in outcome.reports]
    return digests


def check_complete(paths: RunPaths, outcome: TaskExit, began_at: set[int]) -> None:
    assert set(outcome.codes) == {0}, outcome.log
    for report in outcome.reports:
        assert report["began_at"] in began_at
        assert report["consumed"] == list(range(1, STEPS + 1))
    names = sorted(path.name for path in paths.checkpoints_dir.iterdir())
    # A kill can leave a third one for the next checkpoint to delete; no partial file stays.
    assert names[-2:] == COMMITS
    assert names[:-2] in ([], ["step_00000002"])
    assert [line["step"] for line in read_readable_records(paths.metrics)] == list(
        range(1, STEPS + 1)
    )


@pytest.mark.parametrize(("dp", "rank", "fault", "began_at"), choose(KILLS, *REPRESENTATIVES))
def test_a_run_that_loses_a_rank_ends_with_the_same_bits(
    ranks: RankServer,
    paths: RunPaths,
    expected: dict[int, list[Any]],
    dp: int,
    rank: int,
    fault: str,
    began_at: set[int],
) -> None:
    codes = train(ranks, paths, dp, faulty_rank=rank, faults=f"{fault}=kill").codes
    assert codes.pop(rank) == -9
    # Rank 0 reports that it lost a peer; without rank 0 no rank can report it.
    assert codes == [LOST_RANK_EXIT_CODE if rank else STOPPED_EXIT_CODE][: dp - 1]
    resumed = train(ranks, paths, dp)
    check_complete(paths, resumed, began_at)
    assert [report["digests"] for report in resumed.reports] == expected[dp]


def test_a_run_killed_again_and_again_ends_with_the_same_bits(
    ranks: RankServer, paths: RunPaths, expected: dict[int, list[Any]]
) -> None:
    # The fifth step begins after the second checkpoint, which has waited for the first.
    deaths = 0
    while (outcome := train(ranks, paths, faults="train.before_step@5=kill")).codes == [-9]:
        deaths += 1
        assert deaths < STEPS
    assert deaths >= 1
    check_complete(paths, outcome, {2, 4})
    assert outcome.reports[0]["digests"] == expected[1][0]


def test_a_model_that_asks_for_dropout_trains_to_the_same_bits(
    ranks: RankServer, paths: RunPaths, expected: dict[int, list[Any]]
) -> None:
    claim_dropout(paths)
    outcome = train(ranks, paths)
    check_complete(paths, outcome, {0})
    assert outcome.reports[0]["digests"] == expected[1][0]


def test_an_adapter_with_dropout_is_resumed_with_the_same_bits_on_its_own_base(
    ranks: RankServer, recorded: Path, tmp_path: Path
) -> None:
    more = {"lora": {"rank": 2, "dropout": 0.3}}
    _, killed, _ = check_killed_run_ends_alike(
        ranks, recorded, tmp_path, "optimizer.before_step@9", {}, {}, more=more
    )
    for other, message in (({}, "trains all weights"), (more, "trains an adapter of")):
        model = killed.starting_model_dir
        if other:
            make_tiny_model(model, ["one two three"], hidden=32, heads=2, kv_heads=2, head_dim=16,
                            ffn=64, vocab=VOCAB, seed=9)  # fmt: skip
        refused = train_run(ranks, killed, {}, steps=6, more=other)
        assert refused.codes == [78]
        assert message in refused.reports[0]["error"]


def test_a_mixture_whose_routes_are_replayed_is_resumed_with_the_same_bits(
    ranks: RankServer, tmp_path: Path
) -> None:
    source = record_routed_run(tmp_path / "recorded", STEPS).root
    alone, killed, _ = check_killed_run_ends_alike(
        ranks, source, tmp_path, "optimizer.before_step@9", {}, {"dp": 2, "ep": 2},
        steps=STEPS, faulty_rank=1,
    )  # fmt: skip
    for paths in (alone, killed):
        for line in read_readable_records(paths.metrics):
            assert 0.5 < line["experts/rerouted_fraction"] < 1, "routes were drawn at random"


@pytest.mark.thorough
def test_killed_sft_ends_bit_equal(ranks: RankServer, paths: RunPaths, tmp_path: Path) -> None:
    answers = {key: f"{key} three" for key in ("one", "two", "three", "one two", "three two one")}

    def fine_tune(root: Path, **scenario: Any) -> TaskExit:
        shutil.copytree(paths.root, root, dirs_exist_ok=True)
        config = sft_config(root, answers, total_steps=8, batch_size=3, checkpoint_every_steps=3)
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


OFFLOADED = {"offload": {"optimizer": True}}
SETTINGS: list[dict[str, Any]] = [
    {"dtype": "bfloat16"},
    {"dtype": "bfloat16", "parallel": {"dp": 2}},
    {"parallel": {"tp": 2}},
]


def train_copy_with(
    ranks: RankServer, source: Path, folder: Path, settings: dict[str, Any], **scenario: Any
) -> TaskExit:
    paths = RunPaths(shutil.copytree(source, folder))
    parallel = settings.get("parallel", {})
    return train_run(ranks, paths, {}, parallel, steps=STEPS, more=settings, **scenario)


def digests_of(outcome: TaskExit) -> list[dict[str, str]]:
    assert set(outcome.codes) == {0}, outcome.log
    return [report["digests"] for report in outcome.reports]


@pytest.mark.parametrize(
    "settings",
    choose(SETTINGS, SETTINGS[1]),
    ids=str,
)
def test_a_run_with_its_optimizer_in_host_memory_ends_with_the_same_bits(
    ranks: RankServer, recorded: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    expected = digests_of(train_copy_with(ranks, recorded, tmp_path / "plain", settings))
    assert any("main" in name for name in expected[0])
    offloaded = train_copy_with(ranks, recorded, tmp_path / "offloaded", settings | OFFLOADED)
    assert digests_of(offloaded) == expected


def test_checkpoints_of_host_memory_are_interchangeable(
    ranks: RankServer, recorded: Path, tmp_path: Path
) -> None:
    plain = {"dtype": "bfloat16"}
    expected = digests_of(train_copy_with(ranks, recorded, tmp_path / "whole", plain))
    ways: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("to", plain, plain | OFFLOADED),
        ("from", plain | OFFLOADED, plain),
        ("again", plain | OFFLOADED, plain | OFFLOADED),
    ]
    for name, first, then in choose(ways, *ways[:2]):
        fault = "train.before_step@5=kill"
        assert train_copy_with(ranks, recorded, tmp_path / name, first, faults=fault).codes == [-9]
        resumed = train_copy_with(ranks, tmp_path / name, tmp_path / f"{name}-resumed", then)
        assert digests_of(resumed) == expected, name
        assert resumed.reports[0]["began_at"] > 0


@pytest.mark.parametrize("scenario", [{"dtype": "bfloat16"}], indirect=True)
@pytest.mark.on_ranks(2)
def test_a_fused_step_is_that_of_many_kernels_and_its_checkpoint_is_read_by_both(
    scenario: Scenario, paths: RunPaths
) -> None:
    plain, fused = make_learner(scenario, paths), make_learner(scenario, paths)
    switch_adamw_to_fused_kernel(fused._optimizer, torch.device("cpu"))
    for learner in (plain, fused):
        take_step(learner, paths, 1)
    for expected, actual in zip(moments_of(plain), moments_of(fused), strict=True):
        for name in ("step", "exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(actual[name], expected[name], rtol=1e-5, atol=1e-9)
    fused.begin_checkpoint({})
    fused.checkpoints.finish_save()
    resumed = make_learner(scenario, paths)
    assert resumed.state.step == 1
    assert state_of(resumed) == state_of(fused)
