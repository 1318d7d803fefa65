"""Hashes of the buckets of one update, taken when they hold nobody up."""

from collections import deque
from collections.abc import Iterable, Sequence

from areal_hpc.weights.buckets.bucket import OpenBucket
from areal_hpc.weights.buckets.plan import BucketPlan
from areal_hpc.weights.checksum import AcceptableHashesByTensor, compute_non_expert_rank_digests
from areal_hpc.weights.expert_hashes import StackedExpertHashes

DigestsByTpSizeAndRank = dict[tuple[int, int], AcceptableHashesByTensor]
"""What replicas must hold, by (tensor-parallel size, rank)."""
_MAX_HELD_BYTES = 2 * 2**30
"""Of parameters that are sent from where they are, kept until they are hashed."""


class BucketDigester:
    """What the replicas must report after an update.

    SHA-256, which replicas on CPUs report, takes longer than sending. A bucket that nobody will
    overwrite is hashed after the last one has left, while the replicas do the same, as long as the
    buckets that wait are small. One in a packing buffer is hashed at once: on a GPU that is quick.
    """

    def __init__(
        self,
        buckets: Sequence[BucketPlan],
        tp_sizes: Iterable[int],
        replica_device: str,
        max_held_bytes: int = _MAX_HELD_BYTES,
    ) -> None:
        specs = [slot.spec for bucket in buckets for slot in bucket.slots]
        self._expected: DigestsByTpSizeAndRank = {
            (tp, rank): {} for tp in tp_sizes for rank in range(tp)
        }
        self._experts = {
            (tp, rank): StackedExpertHashes(specs, rank, tp, replica_device)
            for tp, rank in self._expected
        }
        self._replica_device = replica_device
        self._max_held_bytes = max_held_bytes
        self._held: deque[OpenBucket] = deque()
        self._held_bytes = 0

    def add(self, full_bucket: OpenBucket) -> None:
        """Take a full bucket in; its parameters must not change before `finish` returns."""
        self._held.append(full_bucket)
        self._held_bytes += full_bucket.bucket.size_bytes
        while self._held and (
            full_bucket.flat is not None or self._held_bytes > self._max_held_bytes
        ):
            self._hash_oldest()

    def finish(self) -> DigestsByTpSizeAndRank:
        """Hashes of all buckets."""
        while self._held:
            self._hash_oldest()
        for key, experts in self._experts.items():
            self._expected[key].update(experts.finish())
        return self._expected

    def _hash_oldest(self) -> None:
        full = self._held.popleft()
        self._held_bytes -= full.bucket.size_bytes
        for (tp, rank), digests in self._expected.items():
            digests.update(
                compute_non_expert_rank_digests(full.tensors, rank, tp, self._replica_device)
            )
            self._experts[tp, rank].add(full.tensors)
