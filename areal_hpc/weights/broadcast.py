"""Broadcast transport: buckets through process groups; `update.py` has the steps of an update."""

import itertools
import time
from collections.abc import Callable, Sequence, Set
from concurrent.futures import Future
from typing import Any

import torch

from areal_hpc.errors import WeightSyncError
from areal_hpc.jobs.node import get_advertised_host
from areal_hpc.metrics.step_metrics import PhaseTimer
from areal_hpc.recipe.sections.inference import DEFAULT_MAX_NCCL_GROUPS, WeightsConfig
from areal_hpc.weights.buckets import (
    OpenBucket,
    PackingBuffers,
    WaitSent,
    send_buckets,
)
from areal_hpc.weights.process_group import (
    UpdateProcessGroup,
    exempt_later_groups_from_nccl_watchdog,
)
from areal_hpc.weights.replicas import ReplicaClient, ReplicaKey
from areal_hpc.weights.update import Transport, Update, UpdateRequest, UpdateSession, log
from areal_hpc.wire.fault_points import fault_point
from areal_hpc.wire.replicas import FenceReplicaRequest
from areal_hpc.wire.weight_version import WeightVersion

_GROUP_SERIAL_NUMBERS = itertools.count()
"""Serial numbers in group names: torch accepts no name twice in the life of a process."""


class BroadcastSession(UpdateSession):
    """Replicas of one update group, and the process group that they share over several updates."""

    def __init__(
        self,
        group: UpdateProcessGroup,
        replica_clients: Sequence[ReplicaClient],
        config: WeightsConfig,
    ) -> None:
        super().__init__(replica_clients, config, group.name)
        self._group = group
        self._first_ranks = [*itertools.accumulate((key.tp for key in self.keys), initial=1)]
        """First rank of each member, starting after the trainer's; then the size of the group."""
        self._loading: list[Future[float]] = []
        """Per member, time at which it finished loading the bucket that was sent last."""
        self._sent_at = 0.0

    def form_group(self) -> None:
        """Form the process group: this rank first, then the ranks of each replica in order."""
        self._call_all(lambda member: member.post("fence", FenceReplicaRequest()))
        group = self._group
        body = {
            "master_address": group.host,
            "master_port": group.port,
            "world_size": group.world_size,
            "group_name": group.name,
            "backend": group.backend,
        }
        route = "init_weights_update_group"
        joining = [
            self._calls.submit(
                member.post_with_update_timeout, route, body | {"rank_offset": first}
            )
            for member, first in zip(self._members, self._first_ranks, strict=False)
        ]
        self._run_collective(joining, group.join)
        for call in joining:
            call.result()

    def pause(self) -> None:
        super().pause()
        self._loading = []
        self._call_all(lambda member: member.begin_update())

    def send_bucket(self, full_bucket: OpenBucket, version: WeightVersion | None) -> None:
        """Broadcast one bucket and wait until every member has loaded the previous one.

        A single member is called to receive while it still loads, so that it begins at once.
        Several members are not: one of them may receive this call before the call for the previous
        bucket.

        The bucket must not change before this returns. The last bucket carries `version`, which is
        complete with it.
        """

        def receive(replica_client: ReplicaClient) -> float:
            is_packed = full_bucket.flat is not None
            replica_client.load_bucket(
                full_bucket.bucket, self._group.name, version, packed=is_packed
            )
            return time.monotonic()

        if len(self._members) > 1:
            self._await_loaded()
        previous_loading = self._loading
        receiving = [self._calls.submit(receive, member) for member in self._members]
        self._run_collective(
            receiving,
            lambda refused: self._group.broadcast(
                full_bucket.tensors_to_send, lambda: refused() or _any_failed(previous_loading)
            ),
        )
        sent_at = time.monotonic()
        self._await_loaded()
        self._loading, self._sent_at = receiving, sent_at

    def _await_loaded(self) -> None:
        loaded_at = [call.result() for call in self._loading]
        self.load_s += max(0.0, max(loaded_at, default=0.0) - self._sent_at)
        self._loading = []

    def end_update(self) -> None:
        """Close the update session: the server completes the load."""
        fault_point("weights.before_end")
        self._await_loaded()
        began = time.monotonic()
        self._call_all(lambda member: member.post_with_update_timeout("end_weight_update"))
        self.load_s += time.monotonic() - began

    def close(self) -> None:
        """Leave in order: the members drop the group, then the trainer's end leaves it."""

        def leave(replica_client: ReplicaClient) -> bool:
            try:
                replica_client.post(
                    "destroy_weights_update_group", {"group_name": self._group.name}
                )
            except WeightSyncError as error:
                log.info("could not remove the replica from its process group: %s", error)
                return False
            return True

        if all([*self._calls.map(leave, self._members)]):
            self._group.close()
        else:
            self._group.abandon()  # an orderly leave could wait for the member
        self.close_clients()

    def abandon(self) -> None:
        """Leave at once; members that wait for bytes get an error instead."""
        self._group.abandon()
        self.close_clients()

    def abandon_fenced(self) -> None:
        self._group.abandon()
        super().abandon_fenced()

    def _run_collective(
        self, calls: Sequence[Future[Any]], own_part: Callable[[Callable[[], bool]], None]
    ) -> None:
        """Take this rank's part in a collective while calls make the members take theirs.

        The error names the members that refused or have not answered, with their ranks.
        """
        try:
            own_part(lambda: _any_failed(calls))
        except WeightSyncError as error:
            for call in self._loading:
                if _any_failed([call]):
                    call.result()
            missing: list[str] = []
            for member, call, first in zip(self._members, calls, self._first_ranks, strict=False):
                last = first + member.key.tp - 1
                ranks = f"rank {first}" if first == last else f"ranks {first}-{last}"
                if not call.done():
                    missing.append(f"{ranks}: {member.key} has not answered")
                    continue
                try:
                    call.result()
                except WeightSyncError as refusal:
                    missing.append(f"{ranks}: {refusal.problems[0].message}")
            raise WeightSyncError(
                f"{error.problems[0].message}: {'; '.join(missing) or 'all members answered'}",
                hint="read the logs of those cells in logs/latest",
            ) from error


