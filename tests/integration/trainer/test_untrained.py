"""A row, a batch or a gradient that cannot be trained costs itself and nothing else."""

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import areal_hpc.trainer.model.cpu.megatron_cpu  # noqa: F401  (before anything of Megatron)
from areal_hpc.metrics.step_metrics import read_metrics
from areal_hpc.rundir.manifests import list_manifest_steps, read_manifest
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.view.audit import TicketStatus, audit_run
from tests.support.rank_server import RankServer, TaskExit
from tests.support.recorded_run import SAMPLES, record_run, sft_config, spoil
from tests.support.replay_worker import Scenario, make_learner, moments_of, state_of
from tests.support.thoroughness import choose

NAIVE = {"proximal": "none", "off_policy_correction": "none"}
"""The ratio is to the engine's log-probabilities, without a bound below: it can overflow."""
EQUAL = [0.5] * SAMPLES
LAYOUTS: list[dict[str, int]] = [{}, {"dp": 2}, {"tp": 2}]
FAILED, STOPPED = 70, 143


def train_each_step(scenario: Scenario, paths: RunPaths) -> dict[str, Any]:
    learner = make_learner(scenario, paths)
    states, lines = [state_of(learner)], []
    for step in list_manifest_steps(paths):
        lines.append(learner.train_batch(read_manifest(paths, step)))
        states.append(state_of(learner))
    return {
        "held": states,
        "lines": lines,
        "consumed": learner.state.consumed,
        "untrained": [[note.step, note.tickets, note.reason] for note in learner.state.untrained],
        "adam_steps": sorted({float(moments["step"]) for moments in moments_of(learner)}),
    }


def each_step(
    ranks: RankServer, paths: RunPaths, parallel: dict[str, int] | None = None, **trainer: Any
) -> list[dict[str, Any]]:
    parallel = parallel or {}
    count = math.prod(parallel.values())
    settings = {"parallel": parallel, **trainer}
    outcome = ranks.call(train_each_step, paths, count, trainer=settings)
    assert outcome.codes == [0] * count, outcome.log
    return outcome.reports


def column(report: dict[str, Any], name: str) -> list[Any]:
    return [line[name] for line in report["lines"]]


def train(ranks: RankServer, paths: RunPaths, dp: int = 1, **scenario: Any) -> TaskExit:
    optimizer = {"lr": 1e-3}
    settings = {"checkpoint_every_steps": 1, "objective": NAIVE, "optimizer": optimizer,
                "parallel": {"dp": dp}, **scenario.pop("trainer", {})}  # fmt: skip
    return ranks.run(paths, "replay", dp, trainer=settings, **scenario)


# Rows --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parallel", choose(LAYOUTS[:2], LAYOUTS[1]))
def test_a_ticket_with_an_unsound_row_is_left_out_and_the_others_are_trained(
    ranks: RankServer, tmp_path: Path, parallel: dict[str, int]
) -> None:
    paths = record_run(tmp_path / "run", 3)
    without = record_run(tmp_path / "without", 3)
    spoil(paths, 2, [0, 1], logprobs=np.nan)
    spoil(paths, 2, [SAMPLES], input_ids=2**30)
    sound = read_manifest(without, 2)
    without.manifest(2).write_bytes(
        msgspec.json.encode(msgspec.structs.replace(sound, tickets=sound.tickets[2:]))
    )
    expected = each_step(ranks, without, parallel)
    for rank, report in enumerate(each_step(ranks, paths, parallel)):
        assert report["held"] == expected[rank]["held"]
        assert report["consumed"] == [1, 2, 3]
        assert [(step, tickets) for step, tickets, _ in report["untrained"]] == [(2, [3]), (2, [4])]
        assert column(report, "episodes") == [12, 4, 12]
        assert column(report, "step/skipped") == [0, 0, 0]
    reasons = [reason for _, _, reason in report["untrained"]]
    assert "row 0: expected finite log-probabilities" in reasons[0]
    assert f"row {SAMPLES}: expected token ids from 0 to 319, got {2**30}" in reasons[1]
    events = [json.loads(line) for line in paths.events.read_text().splitlines()]
    assert {event["event"] for event in events} == {"untrained"}
    assert [(event["step"], event["tickets"]) for event in events] == [(2, [3]), (2, [4])]


