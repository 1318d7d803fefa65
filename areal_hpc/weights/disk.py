"""Disk transport: one folder per version on shared storage, which replicas load.

Each bucket becomes one safetensors file. A folder gets its final name when it is complete.
"""

import itertools
import logging
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from areal_hpc.errors import WeightStorageError
from areal_hpc.metrics.step_metrics import PhaseTimer
from areal_hpc.recipe.sections.inference import WeightsConfig
from areal_hpc.rundir.files import fsync_path, make_folder
from areal_hpc.weights.buckets import (
    OpenBucket,
    PackingBuffers,
    WaitSent,
    send_buckets,
)
from areal_hpc.weights.replicas import ReplicaClient
from areal_hpc.weights.update import Transport, Update, UpdateRequest, UpdateSession
from areal_hpc.wire.replicas import LoadWeightsRequest
from areal_hpc.wire.weight_version import WeightVersion

log = logging.getLogger(__name__)

_WEIGHTS_FOLDER_PATTERN = re.compile(r"\.?([0-9]+\.[0-9]+\.[0-9]+)(?:\.partial)?")


class WeightsFolder:
    """Folder of one version: first partial, then in place under `name`.

    `serial` distinguishes folders of the same version. Every method but the last two raises
    WeightStorageError, for example when the disk is full.
    """

    def __init__(self, root: Path, version: WeightVersion, serial: int) -> None:
        self.name = f"{version}.{serial}"
        self._root = root
        self._partial = root / f".{self.name}.partial"
        self._files = 0
        with _convert_write_errors(self._partial):
            shutil.rmtree(self._partial, ignore_errors=True)
            make_folder(self._partial.parent)
            self._partial.mkdir()

    def write_bucket(self, full_bucket: OpenBucket) -> None:
        """Write one bucket and force it to disk."""
        self._files += 1
        path = self._partial / f"bucket-{self._files:05d}.safetensors"
        with _convert_write_errors(path):
            save_file(dict(full_bucket.tensors), path, metadata={"format": "pt"})
            fsync_path(path)

    def rename_into_place(self) -> None:
        """Give the folder its final name; no replica needs those of earlier versions then."""
        with _convert_write_errors(self._root):
            fsync_path(self._partial)
            self._partial.rename(self._root / self.name)
            fsync_path(self._root)

    def discard_partial(self) -> None:
        shutil.rmtree(self._partial, ignore_errors=True)

    def delete_older(self) -> None:
        """Delete folders of earlier versions; a newer trainer's folders stay."""
        try:
            paths = [*self._root.iterdir()]
        except OSError as error:
            log.warning("older weights stay in %s until the next update: %s", self._root, error)
            return
        for path in paths:
            match = _WEIGHTS_FOLDER_PATTERN.fullmatch(path.name)
            if match and _parse_folder_name(match[1]) < _parse_folder_name(self.name):
                shutil.rmtree(path, ignore_errors=True)


def _parse_folder_name(folder_name: str) -> list[int]:
    return [int(part) for part in folder_name.split(".")]


@contextmanager
def _convert_write_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise WeightStorageError(
            f"the weights could not be written to shared storage: {error}",
            key=str(path),
            hint="make room on the shared storage, or set weights.transport=broadcast",
        ) from error


class DiskSession(UpdateSession):
    """One replica that loads a folder, independently of others, so that it fails alone."""

    def __init__(self, replica_client: ReplicaClient, config: WeightsConfig) -> None:
        super().__init__([replica_client], config, str(replica_client.key.cell_and_index))

    def load_folder(self, folder: str, version: WeightVersion) -> None:
        began = time.monotonic()
        request = LoadWeightsRequest(folder, str(version))
        self._call_all(lambda member: member.post_with_update_timeout("load", request))
        self.load_s = time.monotonic() - began


class DiskTransport(Transport[DiskSession]):
    """Transport that writes a version while replicas still generate, and then has them load it.

    Buckets are packed on `device`, the device type of the replicas, and written below `root`.
    """

    def __init__(
        self, config: WeightsConfig, service_key: str, device: torch.device, root: Path
    ) -> None:
        super().__init__(config, service_key, device)
        self._root = root
        self._buffers = PackingBuffers(device)
        self._serial = itertools.count()
        self._folder: WeightsFolder | None = None

    def _transfer(
        self, update: Update[DiskSession], request: UpdateRequest, timer: PhaseTimer
    ) -> None:
        with timer.time_phase("write"):
            try:
                folder = self._write_folder(request)
            except WeightStorageError as error:
                update.failed = dict.fromkeys(request.replicas, error)
                return
        for key in request.replicas:
            update.live.append(
                DiskSession(self._build_replica_client(key, request.version), self._config)
            )
        with timer.time_phase("pause_call"):
            update.run_step("pause", lambda session: session.pause())
        with timer.time_phase("load"):
            update.run_step(
                "load",
                lambda session: session.load_folder(folder.name, request.version),
            )

    def _write_folder(self, request: UpdateRequest) -> WeightsFolder:
        folder = WeightsFolder(self._root, request.version, next(self._serial))

        def ship(full_bucket: OpenBucket) -> WaitSent:
            return self._pool.submit(folder.write_bucket, full_bucket).result

        try:
            send_buckets(
                request.buckets,
                request.arrivals,
                self._buffers.open_bucket_in_older_buffer,
                ship,
            )
            folder.rename_into_place()
        except WeightStorageError:
            folder.discard_partial()
            raise
        self._folder = folder
        return folder

    def _finish_update(self, update: Update[DiskSession]) -> None:
        for session in update.live:
            session.close_clients()
        if self._folder is not None:
            self._folder.delete_older()
