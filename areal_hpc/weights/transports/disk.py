"""Disk transport: a folder per version that replicas load.

A bucket's bytes lie as safetensors wants them (github.com/huggingface/safetensors#format), so each
becomes one file: a header, then the bucket as it is. A folder gets its name when it is complete.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import time
from pathlib import Path

import torch

from areal_hpc.errors import WeightStorageError
from areal_hpc.metrics.step_metrics import PhaseTimer
from areal_hpc.recipe.sections.weights import WeightsConfig
from areal_hpc.rundir.atomic import fsync_path
from areal_hpc.weights.buckets.bucket import PackedBucket, PackingBuffers
from areal_hpc.weights.buckets.pipeline import WaitSent, send_all
from areal_hpc.weights.buckets.plan import BucketPlan
from areal_hpc.weights.replica_client import ReplicaClient
from areal_hpc.weights.transports.transport import ExpectedChecksums, Transport, UpdateOrder
from areal_hpc.weights.update import GroupUpdate
from areal_hpc.weights.update_session import UpdateSession
from areal_hpc.wire.weight_version import WeightVersion

_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "float8_e4m3fn": "F8_E4M3",
    "uint8": "U8",
}
_HEADER_MULTIPLE = 8
_FOLDER = re.compile(r"\.?([0-9]+\.[0-9]+\.[0-9]+)(?:\.partial)?")


def build_safetensors_header(bucket: BucketPlan) -> bytes:
    """What comes before a bucket's bytes in its file. Pure."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for slot in bucket.slots:
        entries[slot.spec.name] = {
            "dtype": _DTYPES[slot.spec.dtype],
            "shape": list(slot.spec.shape),
            "data_offsets": [slot.offset, slot.offset + slot.spec.size_bytes],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_MULTIPLE)
    return len(text).to_bytes(8, "little") + text


class WeightsFolder:
    """One version in the writing, then in place under `name`.

    Args:
        root: Where the folders of all versions lie.
        version: The version.
        serial: Tells apart folders of the same version.
    """

    def __init__(self, root: Path, version: WeightVersion, serial: int) -> None:
        self.name = f"{version}.{serial}"
        self._root = root
        self._partial = root / f".{self.name}.partial"
        self._files = 0
        try:
            shutil.rmtree(self._partial, ignore_errors=True)
            self._partial.mkdir(parents=True)
        except OSError as error:
            raise _refused(self._partial, error) from error

    def write(self, packed: PackedBucket) -> None:
        """Write one bucket and force it to disk.

        Raises:
            WeightStorageError: It is full, say.
        """
        self._files += 1
        path = self._partial / f"bucket-{self._files:05d}.safetensors"
        try:
            with path.open("wb") as stream:
                stream.write(build_safetensors_header(packed.bucket))
                stream.write(packed.flat.cpu().numpy().data)
                stream.flush()
                os.fsync(stream.fileno())
        except OSError as error:
            raise _refused(path, error) from error

    def put_in_place(self) -> None:
        """Give the folder its name; those of earlier versions are then of no more use.

        Raises:
            WeightStorageError: It is full, say.
        """
        try:
            fsync_path(self._partial)
            self._partial.rename(self._root / self.name)
            fsync_path(self._root)
        except OSError as error:
            raise _refused(self._root, error) from error

    def discard(self) -> None:
        """Delete what was written so far: it will not be completed."""
        shutil.rmtree(self._partial, ignore_errors=True)

    def delete_older(self) -> None:
        """Delete what was written before this one; a trainer that has taken over keeps its own."""
        for path in self._root.iterdir():
            found = _FOLDER.fullmatch(path.name)
            if found and _age(found[1]) < _age(self.name):
                shutil.rmtree(path, ignore_errors=True)


def _age(name: str) -> list[int]:
    """Generation, step, serial number."""
    return [int(part) for part in name.split(".")]


def _refused(path: Path, error: OSError) -> WeightStorageError:
    return WeightStorageError(
        f"the weights could not be written to shared storage: {error}",
        key=str(path),
        hint="make room on the shared storage, or set weights.transport=broadcast",
    )


class DiskSession(UpdateSession):
    """Replicas that load a folder; each for itself, so one that fails takes no other with it."""

    def __init__(self, member: ReplicaClient, config: WeightsConfig) -> None:
        super().__init__([member], config, str(member.key.place))

    def load(self, folder: str, version: WeightVersion) -> None:
        """Have the replica load a folder in place of its weights."""
        began = time.monotonic()
        self._all(lambda member: member.load(folder, version))
        self.load_s = time.monotonic() - began


class DiskTransport(Transport[DiskSession]):
    """Writes a version while replicas still generate, and has them load it.

    Args:
        config: The recipe's section.
        admin_key: The run's secret for control routes.
        device: Where buckets are packed; that of the replicas.
        root: Where folders are written.
    """

    def __init__(
        self, config: WeightsConfig, admin_key: str, device: torch.device, root: Path
    ) -> None:
        super().__init__(config, admin_key, device)
        self._root = root
        self._buffers = PackingBuffers(device)
        self._serial = itertools.count()
        self._folder: WeightsFolder | None = None

    def _carry(
        self, update: GroupUpdate[DiskSession], order: UpdateOrder, timer: PhaseTimer
    ) -> ExpectedChecksums:
        expected = ExpectedChecksums(order.tp_sizes, self._replica_device)
        swaps = [
            DiskSession(self._control(key, order.version), self._config) for key in order.replicas
        ]
        with timer.phase("write"):
            try:
                folder = self._write(order, expected)
            except WeightStorageError as error:
                for swap in swaps:
                    swap.close()
                update.failed = dict.fromkeys(order.replicas, error)
                return expected
        update.live = swaps
        self._pause(update, timer)
        with timer.phase("load"):
            update.each("load", lambda swap: swap.load(folder.name, order.version))
        return expected

    def _write(self, order: UpdateOrder, expected: ExpectedChecksums) -> WeightsFolder:
        """Write all buckets, each while the next one is packed."""
        folder = WeightsFolder(self._root, order.version, next(self._serial))

        def ship(packed: PackedBucket) -> WaitSent:
            return self._pool.submit(folder.write, packed).result

        try:
            send_all(
                order.buckets,
                order.arrivals,
                self._buffers.open,
                ship,
                lambda packed: self._watch(expected, packed),
            )
            folder.put_in_place()
        except WeightStorageError:
            folder.discard()
            raise
        self._folder = folder
        return folder

    def _keep(self, update: GroupUpdate[DiskSession]) -> None:
        """Every replica has loaded the newest folder or will get another: the others can go."""
        for swap in update.live:
            swap.close()
        if self._folder is not None:
            self._folder.delete_older()