def _any_failed(calls: Sequence[Future[Any]]) -> bool:
    return any(call.done() and call.exception() is not None for call in calls)


class BroadcastTransport(Transport[BroadcastSession]):
    """Transport that keeps the process groups of healthy replicas from one update to the next."""

    def __init__(
        self, config: WeightsConfig, service_key: str, device: torch.device, backend: str
    ) -> None:
        super().__init__(config, service_key, device)
        self._backend = backend
        if backend != "gloo":
            exempt_later_groups_from_nccl_watchdog()
        self._open_bucket = (
            OpenBucket
            if sends_tensors_unpacked(backend, config.replicas_per_group or 1)
            else PackingBuffers(device).open_bucket_in_older_buffer
        )
        self._sessions: dict[tuple[ReplicaKey, ...], BroadcastSession] = {}
        self._suspects: set[tuple[str, int]] = set()

    def _transfer(
        self, update: Update[BroadcastSession], request: UpdateRequest, timer: PhaseTimer
    ) -> None:
        last = request.buckets[-1] if request.buckets else None

        def ship(full_bucket: OpenBucket) -> WaitSent:
            complete = request.version if full_bucket.bucket is last else None
            return update.start_step(
                "send", lambda session: session.send_bucket(full_bucket, complete)
            )

        with timer.time_phase("group_join"):
            self._form_groups(update, request)
        with timer.time_phase("pause_call"):
            update.run_step("pause", lambda session: session.pause())
        with timer.time_phase("transfer"):
            send_buckets(
                request.buckets,
                request.arrivals,
                self._open_bucket,
                ship,
            )
            update.run_step("end", lambda session: session.end_update())
        load_s = max((session.load_s for session in update.live), default=0.0)  # slowest session
        transfer_s = max(0.0, timer.seconds["transfer"] - load_s)  # they may overlap
        timer.seconds |= {"transfer": transfer_s, "load": load_s}

    def _form_groups(self, update: Update[BroadcastSession], request: UpdateRequest) -> None:
        size = self._config.replicas_per_group or choose_group_size(
            self._backend, len(request.replicas)
        )
        groups = partition_replicas(request.replicas, size, self._suspects)
        replica_ids = {key.cell_and_index for key in request.replicas}
        self._suspects -= replica_ids  # from now on this update judges them
        for keys in [*self._sessions]:
            if keys not in groups and any(key.cell_and_index in replica_ids for key in keys):
                self._sessions.pop(keys).abandon()  # a member restarted or is grouped anew
        existing: list[BroadcastSession] = []
        for keys in groups:
            if keys in self._sessions:
                existing.append(self._sessions.pop(keys))
            else:
                update.live.append(self._new_session(request.version, keys))
        update.run_step("join", lambda session: session.form_group())
        update.live += existing

    def _new_session(
        self, version: WeightVersion, keys: tuple[ReplicaKey, ...]
    ) -> BroadcastSession:
        members = "+".join(f"{key.cell}.{key.index}.{key.incarnation}" for key in keys)
        group = UpdateProcessGroup(
            f"generation{version.generation}/{members}/{next(_GROUP_SERIAL_NUMBERS)}",
            get_advertised_host(),
            1 + sum(key.tp for key in keys),
            self._backend,
            self._config.update_timeout_s,
        )
        return BroadcastSession(
            group, [self._build_replica_client(key, version) for key in keys], self._config
        )

    def _finish_update(self, update: Update[BroadcastSession]) -> None:
        self._sessions.update({session.keys: session for session in update.live})
        self._suspects |= {key.cell_and_index for key in update.failed}

    def close(self) -> None:
        """Leave all groups."""
        for closing in [self._pool.submit(session.close) for session in self._sessions.values()]:
            closing.result()
        self._sessions.clear()
        super().close()


def sends_tensors_unpacked(backend: str, replicas_per_group: int) -> bool:
    """Return whether each parameter is sent as one message, rather than packed into a bucket.

    For gloo a copy is a third of the work of sending; NCCL copies at no cost and pays per message.
    But when a member of a group dies, gloo may keep another member waiting for a message in
    transit for as long as torch's default deadline, and SGLang has all messages of a bucket in
    transit at once. A replica that is alone with a sender that dies is restarted anyway.
    """
    return backend == "gloo" and replicas_per_group == 1


def choose_group_size(backend: str, replicas: int) -> int:
    """Return the number of replicas per group for a recipe that sets none. Pure.

    The sender's link carries the weights once per group, which limits NCCL; within a group
    receivers forward them. Over gloo one member can make its whole group hang.
    """
    return 1 if backend == "gloo" else max(1, -(-replicas // DEFAULT_MAX_NCCL_GROUPS))


def partition_replicas(
    replicas: Sequence[ReplicaKey], size: int, suspect_replicas: Set[tuple[str, int]]
) -> list[tuple[ReplicaKey, ...]]:
    """Divide the replicas into groups of `size` neighbors; the last group may have fewer.

    Suspects are replicas whose last update failed. Each gets its own group: it may fail again.
    """
    ordered = sorted(replicas, key=lambda key: key.cell_and_index)
    trusted = [key for key in ordered if key.cell_and_index not in suspect_replicas]
    groups = [tuple(trusted[start : start + size]) for start in range(0, len(trusted), size)]
    return groups + [(key,) for key in ordered if key.cell_and_index in suspect_replicas]
