"""Update of all replicas step by step, in groups that fail independently.

    join -> pause -> (send each bucket) -> end -> verify -> flush -> resume     by broadcast
            pause -> load                      -> verify -> flush -> resume     from disk

Generations in progress stop at the pause and continue under the new weights.

The first call of every update fences a replica, so that whichever step raises, the replicas of
the group are out of service. If no sender returns in time, the cell restarts the replicas whose
weights had begun to change and lets the others continue.
"""

import logging
import math
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Generic, TypeVar

import numpy as np
import torch

from areal_hpc.errors import WeightSyncError
from areal_hpc.metrics.step_metrics import PhaseTimer
from areal_hpc.recipe.sections.inference import WeightsConfig
from areal_hpc.weights.buckets import BucketPlan, TensorSpec, get_bucket_bytes, plan_buckets
from areal_hpc.weights.replicas import ReplicaClient, ReplicaKey, get_group_step_timeout_s
from areal_hpc.wire.replicas import FenceReplicaRequest, ReopenReplicaRequest
from areal_hpc.wire.weight_version import WeightVersion

log = logging.getLogger(__name__)

_MAX_CONCURRENT_GROUPS = 1024
"""Threads, one per group, made when needed: a group that hangs must not delay others."""


PROBE_TOKENS = 100
PROBE_GAP_KEY = "weights.max_probe_gap"
MAX_GAP_BY_DTYPE = {"float64": 1e-3, "float32": 1e-3, "bfloat16": 0.25, "float16": 0.25}
"""Default of `weights.max_probe_gap`, by type sent. With equal weights, 2e-6 (float32) and
0.04 (bfloat16) were measured on CPUs, over up to 28 layers; GPUs may round float32 to TF32."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A prompt and the trainer's log-probabilities of its tokens after the first.

    A replica proves new weights by scoring it with equal results. A wrong bucket changes the score
    of nearly every token. The proof cannot detect what rounding hides, such as low mantissa bits,
    nor embedding rows of tokens that are not in the prompt.
    """

    input_ids: list[int]
    logprobs: list[float]


