"""Replicas as the trainer identifies them, and HTTP calls to one through its cell's control proxy.

All deadlines of an update follow from `weights.update_timeout_s`: the longest wait for weights.
"""

import math
from dataclasses import dataclass
from typing import TypeVar

import httpx
import msgspec

from areal_hpc.errors import WeightSyncError
from areal_hpc.rundir.rendezvous import (
    derive_bearer_key,
    format_control_proxy_name,
    make_client_tls,
)
from areal_hpc.weights.buckets import BucketPlan
from areal_hpc.wire.decoding import decode_json
from areal_hpc.wire.replicas import (
    INCARNATION_HEADER,
    SENDER_TIMEOUT_HEADER,
    TRAINER_GENERATION_HEADER,
    FenceReplicaRequest,
    ReplicaView,
    ScorePromptRequest,
)
from areal_hpc.wire.weight_version import WeightVersion


@dataclass(frozen=True, slots=True)
class ReplicaKey:
    """Identity of one start of an SGLang server; a restart of it or its control proxy alters it."""

    cell: str
    index: int
    incarnation: int
    tp: int
    """Ranks that the replica adds to an update group."""
    control_url: str
    control_started_at: float

    @property
    def cell_and_index(self) -> tuple[str, int]:
        return self.cell, self.index

    def __str__(self) -> str:
        return f"replica {self.index} of {self.cell} (incarnation {self.incarnation})"


DiscoveredReplicas = list[tuple[ReplicaKey, ReplicaView]]
ReplyT = TypeVar("ReplyT")

CONNECT_TIMEOUT_S = 5.0
"""Time limit of a connection: a control proxy accepts it at once, whatever its servers do."""
FENCE_NOTICE_TIMEOUT_S = 2.0
"""Time limit of the one notice to a replica that failed an update; most cannot receive it."""
CONTROL_TIMEOUT_S = 30.0
"""Upper limit for a call that moves no weights."""


def get_group_step_timeout_s(update_timeout_s: float) -> float:
    """Return how long a group may take for one step of an update, while the other groups wait.

    This is longer than any single wait, so that the error reports which wait failed.
    """
    return update_timeout_s + CONNECT_TIMEOUT_S


def get_sender_silence_limit_s(update_timeout_s: float, senders: int = 1) -> float:
    """Return how long a live sender may send nothing to a replica: the deadline that cells enforce.

    A replica that has finished a step waits until the slowest group has finished or was excluded,
    and until excluded replicas were notified: connecting and the reply may each take
    `FENCE_NOTICE_TIMEOUT_S`. Gathering and packing the next bucket may take as long as sending
    one. Several senders gather together, each after its groups have joined and paused: a replica
    then waits for both steps of another sender.
    """
    step_s = get_group_step_timeout_s(update_timeout_s) + 2 * FENCE_NOTICE_TIMEOUT_S
    return step_s * min(senders, 2) + update_timeout_s


class _WeightVersionInfo(msgspec.Struct):
    weight_version: str


class _ScoredPrompt(msgspec.Struct):
    input_token_logprobs: list[tuple[float | None, int, str | None]]
    """Log-probability (None for the first token), id and text of each token."""


class _ScoreReply(msgspec.Struct):
    meta_info: _ScoredPrompt


class ReplicaClient:
    """HTTP client of one replica.

    All methods raise WeightSyncError, naming the replica, when it refuses, has been restarted, or
    does not answer within the deadline.
    """

    def __init__(
        self,
        key: ReplicaKey,
        service_key: str,
        generation: int,
        update_timeout_s: float,
        senders: int = 1,
    ) -> None:
        self.key = key
        bearer_key = derive_bearer_key(service_key, format_control_proxy_name(key.cell))
        self._client = httpx.Client(
            base_url=f"{key.control_url}/replicas/{key.index}",
            headers={
                "Authorization": f"Bearer {bearer_key}",
                INCARNATION_HEADER: str(key.incarnation),
                TRAINER_GENERATION_HEADER: str(generation),
                SENDER_TIMEOUT_HEADER: str(get_sender_silence_limit_s(update_timeout_s, senders)),
            },
            verify=make_client_tls(service_key),
            trust_env=False,
        )
        self._update_timeout_s = update_timeout_s
        self._control_s = min(CONTROL_TIMEOUT_S, update_timeout_s)

    def fence_for_update(self) -> None:
        self.post(
            "fence", FenceReplicaRequest(stays=True), min(FENCE_NOTICE_TIMEOUT_S, self._control_s)
        )

    def begin_update(self) -> None:
        if self._send_request("begin_weight_update", None, self._control_s).status_code >= 400:
            self.post("end_weight_update")
            self.post("begin_weight_update")

    def load_bucket(
        self, bucket: BucketPlan, group_name: str, version: WeightVersion | None, *, packed: bool
    ) -> None:
        """Have the replica receive and load one bucket. Return when it is loaded.

        Args:
            bucket: Parameters that are about to be broadcast.
            group_name: Update group of the broadcast.
            version: Set with the last bucket: the version of tokens sampled from now on.
            packed: Whether the bucket is one message, rather than one per parameter.
        """
        specs = bucket.specs
        self.post_with_update_timeout(
            "update_weights_from_distributed",
            {
                "names": [spec.name for spec in specs],
                "dtypes": [spec.dtype for spec in specs],
                "shapes": [spec.shape for spec in specs],
                "group_name": group_name,
                "load_format": "flattened_bucket" if packed else None,
                "flush_cache": False,  # once, after all weights have arrived
                "weight_version": str(version) if version else None,
            },
        )

    def fetch_weight_version(self) -> str:
        return self._decode_reply(self.post("model_info"), _WeightVersionInfo).weight_version

    def score(self, input_ids: list[int]) -> list[float]:
        """Return log-probabilities of a prompt's tokens but the first, as many as fit there."""
        reply = self.post_with_update_timeout("score", ScorePromptRequest(input_ids))
        entries = self._decode_reply(reply, _ScoreReply).meta_info.input_token_logprobs
        return [math.nan if logprob is None else logprob for logprob, _, _ in entries[1:]]

    def close(self) -> None:
        self._client.close()

    def post(self, route: str, body: object = None, timeout_s: float | None = None) -> bytes:
        """Call a route of `wire.replicas`; without `timeout_s`, one that moves no weights."""
        response = self._send_request(route, body, timeout_s or self._control_s)
        if response.status_code >= 400:
            raise WeightSyncError(
                f"{self.key} answered {route} with {response.status_code}: {response.text[:500]}"
            )
        return response.content

    def post_with_update_timeout(self, route: str, body: object = None) -> bytes:
        return self.post(route, body, self._update_timeout_s)

    def _send_request(self, route: str, body: object, timeout_s: float) -> httpx.Response:
        timeout = httpx.Timeout(timeout_s, connect=min(CONNECT_TIMEOUT_S, timeout_s))
        try:
            return self._client.post(
                f"/{route}", content=msgspec.json.encode(body or {}), timeout=timeout
            )
        except httpx.HTTPError as error:
            late = f" within {timeout_s:.0f} s" if isinstance(error, httpx.ReadTimeout) else ""
            raise WeightSyncError(
                f"{self.key} did not answer {route}{late} ({type(error).__name__}: {error})",
                hint="read that cell's log in logs/latest",
            ) from error

    def _decode_reply(self, body: bytes, reply: type[ReplyT]) -> ReplyT:
        try:
            return decode_json(body, reply)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise WeightSyncError(f"{self.key} sent invalid JSON: {error}") from error
