"""An unreadable batch, or one that a user sets aside, costs itself and no other."""

import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.trainer.model.cpu import megatron_cpu  # noqa: F401  (before anything of Megatron)

# isort: split
from areal_hpc.metrics.step_metrics import read_metrics
from areal_hpc.rundir.manifests import read_manifest, read_quarantine_files
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.trainer import collectives
from areal_hpc.view.audit import audit_run
from tests.support.commands import areal_hpc, exit_code_of
from tests.support.rank_server import RankServer, TaskExit
from tests.support.recorded_run import TICKETS, TRAINER, write_recipe
from tests.support.replay_worker import Scenario, replay
from tests.support.thoroughness import choose
from tests.support.waiting import wait_for

STEPS = 6
DAMAGED, STORAGE_FAILED, STOPPED, REFUSED, KILLED = 65, 75, 143, 78, -9


def replay_impatiently(scenario: Scenario, paths: RunPaths) -> dict[str, Any]:
    collectives.FILE_VISIBLE_TIMEOUT_S = 0.2
    return replay(scenario, paths)


def train(ranks: RankServer, paths: RunPaths, dp: int = 1, **scenario: Any) -> TaskExit:
    settings = {"total_steps": STEPS, "checkpoint_every_steps": 2, "parallel": {"dp": dp}}
    return ranks.call(replay_impatiently, paths, dp, trainer=settings, **scenario)


def shard_of(paths: RunPaths, step: int) -> Path:
    return paths.shards_dir / read_manifest(paths, step).tickets[0].shard


def flip_a_bit(paths: RunPaths, *steps: int) -> None:
    """Flip a bit in a shard's last byte, which is metadata: only the digest shows it."""
    for step in steps:
        content = bytearray(shard_of(paths, step).read_bytes())
        content[-1] ^= 1
        shard_of(paths, step).write_bytes(content)


def quarantine(paths: RunPaths, step: int, *options: str) -> int:
    return exit_code_of("quarantine", paths.root, step, *options)


def tickets_by_status(paths: RunPaths) -> dict[str, list[int]]:
    """Return the tickets of a run with a clean audit, without those trained once."""
    audit = audit_run(paths)
    assert audit.is_consistent, audit
    assert len(audit.tickets) == STEPS * TICKETS
    tickets: dict[str, list[int]] = {}
    for ticket in audit.tickets:
        if ticket.status != "trained":
            tickets.setdefault(ticket.status, []).append(ticket.ticket_id)
    return tickets


def ids_of(*steps: int) -> list[int]:
    return [(step - 1) * TICKETS + number for step in steps for number in range(TICKETS)]


@pytest.fixture
def paths(recorded: Path, tmp_path: Path) -> RunPaths:
    """Copy the recorded run, with a recipe, as commands need one."""
    paths = RunPaths(shutil.copytree(recorded, tmp_path / "run"))
    write_recipe(paths, {**TRAINER, "total_steps": STEPS})
    return paths


def copy_of(paths: RunPaths, name: str) -> RunPaths:
    return RunPaths(shutil.copytree(paths.root, paths.root.with_name(name)))


# Unreadable batches ------------------------------------------------------------------------------


@pytest.mark.parametrize("dp", choose([1, 2], 2))
def test_a_batch_whose_digest_is_wrong_is_set_aside_and_the_others_are_trained(
    ranks: RankServer, paths: RunPaths, dp: int
) -> None:
    copy = copy_of(paths, "asked")
    flip_a_bit(paths, 3)
    outcome = train(ranks, paths, dp)
    assert outcome.codes == [0] * dp, outcome.log
    assert tickets_by_status(paths) == {"quarantined": ids_of(3)}
    (record,) = audit_run(paths).untrained
    assert (record.step, record.quarantine) == (3, "damaged")
    assert record.reason.startswith(f"{shard_of(paths, 3).name}: digest: expected crc32:")
    assert read_quarantine_files(paths) == {3: record}
    lines = read_metrics(paths.metrics)
    assert [line["step/skipped"] for line in lines] == [0, 0, 1, 0, 0, 0]
    assert ["reward/mean" in line for line in lines] == [True, True, False, True, True, True]
    (event,) = (json.loads(line) for line in paths.events.read_text().splitlines())
    assert (event["event"], event["step"], event["quarantine"]) == ("untrained", 3, "damaged")
    # Setting it aside by hand leaves the same weights.
    assert quarantine(copy, 3) == 0
    assert train(ranks, copy, dp).reports == outcome.reports


