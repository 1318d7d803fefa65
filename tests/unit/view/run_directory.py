"""A small run directory as a run leaves it, for tests that tamper with it."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from areal_hpc.rundir.checkpoints import UntrainedBatchPart
from areal_hpc.rundir.manifests import DroppedTicket, append_drop, write_manifest
from areal_hpc.rundir.paths import RunPaths, format_step_dir
from areal_hpc.shards.index import SealedShard, ShardTicket, append_to_index
from areal_hpc.wire.ledger import NO_VERSION, BatchManifest, SealedTicket, TicketRef

SHARD_BYTES = 64
BATCH = 2
N_SAMPLES = 2


class RunDirectory:
    """Three steps of two tickets; ticket 2 was dropped, so step 2 trained tickets 3 and 4."""

    def __init__(self, root: Path, *, off_policyness: int = 0) -> None:
        self.paths = RunPaths(root)
        root.mkdir(parents=True, exist_ok=True)
        self.paths.recipe.write_text(
            f"trainer: {{batch_size: {BATCH}, total_steps: 3}}\n"
            f"rollout: {{max_head_offpolicyness: {off_policyness}}}\n"
        )
        self._shards = 0
        self.batches = [self.seal(0, 1), self.seal(3, 4), self.seal(5, 6)]
        append_drop(self.paths, DroppedTicket(TicketRef(2, 1), "ValueError"))
        for step, tickets in enumerate(self.batches, 1):
            self.hand_out(step, tickets)
        self.write_checkpoint(3, generation=1)

    def seal(self, *ticket_ids: int, attempt: int = 1) -> list[SealedTicket]:
        """Seal a shard with these tickets as a proxy does."""
        name = f"cell-0-{self._shards:06d}.h5"
        self._shards += 1
        self.paths.shards_dir.mkdir(exist_ok=True)
        (self.paths.shards_dir / name).write_bytes(bytes(SHARD_BYTES))
        placed = [
            ShardTicket(
                ticket_id,
                attempt,
                [N_SAMPLES * index, N_SAMPLES * index + 1],
                [0.0, 1.0],
                NO_VERSION,
            )
            for index, ticket_id in enumerate(ticket_ids)
        ]
        rows = N_SAMPLES * len(ticket_ids)
        append_to_index(
            self.paths.shard_index_dir, SealedShard(name, SHARD_BYTES, "", rows, 10, placed)
        )
        return [
            SealedTicket(TicketRef(one.ticket_id, attempt), name, one.rows, one.rewards, NO_VERSION)
            for one in placed
        ]

    def hand_out(self, step: int, tickets: list[SealedTicket]) -> None:
        """Write the manifest of a step; replace an earlier one, which no ledger does."""
        self.paths.manifest(step).unlink(missing_ok=True)
        write_manifest(self.paths, BatchManifest(step, 1, tickets))

    def write_checkpoint(
        self,
        step: int,
        generation: int,
        consumed: list[int] | None = None,
        untrained: Sequence[UntrainedBatchPart] = (),
    ) -> Path:
        """Write a complete checkpoint with the trainer's state of batches."""
        path = self.paths.checkpoints_dir / format_step_dir(step)
        path.mkdir(parents=True, exist_ok=True)
        state = {
            "step": step,
            "generation": generation,
            "seed": 1,
            "parent": None,
            "consumed": consumed if consumed is not None else [*range(1, step + 1)],
            "untrained": untrained,
        }
        (path / "trainer.json").write_bytes(msgspec.json.encode(state))
        (path / "COMPLETE").touch()
        return path

    def finish(self) -> None:
        self.paths.finished_marker.touch()

    def shard_of(self, step: int) -> Path:
        """Return the file that holds a step's rows."""
        return self.paths.shards_dir / self.batches[step - 1][0].shard