def choose_probe_ids(vocab: int) -> list[int]:
    """Choose a prompt from the middle of a vocabulary: special tokens are at its ends."""
    middle = range(vocab // 10, max(vocab // 10 + 1, vocab * 8 // 10))
    return random.Random(0).choices(middle, k=PROBE_TOKENS)


def get_max_probe_gap(config: WeightsConfig, specs: Sequence[TensorSpec]) -> float:
    """Return the largest gap that is accepted for weights sent in these types."""
    if config.max_probe_gap is not None:
        return config.max_probe_gap
    return max(MAX_GAP_BY_DTYPE[spec.dtype] for spec in specs)


def check_probe(
    probe: Probe, replica_logprobs: Sequence[float], max_gap: float, replica: object
) -> None:
    """Compare a replica's log-probabilities with the trainer's, as far as the replica scored."""
    scored = len(replica_logprobs)
    if not scored:
        raise WeightSyncError(f"{replica}: expected log-probabilities of a prompt, got none")
    gap = float(np.abs(np.subtract(probe.logprobs[:scored], replica_logprobs)).mean())
    if not gap <= max_gap:
        hint = "the weights are sent again"
        if not all(map(math.isfinite, probe.logprobs)):
            hint = "the trainer's own are no numbers: its weights are broken, resume earlier"
        raise WeightSyncError(
            f"{replica}: log-probabilities of {scored} tokens differ from the trainer's by "
            f"{gap:.2g} on average, at most {max_gap:g} is rounding",
            key=PROBE_GAP_KEY,
            hint=hint,
        )


class UpdateSession:
    """Replicas that take the steps of an update together.

    Every method raises WeightSyncError when a member fails or a deadline passes; the session can
    then only be abandoned.
    """

    def __init__(
        self, replica_clients: Sequence[ReplicaClient], config: WeightsConfig, update_name: str
    ) -> None:
        self._members = replica_clients
        self._config = config
        self.keys = tuple(member.key for member in replica_clients)
        self.load_s = 0.0
        """Seconds of this update in which the members loaded received weights."""
        self._calls = ThreadPoolExecutor(
            2 * len(replica_clients), thread_name_prefix=f"update-{update_name}"
        )

    def pause(self) -> None:
        """Fence the replicas, then stop generation: running requests stay, new ones wait."""
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
            logprobs = replica_client.score(probe.input_ids)
            check_probe(probe, logprobs, max_gap, replica_client.key)

        self._call_all(check)

    def flush_caches(self) -> None:
        if self._config.pause_mode != "in_place":
            self._call_all(lambda member: member.post("flush_cache"))

    def resume(self, version: WeightVersion) -> None:
        """Continue generation under the new weights and open the replicas to agents."""

        def resume(replica_client: ReplicaClient) -> None:
            replica_client.post("continue_generation")
            replica_client.post("serve", ReopenReplicaRequest(str(version)))

        self._call_all(resume)

    def abandon_fenced(self) -> None:
        """Leave at once, and keep the members out of service until another update."""

        def fence(replica_client: ReplicaClient) -> None:
            try:
                replica_client.fence_for_update()
            except WeightSyncError as error:
                log.info("could not tell the replica that the update was abandoned: %s", error)

        with ThreadPoolExecutor(len(self._members)) as calls:  # threads of `_calls` may be stuck
            calls.map(fence, self._members)
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


class Update(Generic[SessionT]):
    """One running update: the groups that still take part, and the failures of the others.

    `pool` has a thread per group. A group that takes longer than `step_s` for a step is dropped.
    """

    def __init__(self, pool: ThreadPoolExecutor, step_s: float) -> None:
        self._pool = pool
        self._step_s = step_s
        self.live: list[SessionT] = []
        self.failed: dict[ReplicaKey, WeightSyncError] = {}

    def run_step(self, step_name: str, step: SessionStep[SessionT]) -> None:
        """Take one step with all groups; fence and drop each group that fails."""
        self.start_step(step_name, step)()

    def start_step(self, step_name: str, step: SessionStep[SessionT]) -> Callable[[], None]:
        """Begin one step as in `run_step`; return a function that waits for its end."""
        ends_at = time.monotonic() + self._step_s
        steps = [(session, self._pool.submit(step, session)) for session in self.live]

        def wait_for_step() -> None:
            failures: dict[SessionT, WeightSyncError] = {}
            for session, future in steps:
                try:
                    future.result(max(0.0, ends_at - time.monotonic()))
                except TimeoutError:
                    late = f"{step_name} took longer than {self._step_s:g} s"
                    failures[session] = WeightSyncError(late)
                except WeightSyncError as error:
                    failures[session] = error
                except Exception as error:  # boundary: a failing group must not stop the others
                    log.exception("%s failed for a group of replicas", step_name)
                    failures[session] = WeightSyncError(f"{step_name} failed: {error!r}")
            self._drop_sessions(failures)

        return wait_for_step

    def fail_all_sessions(self) -> None:
        self._drop_sessions(
            {session: WeightSyncError("the sender failed") for session in self.live}
        )

    def _drop_sessions(self, failures: Mapping[SessionT, WeightSyncError]) -> None:
        for session, error in failures.items():
            log.warning("excluded from this update: %s", error)
            self.live.remove(session)
            for key in session.keys:
                self.failed[key] = WeightSyncError(f"{key} did not receive the update: {error}")
        # In parallel: each notice may take seconds, and the groups that continue wait for it.
        for future in [self._pool.submit(session.abandon_fenced) for session in failures]:
            future.result()


@dataclass(frozen=True, slots=True)
class UpdateReport:
    version: WeightVersion
    ok: tuple[ReplicaKey, ...]
    """Replicas that are verified and open to agents."""
    failed: dict[ReplicaKey, str]
    """Reason by replica; these stay out of service, and the next discovery returns them again."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time of the phases, see docs/weights.md; sampling stops from `pause_call` on."""


@dataclass(frozen=True, slots=True)
class UpdateRequest:
    version: WeightVersion
    buckets: Sequence[BucketPlan]
    arrivals: Iterator[tuple[str, torch.Tensor]]
    replicas: Sequence[ReplicaKey]


class Transport(ABC, Generic[SessionT]):
    """Means of bringing versions of the weights to replicas.

    Args:
        device: Device on which buckets are packed; must suit the replicas' backend.
    """

    def __init__(self, config: WeightsConfig, service_key: str, device: torch.device) -> None:
        self._config = config
        self._service_key = service_key
        self._bucket_bytes = get_bucket_bytes(config.bucket_bytes, device.type)
        # All updates have the same specs.
        self._plan_buckets = lru_cache(maxsize=1)(plan_buckets)
        self._pool = ThreadPoolExecutor(_MAX_CONCURRENT_GROUPS, thread_name_prefix="publisher")

    def update(
        self,
        version: WeightVersion,
        specs: Sequence[TensorSpec],
        parameters: Iterable[tuple[str, torch.Tensor]],
        replicas: Sequence[ReplicaKey],
        probe: Probe,
    ) -> UpdateReport:
        """Send `version` to `replicas`, verify it there and put them into service.

        Generations in progress stop and continue under the new weights. A replica that fails
        takes only its own group out of service; the others proceed.

        Args:
            version: Version of tokens sampled from now on.
            specs: All parameters with Hugging Face names, in the order of `parameters` and in the
                dtype that the replicas serve, without a tied output embedding.
            parameters: Consumed exactly once and to the end, even after a failure: exporting is a
                collective on all trainer ranks.
            replicas: Result of `Publisher.discover_outdated_training_replicas`.
            probe: Prompt and log-probabilities that the replicas must reproduce.
        """
        arrivals = iter(parameters)
        timer = PhaseTimer()
        update: Update[SessionT] = Update(
            self._pool, get_group_step_timeout_s(self._config.update_timeout_s)
        )
        try:
            buckets = self._plan_buckets(tuple(specs), self._bucket_bytes)
            max_gap = get_max_probe_gap(self._config, specs)
            self._transfer(update, UpdateRequest(version, buckets, arrivals, replicas), timer)
            with timer.time_phase("verify"):
                update.run_step("verify", lambda group: group.verify(version, probe, max_gap))
            with timer.time_phase("flush"):
                update.run_step("flush", lambda group: group.flush_caches())
            with timer.time_phase("resume"):
                update.run_step("resume", lambda group: group.resume(version))
        except BaseException:  # boundary: whatever stops the sender, no replica may wait for it
            update.fail_all_sessions()
            raise
        finally:
            for _ in arrivals:
                pass
        self._finish_update(update)
        return UpdateReport(
            version,
            ok=tuple(key for session in update.live for key in session.keys),
            failed={key: str(error) for key, error in update.failed.items()},
            seconds={name: round(spent, 6) for name, spent in timer.seconds.items()},
        )

    @abstractmethod
    def _transfer(
        self, update: Update[SessionT], request: UpdateRequest, timer: PhaseTimer
    ) -> None:
        """Pause the replicas and load the weights there."""

    @abstractmethod
    def _finish_update(self, update: Update[SessionT]) -> None:
        """Keep only what later updates can use."""

    def _build_replica_client(self, key: ReplicaKey, version: WeightVersion) -> ReplicaClient:
        return ReplicaClient(
            key,
            self._service_key,
            version.generation,
            self._config.update_timeout_s,
            self._config.senders or 1,
        )

    def close(self) -> None:
        """Close the transport; replicas continue to serve their weights."""
        self._pool.shutdown(wait=False, cancel_futures=True)
