"""A cell's own copy of the newest version: from it, changes alone make the next one.

SGLang loads whole tensors, so somebody has to hold what has not changed. The copy lies on the node,
which reads it faster than the shared storage; all replicas of the cell load it.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import threading
from pathlib import Path

import msgspec
import numpy as np

from areal_hpc.errors import WeightSyncError
from areal_hpc.weights.delta import MANIFEST, FileEntry, FolderManifest, apply

log = logging.getLogger(__name__)

_LENGTH_BYTES = 8
"""Of a safetensors file: the length of its header comes first."""


class LocalWeights:
    """One version at a time.

    Args:
        directory: On the node, of this cell alone; emptied, because nobody knows what it holds.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._held = ""
        """The version; empty while it is none."""
        shutil.rmtree(directory, ignore_errors=True)

    def take(self, folder: Path) -> Path:
        """Make the copy one of `folder`, unless it is already; where it lies.

        Raises:
            WeightSyncError: Changes are to another version than is held, or what came of them is
                not what was meant. A folder of whole files mends both.
            OSError: The node's storage is full, or the shared one does not answer.
        """
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=FolderManifest)
        with self._lock:
            if self._held != manifest.version:
                if manifest.base and manifest.base != self._held:
                    raise WeightSyncError(
                        f"expected to hold {manifest.base}, hold {self._held or 'nothing'}"
                    )
                self._held = ""
                self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                for entry in manifest.files:
                    self._take_file(folder, entry)
                self._held = manifest.version
        return self._directory

    def _take_file(self, folder: Path, entry: FileEntry) -> None:
        target = self._directory / f"{Path(entry.name).stem}.safetensors"
        if not entry.is_delta:
            shutil.copyfile(folder / entry.name, target)
        content = np.memmap(target, np.uint8, "r+")
        start = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES].tobytes(), "little")
        bucket = content[start:]
        if entry.is_delta:
            apply(bucket, (folder / entry.name).read_bytes())
        if (digest := hashlib.sha256(bucket.data).hexdigest()) != entry.digest:
            raise WeightSyncError(
                f"{entry.name}: expected digest {entry.digest[:12]}, got {digest[:12]}"
            )

    def delete(self) -> None:
        """Hold nothing any more."""
        shutil.rmtree(self._directory, ignore_errors=True)
