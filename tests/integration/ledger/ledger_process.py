"""Real ledger process that tests can kill and start again on the same run directory."""

import http.client
import multiprocessing
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

import msgspec

from areal_hpc.ledger.job import run
from areal_hpc.metrics.step_metrics import VALIDATION_REWARD_METRIC
from areal_hpc.rundir import rendezvous
from areal_hpc.rundir.files import get_number_path
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.rendezvous import derive_bearer_key, make_client_tls
from areal_hpc.shards.index import SealedShard, ShardTicket, append_to_index
from areal_hpc.wire.http import WireClient
from areal_hpc.wire.ledger import (
    NO_VERSION,
    Acknowledged,
    BatchManifest,
    BatchReply,
    BatchRequest,
    DropTicketRequest,
    Empty,
    EvaluateReply,
    EvaluateRequest,
    EvaluationResultRequest,
    LeaseReply,
    LeaseRequest,
    LedgerStatus,
    OpenTrainerGenerationRequest,
    SealedTicket,
    SettleShardsRequest,
    TaskSplit,
    TicketGrant,
    TicketRef,
    WeightsPublishedRequest,
)
from tests.support.deadlines import Deadline, scaled
from tests.support.role_recipe import write_role_recipe

Reply = TypeVar("Reply")

PATIENCE_S = scaled(60.0)
"""Time after which a missing event counts as never."""
PROCESSES = multiprocessing.get_context("forkserver")
"""Every start of a ledger is a process of its own, without the second that its imports take."""
PROCESSES.set_forkserver_preload(["areal_hpc.ledger.job"])


RECIPE_KEYS = {
    "batch_size": ("trainer", 2),
    "total_steps": ("trainer", 3),
    "n_samples": ("rollout", 4),
    "max_head_offpolicyness": ("rollout", 0),
    "max_concurrent_rollouts": ("rollout", 64),
    "stale_groups": ("rollout", "train_with_correction"),
    "curriculum": ("rollout", ""),
}
"""Sections and defaults of the settings that a recipe has."""


def config_of(
    run_dir: Path, *, sets: Mapping[str, Mapping[str, Any]] | None = None, **settings: Any
) -> dict[str, Any]:
    """Return a ledger's configuration and its recipe: a small synchronous run, but for `settings`.

    `sets` are evaluation sets by name, of 5 tasks unless they say `there_are`.
    """
    sets = {"valid": {}} if sets is None else sets
    recipe: dict[str, dict[str, Any]] = {"trainer": {}, "rollout": {}}
    for name, (section, default) in RECIPE_KEYS.items():
        recipe[section][name] = settings.pop(name, default)
    held_out = {
        name: {"dataset": {"path": "tasks.jsonl"}}
        | {key: value for key, value in spec.items() if key != "there_are"}
        for name, spec in sets.items()
    }
    write_role_recipe(RunPaths(run_dir), seed=7, evaluation={"sets": held_out}, **recipe)
    return {
        "run_dir": str(run_dir),
        "n_train_tasks": 10,
        "tasks_by_evaluation_set": {name: spec.get("there_are", 5) for name, spec in sets.items()},
        **settings,
    }


