"""Tampering with a run directory is found, and nothing else is called a fault."""

from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import msgspec
import pytest

from areal_hpc.rundir.checkpoints import UntrainedBatchPart
from areal_hpc.rundir.manifests import DropKind, DroppedTicket, append_drop, record_quarantine
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.shards.index import SealedShard, UntrainedEpisodeRows, append_to_index
from areal_hpc.view.audit import AuditReport, audit_run
from areal_hpc.wire.ledger import NO_VERSION, SealedTicket, TicketRef
from tests.support.commands import exit_code_of
from tests.unit.view.run_directory import SHARD_BYTES, RunDirectory

Change = Callable[[RunDirectory], object]
Fates = dict[str, list[int]]
Case = tuple[Change, Fates] | tuple[Change, Fates, str]
"""Change of a run, tickets by status, and parts of the audit's messages."""

LEFT_OUT = UntrainedBatchPart(2, "cell-0-000001.h5 row 0: expected finite log-probabilities", [3])
NOT_TAKEN = UntrainedBatchPart(3, "the gradient norm is nan: 1 of 1 optimizer steps are not taken")
DAMAGED = UntrainedBatchPart(2, "cell-0-000001.h5: bytes have changed", quarantine="damaged")
REQUESTED = UntrainedBatchPart(4, "areal-hpc quarantine asked for it", quarantine="requested")


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run")


def fates(audit: AuditReport) -> Fates:
    """Return tickets by status, without those that were trained."""
    statuses: Fates = {}
    for ticket in audit.tickets:
        if ticket.status != "trained":
            statuses.setdefault(ticket.status, []).append(ticket.ticket_id)
    return statuses


def whys(audit: AuditReport) -> str:
    return "\n".join([*(ticket.why for ticket in audit.tickets), *map(str, audit.problems)])


def drop(run: RunDirectory, ticket_id: int, kind: DropKind, reason: str = "why") -> None:
    append_drop(run.paths, DroppedTicket(TicketRef(ticket_id, 1), reason, kind))


def delete_shard(run: RunDirectory, step: int = 2) -> None:
    run.shard_of(step).unlink()


def save(
    run: RunDirectory, *untrained: UntrainedBatchPart, consumed: list[int] | None = None
) -> Path:
    """Write the checkpoint of step 3 again."""
    return run.write_checkpoint(3, generation=1, consumed=consumed, untrained=untrained)


def all_of(*changes: Change) -> Change:
    return lambda run: [change(run) for change in changes]


def order(record: UntrainedBatchPart) -> Change:
    """Set a batch aside, as a person or the trainer does."""
    return lambda run: record_quarantine(run.paths, record)


UNDER_WAY = all_of(lambda run: run.hand_out(4, run.seal(7, 8)), lambda run: run.seal(10))
"""Batched and not in a checkpoint, sealed and not batched; 9 is in a cell without any trace."""
ABANDONED = all_of(
    lambda run: save(run, NOT_TAKEN), lambda run: run.write_checkpoint(2, generation=2)
)