KINDS = ["missing", "a FIFO", "a symbolic link", "another's rows"]


@pytest.mark.parametrize("kind", choose(KINDS, "missing", "another's rows"))
def test_whatever_is_wrong_with_a_shard_sets_its_batch_aside(
    ranks: RankServer, paths: RunPaths, kind: str
) -> None:
    path = shard_of(paths, 2)
    if kind == "another's rows":
        manifest = paths.manifest(2)
        manifest.write_bytes(manifest.read_bytes().replace(b'"ticket_id":3,', b'"ticket_id":4000,'))
    else:
        path.rename(path.with_suffix(".moved"))
    if kind == "a FIFO":
        os.mkfifo(path)
    elif kind == "a symbolic link":
        path.symlink_to(path.with_suffix(".moved"))
    outcome = train(ranks, paths)
    assert outcome.codes == [0], outcome.log
    (record,) = audit_run(paths).untrained
    expected = "expected rows of ticket 4000" if kind == "another's rows" else kind
    assert expected in record.reason
    assert [line["step/skipped"] for line in read_metrics(paths.metrics)] == [0, 1, 0, 0, 0, 0]


def test_the_third_unreadable_batch_in_a_row_ends_every_resume_until_somebody_acts(
    ranks: RankServer, paths: RunPaths
) -> None:
    flip_a_bit(paths, 2, 3, 4)
    for _ in range(2):
        outcome = train(ranks, paths, 2)
        assert sorted(outcome.codes) == [DAMAGED, STOPPED], outcome.log
        (report,) = (report for report in outcome.reports if report)
        assert report["kind"] == "ShardError"
        assert "batch 4 cannot be read: " in report["error"]
        assert "nor could batch 2 and batch 3: 3 in a row end the run" in report["error"]
        assert f"areal-hpc quarantine {paths.root} 4" in report["error"]
        assert tickets_by_status(paths) == {"quarantined": ids_of(2, 3), "open": ids_of(4, 5, 6)}
    assert quarantine(paths, 4) == 0
    assert train(ranks, paths, 2).codes == [0, 0]
    assert tickets_by_status(paths) == {"quarantined": ids_of(2, 3, 4)}


def test_what_one_rank_alone_cannot_read_is_blamed_on_its_node(
    ranks: RankServer, paths: RunPaths
) -> None:
    faults = {"faulty_rank": 1, "faults": "shard.before_read=error"}
    outcome = train(ranks, paths, 2, **faults)
    assert outcome.codes == [STOPPED, STORAGE_FAILED]
    assert "other ranks can read it" in outcome.reports[1]["error"]
    assert read_quarantine_files(paths) == {}


def test_what_cannot_be_quarantined_durably_is_not_consumed(
    ranks: RankServer, paths: RunPaths
) -> None:
    flip_a_bit(paths, 2)
    outcome = train(ranks, paths, 2, faults="quarantine.before_write=error")
    assert outcome.codes == [STORAGE_FAILED, STOPPED], outcome.log
    assert "nor can it be quarantined" in outcome.reports[0]["error"]
    assert tickets_by_status(paths) == {"open": ids_of(*range(1, STEPS + 1))}
    assert train(ranks, paths, 2).codes == [0, 0]
    assert tickets_by_status(paths) == {"quarantined": ids_of(2)}


# kill -9 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    choose(
        [
            "quarantine.before_write=kill",
            "quarantine.after_write=kill",
            "train.after_step@3=kill",
            "checkpoint.before_copy@2=kill",
        ],
        "quarantine.after_write=kill",
    ),
)
def test_a_trainer_killed_while_it_sets_a_batch_aside_ends_bit_equal(
    ranks: RankServer, paths: RunPaths, fault: str
) -> None:
    flip_a_bit(paths, 3)
    alone = copy_of(paths, "alone")
    assert train(ranks, paths, faults=fault).codes == [KILLED]
    # The audit is clean at this moment too.
    is_recorded = "before_write" not in fault
    assert tickets_by_status(paths).get("quarantined") == (ids_of(3) if is_recorded else None)
    if is_recorded:  # it stays set aside though its file is complete again
        flip_a_bit(paths, 3)
    resumed = train(ranks, paths)
    assert resumed.codes == [0], resumed.log
    assert tickets_by_status(paths) == {"quarantined": ids_of(3)}
    assert resumed.reports[0]["digests"] == train(ranks, alone).reports[0]["digests"]


