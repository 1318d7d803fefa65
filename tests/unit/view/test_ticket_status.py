"""Tampering with a run directory is found, and nothing else is called a fault."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from areal_hpc.rundir.checkpoints import UntrainedRecord
from areal_hpc.rundir.manifests import DroppedTicket, append_drop
from areal_hpc.view.audit.ticket_status import AuditReport, TicketStatus, audit_run
from areal_hpc.wire.ledger import TicketRef
from tests.unit.view.run_directory import RunDirectory


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run")


def statuses(run: RunDirectory) -> dict[int, TicketStatus]:
    return {one.ticket_id: one.status for one in audit_run(run.paths).tickets}


def of(audit: AuditReport, status: TicketStatus) -> list[int]:
    return [one.ticket_id for one in audit.of(status)]


def test_a_run_without_faults(run: RunDirectory) -> None:
    run.finish()
    audit = audit_run(run.paths)
    assert audit.is_clean
    assert audit.verdict == "trained_once=6 duplicates=0 lost=0 open=0"
    assert of(audit, TicketStatus.DROPPED) == [2]
    assert audit.of(TicketStatus.DROPPED)[0].why == "ValueError"


def test_a_run_that_has_not_begun(tmp_path: Path) -> None:
    run = RunDirectory.__new__(RunDirectory)
    run.paths = type(RunDirectory(tmp_path / "other").paths)(tmp_path / "new")
    assert audit_run(run.paths).verdict == "trained_once=0 duplicates=0 lost=0 open=0"


def test_what_is_under_way_is_open(run: RunDirectory) -> None:
    """Batched and not in a checkpoint, sealed and not batched, and in a cell without any trace."""
    run.hand_out(4, run.seal(7, 8))
    run.seal(10)
    audit = audit_run(run.paths)
    assert audit.is_clean
    assert audit.verdict == "trained_once=6 duplicates=0 lost=0 open=4"
    assert of(audit, TicketStatus.OPEN) == [7, 8, 9, 10]


def test_a_filtered_ticket_is_a_fate_of_its_own(run: RunDirectory) -> None:
    append_drop(run.paths, DroppedTicket(TicketRef(7, 1), "all rewards are 1.0", "filtered"))
    audit = audit_run(run.paths)
    assert of(audit, TicketStatus.FILTERED) == [7]
    assert of(audit, TicketStatus.DROPPED) == [2]
    assert audit.is_clean


def test_rows_that_were_too_old_are_neither_lost_nor_a_second_copy(run: RunDirectory) -> None:
    run.seal(7)
    append_drop(run.paths, DroppedTicket(TicketRef(7, 1), "sampled 5 steps ago", "requeued"))
    audit = audit_run(run.paths)
    assert audit.tickets[7].status is TicketStatus.OPEN
    assert "exceeded the staleness limit" in audit.tickets[7].why
    again = run.seal(7, 8, attempt=2)
    run.hand_out(4, again)
    run.write_checkpoint(4, generation=1)
    audit = audit_run(run.paths)
    assert audit.tickets[7].status is TicketStatus.TRAINED
    assert audit.is_clean


def test_a_ticket_that_was_to_be_issued_again_and_never_was_is_lost_in_the_end(
    run: RunDirectory,
) -> None:
    run.seal(7)
    append_drop(run.paths, DroppedTicket(TicketRef(7, 1), "sampled 5 steps ago", "requeued"))
    run.finish()
    assert of(audit_run(run.paths), TicketStatus.LOST) == [7]


def test_a_ticket_sealed_twice_counts_once(run: RunDirectory) -> None:
    run.seal(0, attempt=1001)
    assert audit_run(run.paths).verdict == "trained_once=6 duplicates=0 lost=0 open=0"


def test_the_newest_generation_owns_the_chain(run: RunDirectory) -> None:
    """A zombie's higher checkpoint does not count; what it trained is handed out again."""
    run.write_checkpoint(2, generation=2)
    audit = audit_run(run.paths)
    assert audit.verdict == "trained_once=4 duplicates=0 lost=0 open=2"


def test_a_checkpoint_without_its_marker_does_not_count(run: RunDirectory) -> None:
    (run.write_checkpoint(3, generation=1) / "COMPLETE").unlink()
    assert audit_run(run.paths).verdict == "trained_once=0 duplicates=0 lost=0 open=6"


# Consumed and not trained on -------------------------------------------------------------------

LEFT_OUT = UntrainedRecord(2, "cell-0-000001.h5 row 0: expected finite log-probabilities", [3])
NOT_TAKEN = UntrainedRecord(3, "the gradient norm is nan: 1 of 1 optimizer steps are not taken")


def test_what_a_consumed_batch_did_not_teach_is_no_fault_and_not_called_trained(
    run: RunDirectory,
) -> None:
    run.write_checkpoint(3, generation=1, untrained=[LEFT_OUT, NOT_TAKEN])
    audit = audit_run(run.paths)
    assert audit.is_clean
    assert audit.verdict == "trained_once=3 duplicates=0 lost=0 open=0"
    assert [(one.ticket_id, one.why) for one in audit.of(TicketStatus.UNSOUND)] == [
        (3, f"step 2, {LEFT_OUT.reason}")
    ]
    assert of(audit, TicketStatus.SKIPPED) == [5, 6]
    assert NOT_TAKEN.reason in audit.of(TicketStatus.SKIPPED)[0].why