def test_a_run_goes_on_over_batches_of_which_nothing_is_left_and_the_audit_names_them(
    ranks: RankServer, tmp_path: Path
) -> None:
    paths = record_run(tmp_path, 4)
    spoil(paths, 2, [0, 4, 8], logprobs=np.inf)
    spoil(paths, 3, range(12), loss_mask=0, logprobs=0, versions=-1)  # sound, but in no session
    outcome = train(ranks, paths, 2, trainer={"total_steps": 4})
    assert outcome.codes == [0, 0], outcome.log
    lines = read_metrics(paths.metrics)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert [line["step/skipped"] for line in lines] == [0, 1, 1, 0]
    assert ["reward/mean" in line for line in lines] == [True, False, True, True]
    audit = audit_run(paths)
    assert [entry.ticket_id for entry in audit.list_tickets_with_status(TicketStatus.UNSOUND)] == [
        3,
        4,
        5,
    ]
    assert audit.summary_line == "trained_once=9 duplicates=0 lost=0 open=0"
    assert audit.is_consistent


# Steps without a gradient ------------------------------------------------------------------------


@pytest.mark.parametrize("parallel", choose(LAYOUTS, LAYOUTS[1]))
def test_a_batch_whose_advantages_are_all_zero_changes_no_bit(
    ranks: RankServer, tmp_path: Path, parallel: dict[str, int]
) -> None:
    paths = record_run(tmp_path, 4, rewards={3: EQUAL})
    for report in each_step(ranks, paths, parallel):
        states = report["held"]
        assert states[0] != states[1] != states[2] == states[3] != states[4]
        assert column(report, "step/skipped") == [0, 0, 1, 0]
        assert column(report, "step/nonfinite") == [0, 0, 0, 0]
        assert report["lines"][2]["grad_norm"] == 0.0
        assert report["adam_steps"] == [3.0]
        assert report["untrained"] == []


def test_each_optimizer_step_of_a_batch_is_judged_alone(ranks: RankServer, tmp_path: Path) -> None:
    # Rows are dealt in turn: the second of two parts gets every second episode.
    paths = record_run(tmp_path, 4, rewards={2: EQUAL, 3: [1.0, 0.5, 0.0, 0.5]})
    (report,) = each_step(ranks, paths, minibatches=2)
    states = report["held"]
    assert states[0] != states[1] == states[2] != states[3]
    assert column(report, "step/skipped") == [0, 2, 1, 0]
    assert report["adam_steps"] == [5.0]


# Gradients that are not finite -------------------------------------------------------------------


@pytest.mark.parametrize("parallel", choose(LAYOUTS, LAYOUTS[1]))
def test_a_step_whose_gradient_is_not_finite_is_left_out_and_the_next_one_is_taken(
    ranks: RankServer, tmp_path: Path, parallel: dict[str, int]
) -> None:
    paths = record_run(tmp_path, 3, far_steps=[2])
    for report in each_step(ranks, paths, parallel, objective=NAIVE):
        states = report["held"]
        assert states[0] != states[1] == states[2] != states[3]
        assert report["consumed"] == [1, 2, 3]
        assert column(report, "step/skipped") == column(report, "step/nonfinite") == [0, 1, 0]
        assert [norm is None for norm in column(report, "grad_norm")] == [False, True, False]
        (entry,) = report["untrained"]
        assert entry[:2] == [2, []]
        assert "1 of 1 optimizer steps are not taken" in entry[2]
        json.dumps(report["lines"], allow_nan=False)