class LedgerProcess:
    """Process of `areal_hpc.ledger.job:run`, called as drivers, proxies and trainers do."""

    def __init__(self, run_dir: Path, **settings: Any) -> None:
        self.paths = RunPaths(run_dir)
        self.config = config_of(run_dir, **settings)
        self.episodes_per_ticket = settings.get("n_samples", 4)
        self.shards = 0
        self.threads = ThreadPoolExecutor(8)
        self.clients: list[WireClient] = []
        self.start()

    def start(self) -> None:
        rendezvous.ensure_service_key(self.paths.service_key)
        self.process = PROCESSES.Process(target=run, args=(self.config,))
        self.process.start()
        try:
            self.url = self._await_url()
        except BaseException:
            self.kill()
            raise
        self.client = WireClient(
            self.url, self.key, tls=make_client_tls(self.service_key), timeout_s=PATIENCE_S
        )
        # Not closed before the end: another thread may be in the middle of a call.
        self.clients.append(self.client)

    @property
    def service_key(self) -> str:
        return rendezvous.read_service_key(self.paths.service_key)

    @property
    def key(self) -> str:
        return derive_bearer_key(self.service_key, "ledger")

    def _await_url(self) -> str:
        endpoint = None
        while endpoint is None or endpoint.pid != self.process.pid:
            assert self.process.is_alive(), "the ledger ended at its start"
            time.sleep(0.01)
            endpoint = rendezvous.find_endpoint(self.paths.rendezvous_dir, "ledger")
        return endpoint.url

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def restart(self, **settings: Any) -> None:
        self.config |= settings
        self.kill()
        self.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.kill()
        self.threads.shutdown()
        for client in self.clients:
            client.close()

    def call(self, route: str, request: msgspec.Struct, reply: type[Reply]) -> Reply:
        return self.client.call(route, request, reply)

    def order(self, route: str, request: msgspec.Struct) -> None:
        self.call(route, request, Acknowledged)

    def call_later(self, route: str, request: msgspec.Struct, reply: type[Reply]) -> Future[Reply]:
        return self.threads.submit(self.call, route, request, reply)

    def begin(self, route: str, request: msgspec.Struct) -> http.client.HTTPConnection:
        """Return a call that waits at the ledger; its answer comes by this connection."""
        connection = http.client.HTTPSConnection(
            urlsplit(self.url).netloc,
            timeout=PATIENCE_S,
            context=make_client_tls(self.service_key),
        )
        headers = {"authorization": f"Bearer {self.key}"}
        connection.request("POST", route, msgspec.json.encode(request), headers)
        self.catch_up()
        return connection

    def catch_up(self) -> None:
        """Return when the ledger has read all earlier requests, the end of connections included."""
        for _ in range(2):
            self.status()

    # Cells

    def lease(
        self,
        cell: str = "cell-0",
        tickets: int = 8,
        held: list[TicketRef] | None = None,
        finished: list[TicketRef] | None = None,
        wait_s: float = 0.0,
        splits: tuple[TaskSplit, ...] = ("train", "valid"),
        job_start: int = 0,
    ) -> LeaseReply:
        capacity = tickets * self.episodes_per_ticket
        reported = held or [], finished or []
        request = LeaseRequest(cell, capacity, *reported, wait_s, job_start, splits)
        return self.call("/lease", request, LeaseReply)

    def grants(self, cell: str = "cell-0", tickets: int = 8) -> list[TicketGrant]:
        """Ask again as cells do while there is nothing for them, and return the grants."""
        deadline = Deadline(60.0)
        while not (granted := self.lease(cell, tickets, wait_s=1.0).grants):
            assert not deadline.is_over(), "nothing is granted"
        return granted

    def seal(
        self, refs: list[TicketRef], cell: str = "cell-0", oldest_version: int = NO_VERSION
    ) -> list[SealedTicket]:
        """Write a shard with an index line, as a proxy does before it settles."""
        name = f"{cell}-{self.shards:06d}.h5"
        self.shards += 1
        tickets = [
            ShardTicket(ref.ticket_id, ref.attempt, [2 * i, 2 * i + 1], [0.0, 1.0], oldest_version)
            for i, ref in enumerate(refs)
        ]
        shard = SealedShard(name, 100, "crc32:00000000", 2 * len(refs), 10, tickets)
        append_to_index(self.paths.shard_index_dir, shard)
        return shard.list_sealed_tickets()

    def settle(self, tickets: list[SealedTicket], cell: str = "cell-0") -> None:
        shards = dict.fromkeys(ticket.shard for ticket in tickets)
        self.order("/settle", SettleShardsRequest(cell, [*shards]))

    def report(self, ref: TicketRef, *rewards: float) -> None:
        request = EvaluationResultRequest("cell-0", ref, list(rewards))
        self.order("/report_evaluation", request)

    def drop(self, ref: TicketRef, reason: str) -> None:
        self.order("/drop", DropTicketRequest("cell-0", ref, reason))

    # The trainer

    def open_generation(
        self, generation: int = 1, base_step: int = 0, evaluated_step: int = -1
    ) -> None:
        self.paths.generations_dir.mkdir(exist_ok=True)
        get_number_path(self.paths.generations_dir, generation).touch()
        request = OpenTrainerGenerationRequest(generation, base_step, evaluated_step)
        self.order("/open_generation", request)

    def batch(self, step: int, generation: int = 1, wait_s: float = 0.0) -> BatchReply:
        return self.call("/batch", BatchRequest(generation, step, wait_s), BatchReply)

    def form_batch(self, step: int) -> BatchManifest:
        """Form the batch of all granted, sealed and settled tickets."""
        self.settle(self.seal([grant.ref for grant in self.grants()]))
        manifest = self.batch(step).manifest
        assert manifest is not None
        return manifest

    def evaluate(self, step: int, n_tasks: int, generation: int = 1) -> EvaluateReply:
        return self.evaluate_sets(step, {"valid": n_tasks}, generation)

    def evaluate_sets(self, step: int, sets: dict[str, int], generation: int = 1) -> EvaluateReply:
        request = EvaluateRequest(generation, step, sets, 0.0)
        return self.call("/evaluate", request, EvaluateReply)

    def get_reward(self, step: int, n_tasks: int, generation: int = 1) -> float | None:
        """Return the mean reward of the set `valid`, or None before all its tasks are done."""
        row = self.evaluate(step, n_tasks, generation).metrics
        return None if row is None else row[VALIDATION_REWARD_METRIC]

    def publish(self, step: int, generation: int = 1) -> None:
        self.order("/publish", WeightsPublishedRequest(generation, step))

    def status(self) -> LedgerStatus:
        return self.call("/status", Empty(), LedgerStatus)


StartLedger = Callable[..., LedgerProcess]
"""Starter of a ledger with the given settings, which ends with the test."""