def test_an_unsound_ticket_of_a_skipped_batch_is_unsound(run: RunDirectory) -> None:
    whole_batch = UntrainedRecord(2, NOT_TAKEN.reason)
    run.write_checkpoint(3, generation=1, untrained=[LEFT_OUT, whole_batch])
    assert of(audit_run(run.paths), TicketStatus.UNSOUND) == [3]
    assert of(audit_run(run.paths), TicketStatus.SKIPPED) == [4]


def test_a_loss_or_a_duplicate_counts_whatever_the_batch_taught(run: RunDirectory) -> None:
    run.write_checkpoint(3, generation=1, untrained=[LEFT_OUT, NOT_TAKEN])
    run.shard_of(2).unlink()
    run.hand_out(3, [run.batches[2][0], run.batches[0][0]])
    found = statuses(run)
    assert (found[0], found[3], found[5]) == (
        TicketStatus.DUPLICATE,
        TicketStatus.LOST,
        TicketStatus.SKIPPED,
    )


def test_a_batch_that_an_abandoned_generation_skipped_is_open_again(run: RunDirectory) -> None:
    run.write_checkpoint(3, generation=1, untrained=[NOT_TAKEN])
    run.write_checkpoint(2, generation=2)
    assert of(audit_run(run.paths), TicketStatus.OPEN) == [5, 6]


# Trained twice --------------------------------------------------------------------------------


def test_a_ticket_in_two_batches(run: RunDirectory) -> None:
    run.hand_out(3, [run.batches[2][0], run.batches[0][0]])
    audit = audit_run(run.paths)
    assert of(audit, TicketStatus.DUPLICATE) == [0]
    assert "steps 1 and 3" in audit.of(TicketStatus.DUPLICATE)[0].why


def test_a_ticket_twice_in_one_batch(run: RunDirectory) -> None:
    run.hand_out(2, [*run.batches[1], run.batches[1][0]])
    assert of(audit_run(run.paths), TicketStatus.DUPLICATE) == [3]


def test_a_trained_ticket_in_a_batch_that_still_waits(run: RunDirectory) -> None:
    run.hand_out(4, [run.batches[0][0], *run.seal(7)])
    assert statuses(run)[0] is TicketStatus.DUPLICATE


def test_the_same_row_under_two_tickets(run: RunDirectory) -> None:
    first, second = run.batches[2]
    run.hand_out(3, [first, msgspec.structs.replace(second, rows=first.rows)])
    assert of(audit_run(run.paths), TicketStatus.DUPLICATE) == [6]


def test_the_same_row_twice_in_one_ticket(run: RunDirectory) -> None:
    first, second = run.batches[2]
    run.hand_out(3, [first, msgspec.structs.replace(second, rows=[2, 2])])
    assert of(audit_run(run.paths), TicketStatus.DUPLICATE) == [6]


def test_a_batch_consumed_twice(run: RunDirectory) -> None:
    run.write_checkpoint(3, generation=1, consumed=[1, 2, 2])
    audit = audit_run(run.paths)
    assert of(audit, TicketStatus.DUPLICATE) == [3, 4]
    assert of(audit, TicketStatus.LOST) == [5, 6], "the batch of step 3 was passed over"
    assert audit.problems


# Lost -----------------------------------------------------------------------------------------


def delete_shard(run: RunDirectory) -> None:
    run.shard_of(2).unlink()


def cut_shard(run: RunDirectory) -> None:
    with run.shard_of(2).open("ab") as stream:
        stream.truncate(10)


def delete_index(run: RunDirectory) -> None:
    path = run.paths.index_dir / "cell-0.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[::2]))


def name_rows_of_nobody(run: RunDirectory) -> None:
    tickets = [msgspec.structs.replace(one, rows=[90, 91]) for one in run.batches[1]]
    run.hand_out(2, [tickets[0], msgspec.structs.replace(tickets[1], rows=[92, 93])])


def delete_manifest(run: RunDirectory) -> None:
    run.paths.manifest(2).unlink()


def damage_manifest(run: RunDirectory) -> None:
    run.paths.manifest(2).write_bytes(b"{")


def pass_over_a_batch(run: RunDirectory) -> None:
    run.write_checkpoint(3, generation=1, consumed=[1, 3])


@pytest.mark.parametrize(
    "tamper",
    [
        delete_shard,
        cut_shard,
        delete_index,
        name_rows_of_nobody,
        delete_manifest,
        damage_manifest,
        pass_over_a_batch,
    ],
)
def test_tickets_whose_rows_or_batch_are_gone_are_lost(
    run: RunDirectory, tamper: Callable[[RunDirectory], None]
) -> None:
    tamper(run)
    audit = audit_run(run.paths)
    assert of(audit, TicketStatus.LOST) == [3, 4]
    assert of(audit, TicketStatus.TRAINED) == [0, 1, 5, 6]
    assert not audit.is_clean