@pytest.mark.parametrize("dp", choose([1, 2], 1))
def test_the_third_bad_batch_ends_every_resume(ranks: RankServer, tmp_path: Path, dp: int) -> None:
    paths = record_run(tmp_path, 5, far_steps=[2, 3, 4])
    for began_after in ("the first start", "a resume from within the streak"):
        outcome = train(ranks, paths, dp, trainer={"total_steps": 5})
        assert sorted(outcome.codes) == [FAILED, STOPPED][:dp], (began_after, outcome.log)
        (report,) = (report for report in outcome.reports if report)
        assert report["kind"] == "NonFiniteGradientError"
        assert "step 4, trained on batch_00000004.json" in report["error"]
        assert "batch_00000002.json and step 3, trained on batch_00000003" in report["error"]
        assert "at: trainer.optimizer.lr" in report["error"]
        assert "areal-hpc replay" in report["error"]
        assert [line["step"] for line in read_metrics(paths.metrics)] == [1, 2, 3]
    audit = audit_run(paths)
    assert [batch.step for batch in audit.untrained] == [2, 3]
    assert [
        ticket.ticket_id for ticket in audit.list_tickets_with_status(TicketStatus.SKIPPED)
    ] == [*range(3, 9)]
    assert audit.summary_line == "trained_once=3 duplicates=0 lost=0 open=6"


def resumed_after_a_kill(
    ranks: RankServer, recorded: Path, folder: Path, steps: int, nth: int
) -> Sequence[TaskExit]:
    """Train an undisturbed run, and resume one that was killed before its nth step."""
    settings = {"total_steps": steps, "checkpoint_every_steps": 2}
    alone = RunPaths(shutil.copytree(recorded, folder / "alone"))
    killed = RunPaths(shutil.copytree(recorded, folder / "killed"))
    fault = f"train.before_step@{nth}=kill"
    assert train(ranks, killed, trainer=settings, faults=fault).codes == [-9]
    return [train(ranks, run, trainer=settings) for run in (alone, killed)]


def test_a_run_killed_at_odd_batches_ends_bit_equal(ranks: RankServer, tmp_path: Path) -> None:
    recorded = record_run(tmp_path / "recorded", 6, far_steps=[2, 3, 5]).root
    alone, resumed = resumed_after_a_kill(ranks, recorded, tmp_path, 6, 5)
    assert (alone.codes, resumed.codes) == ([0], [0]), resumed.log
    assert resumed.reports[0]["digests"] == alone.reports[0]["digests"]
    names = [RunPaths(tmp_path / name).checkpoints_dir for name in ("alone", "killed")]
    states = [json.loads((name / "step_00000006/trainer.json").read_text()) for name in names]
    assert [[batch["step"] for batch in state["untrained"]] for state in states] == [[2, 3, 5]] * 2
    assert resumed.reports[0]["began_at"] in {2, 4}


def test_a_kill_within_a_streak_does_not_begin_it_anew(ranks: RankServer, tmp_path: Path) -> None:
    recorded = record_run(tmp_path / "recorded", 6, far_steps=[2, 3, 4]).root
    alone, resumed = resumed_after_a_kill(ranks, recorded, tmp_path, 6, 4)
    assert (alone.codes, resumed.codes) == ([FAILED], [FAILED])
    assert resumed.reports == alone.reports


def test_the_sft_stage_follows_the_same_rule(ranks: RankServer, tmp_path: Path) -> None:
    paths = record_run(tmp_path, 1)
    optimizer = {"lr": 1e30}  # the first step ruins the weights

    def fine_tune() -> dict[str, Any]:
        config = sft_config(
            tmp_path, {"one": "two"}, total_steps=8, batch_size=2, checkpoint_every_steps=1,
            optimizer=optimizer,
        )  # fmt: skip
        outcome = ranks.run(paths, "fine_tune", sft=config)
        assert outcome.codes == [FAILED], outcome.log
        return outcome.reports[0]

    for _ in range(2):
        assert "step 4 of the SFT stage" in (error := fine_tune()["error"])
        assert "lower sft.optimizer.lr" in error
    lines = read_metrics(paths.sft_metrics)
    assert [line["step/skipped"] for line in lines] == [0, 1, 1]
