"""Cells and a trainer without models: the real driver, peers, seals and reads; episodes that sleep.

`rollout.driver.Driver` itself talks to the ledger. Only the part that would need a model is
replaced: running a ticket's episodes is a sleep of log-normal length.
"""

import asyncio
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

import numpy as np

from areal_hpc.recipe.sections.rollout import RolloutConfig
from areal_hpc.rollout.driver import Driver
from areal_hpc.rollout.episode_watch import EpisodeWatch
from areal_hpc.rollout.episodes.group import GroupPlayer, ReplicaGate
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.rendezvous import ensure_service_key
from areal_hpc.rundir.service_client import AsyncServiceClient
from areal_hpc.rundir.telemetry.events import EventLog
from areal_hpc.shards.index import SealedShard, ShardTicket, append_to_index
from areal_hpc.shards.schema import format_shard_name
from areal_hpc.shards.verify import CheckedShards
from areal_hpc.shards.writer import write_sealed_shard
from areal_hpc.trainer.batch.training_rows import read_rows_by_ticket
from areal_hpc.wire.ledger import (
    NO_VERSION,
    Acknowledged,
    BatchManifest,
    BatchReply,
    BatchRequest,
    Empty,
    LedgerStatus,
    OpenTrainerGenerationRequest,
    SettleShardsRequest,
    TicketGrant,
    TicketRef,
    WeightsPublishedRequest,
)
from areal_hpc.wire.trajectory import TrajectoryRow

ROW_TOKENS = 64
LONGEST_OVER_MEDIAN = 8.0
"""99th percentile of a ticket's time over its median."""
NINETY_NINTH = 2.326
"""99th percentile of the standard normal distribution."""


@dataclass(frozen=True)
class Tempo:
    """Speeds of the cells and of the trainer in one measurement."""

    median_ticket_s: float
    tickets_at_once: int
    n_samples: int
    seal_after_s: float
    with_shards: bool
    """Seal real shards, and read them for each batch; else the index alone has them."""


@dataclass
class Tally:
    """Counts and times of a measurement so far."""

    granted: int = 0
    settled: int = 0
    sealed: int = 0
    steps: int = 0
    manifest_s: list[float] = field(default_factory=list)
    """Times from asking for a batch, whose tickets are all there, to having its manifest."""
    read_s: list[float] = field(default_factory=list)
    """Opening the batch's shards and reading its rows."""


class Storehouse:
    """Stand-in for a proxy: it seals finished tickets by age or on request, then settles them."""

    def __init__(
        self,
        cell: str,
        paths: RunPaths,
        ledger: AsyncServiceClient,
        tempo: Tempo,
        tally: Tally,
        pool: Executor,
    ) -> None:
        self._cell = cell
        self._paths = paths
        self._ledger = ledger
        self._tempo = tempo
        self._tally = tally
        self._pool = pool
        self._finished: list[TicketRef] = []
        self._since_s = 0.0
        self._sequence = 0
        self._sealing = asyncio.Lock()

    def finish(self, ref: TicketRef) -> None:
        """A ticket ended."""
        if not self._finished:
            self._since_s = time.monotonic()
        self._finished.append(ref)

    async def run(self) -> None:
        """Seal tickets that have waited long enough, until cancelled."""
        while True:
            age_s = time.monotonic() - self._since_s if self._finished else 0.0
            left_s = self._tempo.seal_after_s - age_s
            if left_s <= 0:
                await self.seal_now()
            await asyncio.sleep(max(left_s, 0.05))

    async def seal_now(self) -> None:
        """Seal and settle the finished tickets."""
        async with self._sealing:
            refs, self._finished = self._finished, []
            if not refs:
                return
            settle = SettleShardsRequest(self._cell, [await self._write(refs)])
            await self._ledger.call_repeatedly("/settle", settle, Acknowledged)
            self._tally.sealed += 1
            self._tally.settled += len(refs)

    async def _write(self, refs: Sequence[TicketRef]) -> str:
        """The name of a shard that is in the index, and in a file if shards are real."""
        n_samples = self._tempo.n_samples
        rewards = [float(episode % 2) for episode in range(n_samples)]
        file = format_shard_name(self._cell, self._sequence)
        self._sequence += 1
        index_dir, loop = self._paths.shard_index_dir, asyncio.get_running_loop()
        if self._tempo.with_shards:
            rows = [row for ref in refs for row in trajectories(ref, rewards)]
            shard = await loop.run_in_executor(
                self._pool,
                write_sealed_shard,
                rows,
                self._paths.shards_dir,
                index_dir,
                self._cell,
            )
            return shard.file
        tickets = [
            ShardTicket(
                ref.ticket_id,
                ref.attempt,
                [*range(position * n_samples, (position + 1) * n_samples)],
                rewards,
                NO_VERSION,
            )
            for position, ref in enumerate(refs)
        ]
        count = len(refs) * n_samples
        line = SealedShard(file, 0, "crc32:00000000", count, count * ROW_TOKENS, tickets)
        await loop.run_in_executor(self._pool, append_to_index, index_dir, line)
        return file