FAULTLESS: dict[str, Case] = {
    "it finished": (RunDirectory.finish, {}, "ValueError"),
    "tickets are under way": (UNDER_WAY, {"open": [7, 8, 9, 10]}),
    "a group was filtered": (lambda run: drop(run, 7, "filtered"), {"filtered": [7]}),
    "a ticket was sealed twice": (lambda run: run.seal(0, attempt=1001), {}),
    # A zombie's higher checkpoint does not count; what it trained is handed out again.
    "the newest generation owns the chain": (
        lambda run: run.write_checkpoint(2, generation=2),
        {"open": [5, 6]},
    ),
    "a checkpoint without its marker does not count": (
        lambda run: (save(run) / "COMPLETE").unlink(),
        {"open": [0, 1, 3, 4, 5, 6]},
    ),
    "a ticket was unsound and a batch was skipped": (
        lambda run: save(run, LEFT_OUT, NOT_TAKEN),
        {"unsound": [3], "skipped": [5, 6]},
        f"step 2, {LEFT_OUT.reason}",
    ),
    "the batch of an unsound ticket was skipped": (
        lambda run: save(run, LEFT_OUT, UntrainedBatchPart(2, NOT_TAKEN.reason)),
        {"unsound": [3], "skipped": [4]},
        NOT_TAKEN.reason,
    ),
    "an abandoned generation skipped a batch": (ABANDONED, {"open": [5, 6]}),
    "a batch whose shard is gone was set aside": (
        all_of(lambda run: save(run, DAMAGED), delete_shard),
        {"quarantined": [3, 4]},
        DAMAGED.reason,
    ),
    "a batch to come was set aside": (
        all_of(UNDER_WAY, order(REQUESTED)),
        {"quarantined": [7, 8], "open": [9, 10]},
        f"{REQUESTED.reason}; not in a checkpoint yet",
    ),
    "a batch was set aside too late": (order(DAMAGED), {}),
    "a checkpoint from before a batch that was set aside": (
        all_of(lambda run: run.write_checkpoint(1, generation=2), order(DAMAGED), delete_shard),
        {"quarantined": [3, 4], "open": [5, 6]},
    ),
}


def cut_shard(run: RunDirectory) -> None:
    with run.shard_of(2).open("ab") as stream:
        stream.truncate(10)


def delete_index(run: RunDirectory) -> None:
    path = run.paths.shard_index_dir / "cell-0.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[::2]))


def name_rows_of_nobody(run: RunDirectory) -> None:
    tickets = [msgspec.structs.replace(ticket, rows=[90, 91]) for ticket in run.batches[1]]
    run.hand_out(2, [tickets[0], msgspec.structs.replace(tickets[1], rows=[92, 93])])


def delete_sealed_shard(run: RunDirectory) -> None:
    (run.paths.shards_dir / run.seal(7)[0].shard).unlink()


def put_a_trained_ticket_into(step: int) -> Change:
    """Replace the batch's last ticket."""
    return lambda run: run.hand_out(step, [run.batches[step - 1][0], run.batches[0][0]])


def give_ticket_6(rows: list[int]) -> Change:
    def change(run: RunDirectory) -> None:
        first, second = run.batches[2]
        run.hand_out(3, [first, msgspec.structs.replace(second, rows=rows)])

    return change


def finish_without_the_last_checkpoint(run: RunDirectory) -> None:
    (save(run) / "COMPLETE").unlink()
    run.write_checkpoint(2, generation=1)
    run.finish()