def test_a_sealed_ticket_whose_shard_is_gone_can_never_be_trained(run: RunDirectory) -> None:
    sealed = run.seal(7)
    (run.paths.shards_dir / sealed[0].shard).unlink()
    assert statuses(run)[7] is TicketStatus.LOST


def test_a_ticket_taken_out_of_a_manifest_is_missed(run: RunDirectory) -> None:
    """It would be served again, though it may have been trained."""
    run.hand_out(1, run.batches[0][:1])
    audit = audit_run(run.paths)
    assert of(audit, TicketStatus.LOST) == [1]
    assert "names 1 tickets, expected 2" in str(audit.problems[0])


def test_a_ticket_without_any_trace_is_lost(run: RunDirectory) -> None:
    """Nothing but the gap in the ids is left of it."""
    run.paths.drops.unlink()
    audit = audit_run(run.paths)
    assert of(audit, TicketStatus.LOST) == [2]
    assert "no record of it" in audit.of(TicketStatus.LOST)[0].why


def test_a_ticket_that_cells_may_hold_is_no_loss_until_the_run_has_finished(
    tmp_path: Path,
) -> None:
    """Off-policy by one batch, two tickets may be overtaken by later ones; a third may not."""
    run = RunDirectory(tmp_path / "run", off_policyness=1)
    run.paths.drops.unlink()
    assert statuses(run)[2] is TicketStatus.OPEN
    run.hand_out(4, run.seal(9, 10))
    audit = audit_run(run.paths)
    assert of(audit, TicketStatus.LOST) == [2]
    assert of(audit, TicketStatus.OPEN) == [7, 8, 9, 10]
    append_drop(run.paths, DroppedTicket(TicketRef(2, 1), "KeyError"))
    assert audit_run(run.paths).is_clean
    run.finish()
    assert of(audit_run(run.paths), TicketStatus.LOST) == [7, 8]


def test_a_finished_run_has_saved_all_its_batches(run: RunDirectory) -> None:
    (run.write_checkpoint(3, generation=1) / "COMPLETE").unlink()
    run.write_checkpoint(2, generation=1)
    run.finish()
    assert of(audit_run(run.paths), TicketStatus.LOST) == [5, 6]


def test_a_checkpoint_that_cannot_be_read_is_a_problem(run: RunDirectory) -> None:
    (run.write_checkpoint(3, generation=1) / "trainer.json").write_bytes(b"{")
    audit = audit_run(run.paths)
    assert not audit.is_clean
    assert "cannot be read" in str(audit.problems[0])


def test_a_manifest_under_another_name_is_a_problem(run: RunDirectory) -> None:
    run.paths.manifest(3).rename(run.paths.manifest(4))
    audit = audit_run(run.paths)
    assert any("expected the batch of step 4" in str(one) for one in audit.problems)
    assert not audit.is_clean


# The command ----------------------------------------------------------------------------------


def areal_hpc_audit(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "areal_hpc", "audit", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_command_ends_with_the_verdict_and_exits_by_it(run: RunDirectory) -> None:
    answer = areal_hpc_audit(run.paths.root)
    assert answer.returncode == 0
    last = answer.stdout.splitlines()[-1]
    assert last == "trained_once=6 duplicates=0 lost=0 open=0"
    assert not answer.stdout.startswith("ticket")
    delete_shard(run)
    answer = areal_hpc_audit(run.paths.root)
    assert answer.returncode == 65
    assert answer.stdout.splitlines()[-1] == "trained_once=4 duplicates=0 lost=2 open=0"
    assert "that shard is gone" in answer.stdout


def test_the_command_names_what_was_not_trained_on_and_exits_well(run: RunDirectory) -> None:
    run.write_checkpoint(3, generation=1, untrained=[LEFT_OUT, NOT_TAKEN])
    answer = areal_hpc_audit(run.paths.root)
    assert answer.returncode == 0
    assert answer.stdout.splitlines() == [
        f"untrained: batch 2, ticket 3: {LEFT_OUT.reason}",
        f"untrained: batch 3: {NOT_TAKEN.reason}",
        "not finished, last checkpoint at step 3, 1 tickets dropped, 0 filtered, "
        "1 unsound, 2 skipped",
        "trained_once=3 duplicates=0 lost=0 open=0",
    ]


def test_the_command_lists_every_ticket_on_request(run: RunDirectory) -> None:
    answer = areal_hpc_audit(run.paths.root, "--tickets")
    lines = [line.split() for line in answer.stdout.splitlines() if line.startswith("ticket ")]
    assert [(int(line[1]), line[2]) for line in lines] == [
        (0, "trained"),
        (1, "trained"),
        (2, "dropped"),
        (3, "trained"),
        (4, "trained"),
        (5, "trained"),
        (6, "trained"),
    ]