# areal-hpc quarantine -----------------------------------------------------------------------------


def test_a_batch_is_set_aside_and_taken_back_while_the_run_is_stopped(
    ranks: RankServer, paths: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    untouched = copy_of(paths, "whole")
    assert quarantine(paths, 4) == 0
    assert "batch 4 is quarantined: the trainer sets it aside when the run is resumed" in (
        capsys.readouterr().out
    )
    expected = [ticket for ticket in ids_of(*range(1, STEPS + 1)) if ticket not in ids_of(4)]
    assert tickets_by_status(paths) == {"quarantined": ids_of(4), "open": expected}
    assert quarantine(paths, 4) == 0
    assert "batch 4 is quarantined already" in capsys.readouterr().out
    assert quarantine(paths, 4, "--undo") == 0
    assert "batch 4 is no longer quarantined" in capsys.readouterr().out
    assert quarantine(paths, 4, "--undo") == REFUSED
    assert "batch 4 is not quarantined" in capsys.readouterr().err
    assert train(ranks, paths).reports == train(ranks, untouched).reports
    assert tickets_by_status(paths) == {}


def test_a_batch_that_was_consumed_is_neither_set_aside_nor_taken_back(
    ranks: RankServer, paths: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quarantine(paths, 2) == 0
    assert train(ranks, paths).codes == [0]
    capsys.readouterr()
    assert quarantine(paths, 5) == REFUSED
    assert "batch 5 was trained already: the checkpoint of step 6 holds it" in (
        capsys.readouterr().err
    )
    assert quarantine(paths, 7) == REFUSED
    assert "no batch 7; those handed out: 1 to 6" in capsys.readouterr().err
    assert quarantine(paths, 2, "--undo") == REFUSED
    assert "batch 2 is behind the checkpoint of step 6: too late to undo" in (
        capsys.readouterr().err
    )
    assert quarantine(paths, 2) == 0
    assert "quarantined already, for good" in capsys.readouterr().out
    assert tickets_by_status(paths) == {"quarantined": ids_of(2)}


def test_a_trainer_at_work_takes_notice_at_its_next_batch(
    ranks: RankServer, paths: RunPaths, tmp_path: Path
) -> None:
    gate, held_mark = tmp_path / "gate", tmp_path / "gate.held"
    gate.touch()
    outcomes: list[TaskExit] = []
    working = threading.Thread(
        target=lambda: outcomes.append(
            train(ranks, paths, faults=f"train.before_step@2=hold:{gate}")
        )
    )
    working.start()
    try:
        wait_for(held_mark.exists)
        # Batch 2 is in its hands and stays trained; the others are not.
        for step in (2, 3, 5):
            assert quarantine(paths, step) == 0
        assert quarantine(paths, 5, "--undo") == 0
    finally:
        gate.unlink()
        working.join()
    assert outcomes[0].codes == [0], outcomes[0].log
    assert tickets_by_status(paths) == {"quarantined": ids_of(3)}
    assert [batch.step for batch in audit_run(paths).untrained] == [3]


@pytest.mark.parametrize(
    ("point", "is_set_aside"),
    [("quarantine.before_write", False), ("quarantine.after_write", True)],
)
def test_a_command_that_is_killed_has_done_all_or_nothing(
    paths: RunPaths, point: str, is_set_aside: bool
) -> None:
    environ = {**os.environ, "AREAL_HPC_FAULTS": f"{point}=kill"}
    assert areal_hpc("quarantine", paths.root, 3, environ=environ).returncode == KILLED
    assert ("quarantined" in tickets_by_status(paths)) == is_set_aside
    assert quarantine(paths, 3) == 0
    environ["AREAL_HPC_FAULTS"] = "quarantine.after_delete=kill"
    assert areal_hpc("quarantine", paths.root, 3, "--undo", environ=environ).returncode == KILLED
    assert "quarantined" not in tickets_by_status(paths)