LOST: Fates = {"lost": [3, 4]}
FAULTS: dict[str, Case] = {
    "a ticket in two batches": (
        put_a_trained_ticket_into(3),
        {"duplicate": [0], "open": [6]},
        "steps 1 and 3",
    ),
    "a ticket twice in one batch": (
        lambda run: run.hand_out(2, [*run.batches[1], run.batches[1][0]]),
        {"duplicate": [3]},
        "names 3 tickets, expected 2",
    ),
    "a trained ticket in a batch that waits": (
        lambda run: run.hand_out(4, [run.batches[0][0], *run.seal(7)]),
        {"duplicate": [0], "open": [7]},
    ),
    "a row under two tickets": (give_ticket_6([0, 1]), {"duplicate": [6]}),
    "a row twice in one ticket": (give_ticket_6([2, 2]), {"duplicate": [6]}),
    "a batch consumed twice, another passed over": (
        lambda run: save(run, consumed=[1, 2, 2]),
        {"duplicate": [3, 4], "lost": [5, 6]},
        "exactly once",
    ),
    "a loss and a duplicate, whatever the batch taught": (
        all_of(
            lambda run: save(run, LEFT_OUT, NOT_TAKEN), delete_shard, put_a_trained_ticket_into(3)
        ),
        {"duplicate": [0], "lost": [3, 4], "skipped": [5], "open": [6]},
    ),
    "a deleted shard": (delete_shard, LOST, "that shard is gone"),
    "a deleted shard of a batch set aside too late": (all_of(delete_shard, order(DAMAGED)), LOST),
    "a batch passed over, though set aside": (
        all_of(lambda run: save(run, DAMAGED, consumed=[1, 3])),
        LOST,
    ),
    "a damaged quarantine file": (
        all_of(UNDER_WAY, order(REQUESTED), lambda run: run.paths.quarantine(4).write_text("{")),
        {"open": [7, 8, 9, 10]},
        "is not a UntrainedBatchPart",
    ),
    "a ticket in a trained batch and in one set aside": (
        all_of(put_a_trained_ticket_into(2), lambda run: save(run, DAMAGED)),
        {"duplicate": [0], "quarantined": [3], "open": [4]},
    ),
    "a cut shard": (cut_shard, LOST),
    "a deleted index": (delete_index, LOST),
    "rows of nobody": (name_rows_of_nobody, LOST),
    "a deleted manifest": (lambda run: run.paths.manifest(2).unlink(), LOST),
    "a damaged manifest": (lambda run: run.paths.manifest(2).write_bytes(b"{"), LOST),
    "a batch passed over": (lambda run: save(run, consumed=[1, 3]), LOST),
    "a deleted shard that was in no batch": (delete_sealed_shard, {"lost": [7]}),
    # It would be served again, though it may have been trained.
    "a ticket taken out of a manifest": (
        lambda run: run.hand_out(1, run.batches[0][:1]),
        {"lost": [1]},
        "names 1 tickets, expected 2",
    ),
    "a finished run without its last checkpoint": (
        finish_without_the_last_checkpoint,
        {"lost": [5, 6]},
    ),
    "an unreadable checkpoint": (
        lambda run: (save(run) / "trainer.json").write_bytes(b"{"),
        {"open": [0, 1, 3, 4, 5, 6]},
        "cannot be read",
    ),
    "a manifest under another name": (
        lambda run: run.paths.manifest(3).rename(run.paths.manifest(4)),
        {"open": [5, 6]},
        "expected the batch of step 4",
    ),
}


@pytest.mark.parametrize("case", [*FAULTLESS, *FAULTS])
def test_what_became_of_every_ticket_is_told(run: RunDirectory, case: str) -> None:
    change, expected, *texts = (FAULTLESS | FAULTS)[case]
    change(run)
    audit = audit_run(run.paths)
    assert audit.is_consistent == (case in FAULTLESS)
    assert fates(audit) == {"dropped": [2], **expected}
    assert all(text in whys(audit) for text in texts)


def test_a_run_that_has_not_begun(tmp_path: Path) -> None:
    verdict = audit_run(RunPaths(tmp_path / "new")).summary_line
    assert verdict == "trained_once=0 duplicates=0 lost=0 open=0"


def test_a_ticket_without_any_trace_is_lost(run: RunDirectory) -> None:
    """Its only trace is the gap in the ids."""
    run.paths.drops.unlink()
    audit = audit_run(run.paths)
    assert fates(audit) == {"lost": [2]}
    assert "no record of it" in whys(audit)


def test_a_ticket_that_cells_may_hold_is_not_lost_before_the_end(tmp_path: Path) -> None:
    """Two tickets may be overtaken by later ones at an off-policyness of one batch, a third not."""
    run = RunDirectory(tmp_path / "run", off_policyness=1)
    run.paths.drops.unlink()
    assert fates(audit_run(run.paths)) == {"open": [2]}
    run.hand_out(4, run.seal(9, 10))
    assert fates(audit_run(run.paths)) == {"lost": [2], "open": [7, 8, 9, 10]}
    append_drop(run.paths, DroppedTicket(TicketRef(2, 1), "KeyError"))
    assert audit_run(run.paths).is_consistent
    run.finish()
    assert fates(audit_run(run.paths))["lost"] == [7, 8]