def trajectories(ref: TicketRef, rewards: Sequence[float]) -> Iterator[TrajectoryRow]:
    """Make the rows of a ticket: short ones, since bytes are not measured here."""
    for episode, reward in enumerate(rewards):
        yield TrajectoryRow(
            ticket_id=ref.ticket_id,
            attempt=ref.attempt,
            episode=episode,
            row=0,
            input_ids_T=np.zeros(ROW_TOKENS, np.int32),
            loss_mask_T=np.ones(ROW_TOKENS, np.uint8),
            logprobs_T=np.full(ROW_TOKENS, -0.5, np.float32),
            versions_T=np.full(ROW_TOKENS, 1 << 32, np.int64),
            reward=reward,
        )


class OpenGate(ReplicaGate):
    """The gate of a cell that needs no replica."""

    async def run(self, on_open: Callable[[], None]) -> None:
        self.opened.set()
        await asyncio.Event().wait()


class IdleWatch(EpisodeWatch):
    """The watch of a cell without agents: a thread for each of a thousand would cost too much."""

    async def run(self) -> None:
        await asyncio.Event().wait()


class SleepingCell(Driver):
    """The driver of a cell whose episodes are sleeps."""

    def __init__(
        self,
        number: int,
        paths: RunPaths,
        ledger: AsyncServiceClient,
        stores: Storehouse,
        tempo: Tempo,
        tally: Tally,
    ) -> None:
        cell, events = f"cell-{number}", EventLog(paths.events, "cells")
        player = GroupPlayer(
            RolloutConfig(n_samples=tempo.n_samples),
            (),
            agents={},
            tasks={},
            proxy=ledger,
            http_client=None,
            events=events,
        )
        player.gate, player.watch = OpenGate(ledger), IdleWatch(events)
        super().__init__(
            cell,
            player,
            episode_slots=tempo.n_samples * tempo.tickets_at_once,
            episodes_per_ticket=tempo.n_samples,
            ledger=ledger,
            proxy=ledger,
            events=events,
        )
        self._stores = stores
        self._tempo = tempo
        self._tally = tally
        self._generator = np.random.default_rng(zlib.crc32(cell.encode()))

    async def _run_training_ticket(self, grant: TicketGrant) -> bool:
        self._tally.granted += 1
        self.tickets.begin_episodes(grant)
        sigma = np.log(LONGEST_OVER_MEDIAN) / NINETY_NINTH
        await asyncio.sleep(self._tempo.median_ticket_s * self._generator.lognormal(0.0, sigma))
        for _ in range(grant.n_episodes):
            self.tickets.end_episode(grant.ref)
        self._stores.finish(grant.ref)
        return True

    async def _request_seal(self) -> None:
        await self._stores.seal_now()
        self.tickets.changed.set()


async def run_cells(
    count: int, paths: RunPaths, tempo: Tempo, tally: Tally, pool: Executor
) -> None:
    """Run all cells until cancelled. Each has two connections, as driver and as proxy."""
    peers: list[AsyncServiceClient] = []
    try:
        async with asyncio.TaskGroup() as group:
            for number in range(count):
                ledger, other = to_ledger(paths), to_ledger(paths)
                peers += ledger, other
                stores = Storehouse(f"cell-{number}", paths, other, tempo, tally, pool)
                cell = SleepingCell(number, paths, ledger, stores, tempo, tally)
                group.create_task(stores.run())
                group.create_task(cell.run())
                await asyncio.sleep(0.001)  # jobs do not start in the same moment
    finally:
        for peer in peers:
            await peer.close()


def to_ledger(paths: RunPaths) -> AsyncServiceClient:
    """A connection of its own."""
    return AsyncServiceClient(paths.rendezvous_dir, "ledger", ensure_service_key(paths.service_key))


async def run_trainer(paths: RunPaths, batch_size: int, tempo: Tempo, tally: Tally) -> None:
    """Ask for batch after batch, and say at once that it was trained, until cancelled."""
    ledger = to_ledger(paths)
    try:
        await _train(paths, ledger, batch_size, tempo, tally)
    finally:
        await ledger.close()


async def _train(
    paths: RunPaths, ledger: AsyncServiceClient, batch_size: int, tempo: Tempo, tally: Tally
) -> None:
    await ledger.call_repeatedly(
        "/open_generation", OpenTrainerGenerationRequest(1, 0), Acknowledged
    )
    shards = CheckedShards(paths.shards_dir, paths.shard_index_dir)
    while True:
        step = tally.steps + 1
        manifest, manifest_s = await _batch(ledger, step, batch_size)
        if manifest_s is not None:
            tally.manifest_s.append(manifest_s)
        if tempo.with_shards:
            began = time.monotonic()
            await asyncio.to_thread(read_rows, manifest, shards)
            tally.read_s.append(time.monotonic() - began)
        await ledger.call_repeatedly("/publish", WeightsPublishedRequest(1, step), Acknowledged)
        tally.steps = step


async def _batch(
    ledger: AsyncServiceClient, step: int, batch_size: int
) -> tuple[BatchManifest, float | None]:
    """A batch; the time that took, if its tickets were all there when it was asked for."""
    while True:
        status = await ledger.call_repeatedly("/status", Empty(), LedgerStatus)
        began = time.monotonic()
        reply = await ledger.call_repeatedly("/batch", BatchRequest(1, step, 2.0), BatchReply)
        if reply.manifest is not None:
            was_there = status.settled >= batch_size
            return reply.manifest, time.monotonic() - began if was_there else None


def read_rows(manifest: BatchManifest, shards: CheckedShards) -> None:
    """Read a whole batch as one trainer rank does."""
    with shards.check_digests_in_background({ticket.shard for ticket in manifest.tickets}):
        read_rows_by_ticket(manifest, shards)
