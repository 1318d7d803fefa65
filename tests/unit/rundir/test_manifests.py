from pathlib import Path
from unittest.mock import Mock

import pytest

from areal_hpc.errors import ShardError
from areal_hpc.rundir import manifests
from areal_hpc.rundir.checkpoints import CHECKPOINT_INDEX_FILE, read_checkpoint_index
from areal_hpc.rundir.manifests import (
    DroppedTicket,
    EvaluationResult,
    LedgerState,
    append_drop,
    read_drops,
)
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.shards.index import SealedShard, ShardTicket, append_to_index, read_sealed_tickets
from areal_hpc.wire.ledger import BatchManifest, SealedTicket, TicketRef


def batch(step: int) -> BatchManifest:
    ticket = SealedTicket(TicketRef(step, 1), "cell-0-000000.h5", [0, 1], [0.1, -1e-7], 7)
    return BatchManifest(step, 2, [ticket])


def test_a_manifest_is_never_replaced(paths: RunPaths) -> None:
    """Two ledgers may both take themselves for the only one; the first manifest counts for both."""
    first = manifests.write_manifest(paths, batch(1))
    other = BatchManifest(1, 3, batch(7).tickets)
    assert manifests.write_manifest(paths, other) == first == batch(1)
    assert manifests.read_manifest(paths, 1) == batch(1)
    assert [path.name for path in paths.manifests_dir.iterdir()] == ["batch_00000001.json"]


def test_manifests_come_by_step_without_leftovers_of_crashes(paths: RunPaths) -> None:
    for step in (10, 2, 1):
        manifests.write_manifest(paths, batch(step))
    (paths.manifests_dir / ".batch_00000011.json.77.tmp").write_bytes(b'{"step": 1')
    assert [manifest.step for manifest in manifests.read_manifests(paths)] == [1, 2, 10]


def test_failed_writes_keep_the_content(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    assert manifests.read_ledger_state(paths) == LedgerState(0, 0, 0), "no ledger so far"
    manifests.write_ledger_state(paths, LedgerState(1, 1, 1))
    monkeypatch.setattr("os.fsync", Mock(side_effect=OSError("no space left")))
    with pytest.raises(OSError, match="no space left"):
        manifests.write_ledger_state(paths, LedgerState(1, 1, 2))
    assert manifests.read_ledger_state(paths) == LedgerState(1, 1, 1)


def test_a_damaged_manifest_is_named_and_one_that_is_gone_no_endless_wait(paths: RunPaths) -> None:
    paths.manifests_dir.mkdir()
    paths.manifest(1).write_bytes(b"{")
    with pytest.raises(ShardError, match=r"batch_00000001\.json is not a BatchManifest"):
        manifests.read_manifest(paths, 1)
    with pytest.raises(ShardError, match="its manifest is gone"):
        manifests.read_manifest(paths, 2)


def test_settled_tickets_are_those_of_the_shard_index(paths: RunPaths) -> None:
    assert list(read_sealed_tickets(paths.shard_index_dir)) == []
    sealed = ShardTicket(5, 2, [3, 4], [0.5, 1.0], 7)
    append_to_index(
        paths.shard_index_dir, SealedShard("cell-0-000000.h5", 1, "crc32:00000000", 5, 9, [sealed])
    )
    expected = SealedTicket(TicketRef(5, 2), "cell-0-000000.h5", [3, 4], [0.5, 1.0], 7)
    assert list(read_sealed_tickets(paths.shard_index_dir)) == [expected]


def test_a_drop_follows_the_half_line_of_a_crash(paths: RunPaths) -> None:
    first, second = (DroppedTicket(TicketRef(i, 1), "boom\n") for i in range(2))
    append_drop(paths, first)
    with paths.drops.open("ab") as stream:
        stream.write(b'{"cell":"cell-0","ref":{"ti')
    append_drop(paths, second)
    assert list(read_drops(paths)) == [first, second]


def test_results_of_weights_that_a_resumed_trainer_gave_up_are_left_out(paths: RunPaths) -> None:
    """The first trainer evaluated steps 10 and 20, the second one resumed from step 15."""
    for name in ("valid", "aime"):
        paths.evaluation(0, name).parent.mkdir(parents=True, exist_ok=True)
        for step in (10, 20):
            result = EvaluationResult(step, 1, 0.5, [0.5], {}, 1)
            manifests.write_evaluation(paths, name, result)
    state = LedgerState().with_opened_generation(1, 0).with_opened_generation(2, 15)
    manifests.write_ledger_state(paths, state)
    listed = [(name, row.step) for name, row in manifests.list_kept_evaluations(paths, "valid")]
    assert listed == [("valid", 10), ("aime", 10)]
    assert manifests.read_kept_evaluation(paths, 10, "aime") is not None
    assert manifests.read_kept_evaluation(paths, 20, "aime") is None
    second = EvaluationResult(20, 1, 0.75, [0.75], {}, 2)
    manifests.write_evaluation(paths, "aime", second)
    assert manifests.read_kept_evaluation(paths, 20, "aime") == second
    assert [row.step for _, row in manifests.list_kept_evaluations(paths, "valid")] == [10, 10, 20]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b'{"format": 3, "everything": "else"}', "format 3; this version reads format 2"),
        (b'{"format": 2}', "cannot be read"),
        (b"\xff", "cannot be read"),
    ],
)
def test_what_cannot_be_read_is_told(tmp_path: Path, content: bytes, text: str) -> None:
    (tmp_path / CHECKPOINT_INDEX_FILE).write_bytes(content)
    with pytest.raises(ShardError, match=text):
        read_checkpoint_index(tmp_path)