def test_a_gap_is_no_loss_to_who_may_not_read_the_recipe(run: RunDirectory) -> None:
    """Members of its group may read a run, but not the recipe, which may hold keys."""
    run.paths.drops.unlink()
    run.paths.recipe.write_text("trainer: {}\n")
    audit = audit_run(run.paths)
    assert fates(audit) == {"open": [2]}
    assert audit.is_consistent


def audited(run: RunDirectory, *options: str) -> tuple[int, list[str]]:
    with redirect_stdout(StringIO()) as output:
        code = exit_code_of("audit", run.paths.root, *options)
    return code, output.getvalue().splitlines()


def test_the_command_ends_with_the_verdict_and_exits_by_it(run: RunDirectory) -> None:
    code, lines = audited(run)
    assert (code, lines[-1]) == (0, "trained_once=6 duplicates=0 lost=0 open=0")
    assert not lines[0].startswith("ticket")
    delete_shard(run)
    code, lines = audited(run)
    assert (code, lines[-1]) == (65, "trained_once=4 duplicates=0 lost=2 open=0")
    assert "that shard is gone" in "\n".join(lines)


def keep_untrained(run: RunDirectory) -> list[UntrainedEpisodeRows]:
    """Record episodes that belong to no ticket, in a shard of the cell."""
    kept = [
        UntrainedEpisodeRows("evaluation", "e", [0]),
        UntrainedEpisodeRows("failed", "f", [1], "KeyError at a.py:1"),
        UntrainedEpisodeRows("failed", "g", [2], "KeyError at a.py:1"),
    ]
    (run.paths.shards_dir / "cell-0-000009.h5").write_bytes(bytes(SHARD_BYTES))
    line = SealedShard("cell-0-000009.h5", SHARD_BYTES, "", 3, 10, [], kept)
    append_to_index(run.paths.shard_index_dir, line)
    return kept


def test_held_out_and_failed_episodes_are_counted_and_are_no_tickets(run: RunDirectory) -> None:
    before = fates(audit_run(run.paths))
    keep_untrained(run)
    assert fates(audit_run(run.paths)) == before
    code, lines = audited(run)
    summary = "kept beside the tickets, never trained on: 1 evaluation and 2 failed episodes"
    assert (code, lines[-2]) == (0, summary)


def test_a_batch_that_names_a_held_out_episode_is_a_fault(run: RunDirectory) -> None:
    keep_untrained(run)
    wrong = SealedTicket(TicketRef(5, 1), "cell-0-000009.h5", [0], [1.0], NO_VERSION)
    run.hand_out(3, [wrong, run.batches[2][1]])
    audit = audit_run(run.paths)
    assert fates(audit)["lost"] == [5]
    assert "row 0 of that shard is of kind evaluation and not for training" in whys(audit)


def test_the_command_names_what_was_not_trained_on_and_exits_well(run: RunDirectory) -> None:
    begin = "not finished, last checkpoint at step 3, 1 tickets dropped, 0 filtered, "
    save(run, LEFT_OUT, NOT_TAKEN)
    lines = [
        f"untrained: batch 2, ticket 3: {LEFT_OUT.reason}",
        f"untrained: batch 3: {NOT_TAKEN.reason}",
        f"{begin}1 unsound, 2 skipped, 0 quarantined",
        "trained_once=3 duplicates=0 lost=0 open=0",
    ]
    assert audited(run) == (0, lines)
    save(run, DAMAGED)
    UNDER_WAY(run)
    order(REQUESTED)(run)
    lines = [
        f"untrained: batch 2 is quarantined (damaged): {DAMAGED.reason}",
        f"untrained: batch 4 is quarantined (requested): {REQUESTED.reason}",
        f"{begin}0 unsound, 0 skipped, 4 quarantined",
        "trained_once=4 duplicates=0 lost=0 open=2",
    ]
    assert audited(run) == (0, lines)


def test_the_command_lists_every_ticket_on_request(run: RunDirectory) -> None:
    _, lines = audited(run, "--tickets")
    rows = [line.split()[1:3] for line in lines if line.startswith("ticket ")]
    assert rows == [[str(i), "dropped" if i == 2 else "trained"] for i in range(7)]
