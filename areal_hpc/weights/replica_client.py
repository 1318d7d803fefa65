"""Client of one replica's control routes, with deadlines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import httpx
import msgspec

from areal_hpc.errors import WeightSyncError
from areal_hpc.weights import deadlines
from areal_hpc.weights.buckets.plan import BucketPlan
from areal_hpc.weights.report import ReplicaKey
from areal_hpc.wire.replicas import (
    DEADLINE_HEADER,
    GENERATION_HEADER,
    INCARNATION_HEADER,
    FenceRequest,
    LoadRequest,
    ReplicaView,
    ServeRequest,
)
from areal_hpc.wire.weight_version import WeightVersion

ReplyT = TypeVar("ReplyT")


class _WeightVersionInfo(msgspec.Struct):
    weight_version: str


class _Parallelism(msgspec.Struct):
    tp_rank: int


class _RankChecksums(msgspec.Struct):
    checksums: dict[str, str]
    parallelism_info: list[_Parallelism]


class _CheckReply(msgspec.Struct):
    ranks: list[_RankChecksums]


class ReplicaClient:
    """One replica seen from the trainer.

    All methods raise WeightSyncError, naming the replica, when the replica refuses, has been
    restarted, or does not answer within the deadline.
    """

    def __init__(
        self, key: ReplicaKey, admin_key: str, generation: int, update_timeout_s: float
    ) -> None:
        self.key = key
        self._client = httpx.Client(
            base_url=f"{key.control_url}/replicas/{key.index}",
            headers={
                "Authorization": f"Bearer {admin_key}",
                INCARNATION_HEADER: str(key.incarnation),
                GENERATION_HEADER: str(generation),
                DEADLINE_HEADER: str(deadlines.get_sender_timeout_s(update_timeout_s)),
            },
            trust_env=False,
        )
        self._update_timeout_s = update_timeout_s
        self._prompt_s = deadlines.get_control_deadline_s(update_timeout_s)

    def fence(self) -> None:
        """Take the replica out of service. A stuck SGLang, which is not asked, is fenced too."""
        self._decode(self._post("fence", FenceRequest(), self._prompt_s), ReplicaView)

    def give_up(self) -> None:
        """Keep the replica out of service until another update, or its restart."""
        self._post("fence", FenceRequest(stays=True), min(deadlines.GIVE_UP_S, self._prompt_s))

    def pause(self, mode: str) -> None:
        """Stop generation; requests stay and new ones wait."""
        self._post("pause_generation", {"mode": mode}, self._prompt_s)

    def resume(self) -> None:
        """Let requests go on."""
        self._post("continue_generation", {}, self._prompt_s)

    def begin(self) -> None:
        """Open an update session; one left open by a sender that vanished is closed first."""
        if not self._accepts("begin_weight_update"):
            self._post("end_weight_update", {}, self._prompt_s)
            self._post("begin_weight_update", {}, self._prompt_s)

    def end(self) -> None:
        """Close the update session."""
        self._post("end_weight_update", {})

    def join_group(
        self, name: str, host: str, port: int, rank_offset: int, world_size: int, backend: str
    ) -> None:
        """Join an update group. Returns when all of its ranks are there."""
        self._post(
            "init_weights_update_group",
            {
                "master_address": host,
                "master_port": port,
                "rank_offset": rank_offset,
                "world_size": world_size,
                "group_name": name,
                "backend": backend,
            },
        )

    def leave_group(self, name: str) -> None:
        """Forget an update group."""
        self._post("destroy_weights_update_group", {"group_name": name}, self._prompt_s)

    def receive(
        self, bucket: BucketPlan, group_name: str, version: WeightVersion | None, *, packed: bool
    ) -> None:
        """Receive and load one bucket. Returns when it is loaded.

        Args:
            bucket: What is about to be broadcast.
            group_name: The update group it comes through.
            packed: It is one message; else each of its parameters is.
            version: Set with the last bucket: tokens sampled from now on carry it.
        """
        specs = [slot.spec for slot in bucket.slots]
        self._post(
            "update_weights_from_distributed",
            {
                "names": [spec.name for spec in specs],
                "dtypes": [spec.dtype for spec in specs],
                "shapes": [spec.shape for spec in specs],
                "group_name": group_name,
                "load_format": "flattened_bucket" if packed else None,
                "flush_cache": False,  # once, when all weights are there
                "weight_version": str(version) if version else None,
            },
        )

    def load(self, folder: str, version: WeightVersion) -> None:
        """Load all weights from a folder of the run's shared storage.

        Args:
            folder: Its name.
            version: Tokens sampled from now on carry it.
        """
        self._post("load", LoadRequest(folder, str(version)))

    def weight_version(self) -> str:
        """The version the server stamps on tokens."""
        return self._decode(
            self._post("model_info", {}, self._prompt_s), _WeightVersionInfo
        ).weight_version

    def checksums(self) -> Sequence[tuple[int, dict[str, str]]]:
        """(tensor-parallel rank, hash by tensor name) of everything the server holds."""
        reply = self._decode(self._post("weights_checker", {"action": "checksum"}), _CheckReply)
        return [(rank.parallelism_info[0].tp_rank, rank.checksums) for rank in reply.ranks]

    def flush(self) -> None:
        """Drop the KV cache that the old weights filled."""
        self._post("flush_cache", {}, self._prompt_s)

    def serve(self, version: WeightVersion) -> None:
        """Open the replica to agents."""
        request = ServeRequest(str(version))
        self._decode(self._post("serve", request, self._prompt_s), ReplicaView)

    def close(self) -> None:
        """Close pooled connections."""
        self._client.close()

    def _post(self, route: str, body: object, timeout_s: float | None = None) -> bytes:
        answer = self._send(route, body, timeout_s)
        if answer.status_code >= 400:
            raise WeightSyncError(
                f"{self.key} answered {route} with {answer.status_code}: {answer.text[:500]}"
            )
        return answer.content

    def _accepts(self, route: str) -> bool:
        return self._send(route, {}, self._prompt_s).status_code < 400

    def _send(self, route: str, body: object, timeout_s: float | None) -> httpx.Response:
        timeout_s = timeout_s or self._update_timeout_s
        connect_s = min(deadlines.CONNECT_S, timeout_s)
        try:
            return self._client.post(
                f"/{route}",
                content=msgspec.json.encode(body),
                timeout=httpx.Timeout(timeout_s, connect=connect_s),
            )
        except httpx.HTTPError as error:
            late = f" within {timeout_s:.0f} s" if isinstance(error, httpx.ReadTimeout) else ""
            raise WeightSyncError(
                f"{self.key} did not answer {route}{late} ({type(error).__name__}: {error})",
                hint="read that cell's log in logs/latest",
            ) from error

    def _decode(self, body: bytes, reply: type[ReplyT]) -> ReplyT:
        try:
            return msgspec.json.decode(body, type=reply)
        except msgspec.DecodeError as error:
            raise WeightSyncError(f"{self.key} sent invalid JSON: {error}") from error
