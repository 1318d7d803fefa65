"""Hashes of SGLang's stacked expert tensors.

A layer's experts lie in two of them: `w13_weight` has gate and up of one expert behind the other,
`w2_weight` the down projections; each cut over tensor-parallel ranks within every expert. Experts
arrive one by one, over several buckets, so they are hashed as they come.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping

import torch

from areal_hpc.errors import WeightSyncError
from areal_hpc.weights.buckets.plan import TensorSpec
from areal_hpc.weights.checksum import AcceptableHashesByTensor, SglangGpuHash, slice_for_rank

_EXPERT_PATTERN = re.compile(r"(.*\.experts\.)(\d+)\.(gate|up|down)_proj\.weight")


class StackedExpertHashes:
    """What one rank of a replica must report of its experts.

    Args:
        specs: All parameters of the update.
        tp_rank: Of the replica's ranks.
        tp: How many it has.
        replica_device: `cpu` or `cuda`, decides the kind of hash.
    """

    def __init__(
        self, specs: Iterable[TensorSpec], tp_rank: int, tp: int, replica_device: str
    ) -> None:
        self._tp_rank, self._tp = tp_rank, tp
        self._is_cpu = replica_device == "cpu"
        self._size_bytes: dict[str, int] = {}
        for spec in specs:
            if (place := _parse_expert_name(spec.name)) is not None:
                self._size_bytes[place[0]] = self._size_bytes.get(place[0], 0) + spec.size_bytes
        self._hashes: dict[str, _StreamedHash] = {}
        self._next: dict[str, tuple[int, int]] = {}

    def add(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take the experts of a bucket in.

        Raises:
            WeightSyncError: Those of a layer do not come in order.
        """
        places = {
            name: place for name in tensors if (place := _parse_expert_name(name)) is not None
        }
        for name, (stacked, expert, half) in sorted(places.items(), key=lambda one: one[1]):
            if (expert, half) != self._next.get(stacked, (0, 0)):
                due = self._next.get(stacked, (0, 0))[0]
                raise WeightSyncError(
                    f"expected expert {due} of {stacked}, got {name}",
                    hint="export the experts of a layer one after the other",
                )
            is_last_half = half == 1 or stacked.endswith("w2_weight")
            self._next[stacked] = (expert + 1, 0) if is_last_half else (expert, half + 1)
            dim = 1 if stacked.endswith("w2_weight") else 0
            part = slice_for_rank(tensors[name], dim, self._tp_rank, self._tp)
            if stacked not in self._hashes:
                size_bytes = self._size_bytes[stacked] // self._tp
                self._hashes[stacked] = _StreamedHash(size_bytes, is_cpu=self._is_cpu)
            self._hashes[stacked].update(part.contiguous().reshape(-1).view(torch.uint8))

    def finish(self) -> AcceptableHashesByTensor:
        return {name: frozenset([streamed.finish()]) for name, streamed in self._hashes.items()}


class _StreamedHash:
    def __init__(self, size_bytes: int, *, is_cpu: bool) -> None:
        self._digest = hashlib.sha256() if is_cpu else None
        self._gpu_hash = SglangGpuHash(size_bytes)

    def update(self, bytes_tensor: torch.Tensor) -> None:
        if self._digest is not None:
            self._digest.update(bytes_tensor.cpu().numpy().data)
        else:
            self._gpu_hash.update(bytes_tensor)

    def finish(self) -> str:
        if self._digest is not None:
            return self._digest.hexdigest()[:16]
        return f"{self._gpu_hash.finish():016x}"


def _parse_expert_name(parameter_name: str) -> tuple[str, int, int] | None:
    hit = _EXPERT_PATTERN.fullmatch(parameter_name)
    if hit is None:
        return None
    layer, expert, part = hit.groups()
    stack = "w2_weight" if part == "down" else "w13_weight"
    return layer + stack, int(expert), int(part == "up")
