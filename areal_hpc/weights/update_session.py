"""Update of one replica group step by step, and of all groups, failures isolated per group.

    join -> pause -> (send each bucket) -> end -> verify -> flush -> resume     by broadcast
            pause -> load                      -> verify -> flush -> resume     from disk

Generations in flight stop at the pause and go on under the new weights.

A replica is fenced before anything else is asked of it, so whichever step raises, its group's
replicas are out of service. If no sender comes back in time, the cell restarts those whose
weights were begun to change and lets the others go on.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

from areal_hpc.errors import WeightSyncError
from areal_hpc.recipe.sections.weights import WeightsConfig
from areal_hpc.weights.discovery import ReplicaKey
from areal_hpc.weights.probe import Probe, check_probe
from areal_hpc.weights.replica_client import ReplicaClient
from areal_hpc.wire.replicas import FenceReplicaRequest, ReopenReplicaRequest
from areal_hpc.wire.weight_version import WeightVersion

log = logging.getLogger(__name__)


class UpdateSession:
    """Some replicas that take the steps of an update together.

    Every method raises WeightSyncError when a member fails or a deadline passes; the object is
    then of no more use but to be given up.
    """

    def __init__(
        self, replica_clients: Sequence[ReplicaClient], config: WeightsConfig, update_name: str
    ) -> None:
        self._members = replica_clients
        self._config = config
        self.keys = tuple(member.key for member in replica_clients)
        self.load_s = 0.0
        """Seconds of this update in which the members loaded what they had received."""
        self._calls = ThreadPoolExecutor(
            2 * len(replica_clients), thread_name_prefix=f"update-{update_name}"
        )

    def fence_and_pause_replicas(self) -> None:
        """Take the replicas out of service, then stop generation: requests stay, new ones wait."""
        self.load_s = 0.0
        self._call_all(lambda member: member.post("fence", FenceReplicaRequest()))
        mode = {"mode": self._config.pause_mode}
        self._call_all(lambda member: member.post("pause_generation", mode))

    def verify(self, version: WeightVersion, probe: Probe, max_gap: float) -> None:
        """Check that every member stamps `version` on tokens and scores the fixed prompt alike."""

        def check(replica_client: ReplicaClient) -> None:
            stamp = replica_client.fetch_weight_version()
            if stamp != str(version):
                raise WeightSyncError(
                    f"{replica_client.key}: expected version {version}, got {stamp!r}"
                )
            check_probe(probe, replica_client.score(probe.input_ids), max_gap)

        self._call_all(check)

    def flush_caches_unless_in_place(self) -> None:
        if self._config.pause_mode != "in_place":
            self._call_all(lambda member: member.post("flush_cache"))

    def resume_and_reopen_replicas(self, version: WeightVersion) -> None:
        """Let generation go on under the new weights and open the replicas to agents."""

        def resume(replica_client: ReplicaClient) -> None:
            replica_client.post("continue_generation")
            replica_client.post("serve", ReopenReplicaRequest(str(version)))

        self._call_all(resume)

    def abandon_and_fence(self) -> None:
        """Leave at once, and keep the members out of service until another update."""

        def give_up(replica_client: ReplicaClient) -> None:
            try:
                replica_client.fence_until_next_update()
            except WeightSyncError as error:
                log.info("could not tell the replica that the update was abandoned: %s", error)

        with ThreadPoolExecutor(len(self._members)) as calls:  # those of `_calls` may be stuck
            calls.map(give_up, self._members)
        self.close_clients()

    def close_clients(self) -> None:
        self._calls.shutdown(wait=False, cancel_futures=True)
        for member in self._members:
            member.close()

    def _call_all(self, call: Callable[[ReplicaClient], object]) -> None:
        for future in [self._calls.submit(call, member) for member in self._members]:
            future.result()


SessionT = TypeVar("SessionT", bound=UpdateSession)
SessionStep = Callable[[SessionT], None]


class UpdateInProgress(Generic[SessionT]):
    """One update under way: the groups that still take part, and why others do not.

    `pool` has a thread for each group. One that takes longer than `step_s` for a step drops out.
    """

    def __init__(self, pool: ThreadPoolExecutor, step_s: float) -> None:
        self._pool = pool
        self._step_s = step_s
        self.live: list[SessionT] = []
        self.failed: dict[ReplicaKey, WeightSyncError] = {}

    def run_step_dropping_failed_groups(self, step_name: str, step: SessionStep[SessionT]) -> None:
        self.start_step(step_name, step)()

    def start_step(self, step_name: str, step: SessionStep[SessionT]) -> Callable[[], None]:
        """Begin one step with all groups; the result waits until it is over.

        What fails is dropped, as by `run_step_dropping_failed_groups`.
        """
        ends_at = time.monotonic() + self._step_s
        steps = [(session, self._pool.submit(step, session)) for session in self.live]

        def settle() -> None:
            failures: dict[SessionT, WeightSyncError] = {}
            for session, future in steps:
                try:
                    future.result(max(0.0, ends_at - time.monotonic()))
                except TimeoutError:
                    late = f"{step_name} took longer than {self._step_s:g} s"
                    failures[session] = WeightSyncError(late)
                except WeightSyncError as error:
                    failures[session] = error
                except Exception as error:  # boundary: one group's trouble is not the others'
                    log.exception("%s failed for a group of replicas", step_name)
                    failures[session] = WeightSyncError(f"{step_name} failed: {error!r}")
            self._drop_and_fence_sessions(failures)

        return settle

    def fail_all_sessions(self) -> None:
        self._drop_and_fence_sessions(
            {session: WeightSyncError("the sender failed") for session in self.live}
        )

    def _drop_and_fence_sessions(self, failures: Mapping[SessionT, WeightSyncError]) -> None:
        for session, error in failures.items():
            log.warning("excluded from this update: %s", error)
            self.live.remove(session)
            for key in session.keys:
                self.failed[key] = WeightSyncError(f"{key} did not receive the update: {error}")
        # All at once: each may take seconds to be told, and the groups that go on wait.
        for future in [self._pool.submit(session.abandon_and_fence) for session in failures]:
            future.result()
