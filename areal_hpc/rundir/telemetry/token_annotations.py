"""Annotations of a step: the trainer's values for the tokens it learned from, one file per step.

A thread writes each file as msgpack, and nothing waits for it. A file that cannot be written is
left out: training does not depend on it.
"""

import contextlib
import logging
import shutil
import threading
from pathlib import Path

import msgspec
from msgspec import Struct

from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.telemetry.spans import MIN_FREE_BYTES

log = logging.getLogger(__name__)

MAX_FOLDER_BYTES = 2 << 30
"""Size limit of all files together; the oldest are removed first."""
UNTRAINED_TOKEN_REASONS = ("", "cut reply", "untrainable reply", "weight out of bounds", "clipped")
"""Reasons, by code, why a sampled token was not trained, or not fully: the reply reached its limit
or was not sampled from the plain softmax; its weight was out of bounds; the clip acted."""


class RowAnnotation(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Row of the batch. Arrays are little-endian, with one value per sampled token of the row.

    A value is NaN if the loss did not see the token.
    """

    shard: str
    row: int
    outcome: str
    """`trained`; `no advantage`: all advantages of its group are 0; `masked`: the loss saw none of
    its tokens; else the reason why the group was left out or the step not taken."""
    advantage: float = 0.0
    """Mean over the tokens that the loss saw."""
    advantages: bytes = b""
    """float16."""
    logprobs: bytes = b""
    """Log-probabilities of the trainer under the weights that the step began with: float32."""
    entropies: bytes = b""
    """Entropies of the distributions that tokens were sampled from, in nats: float16."""
    ratios: bytes = b""
    """Ratios to the proximal policy, as the loss saw them: float16."""
    reasons: bytes = b""
    """Codes of `UNTRAINED_TOKEN_REASONS`: uint8."""


class StepAnnotations(Struct, frozen=True, kw_only=True):
    """Rows of the batch that led to a step."""

    step: int
    generation: int
    rows_of_batch: int
    """Number of rows in the batch, annotated or not."""
    rows: list[RowAnnotation]


class AnnotationWriter:
    """Writer of annotations. Its methods neither wait for storage nor raise."""

    def __init__(self, paths: RunPaths, *, max_folder_bytes: int = MAX_FOLDER_BYTES) -> None:
        self._paths = paths
        self._max_folder_bytes = max_folder_bytes
        self._thread: threading.Thread | None = None

    def start_write(self, annotations: StepAnnotations) -> None:
        """Start to write a file; leave it out while the previous one is still being written."""
        if self._thread is not None and self._thread.is_alive():
            log.warning("annotations of step %d are left out: storage is slow", annotations.step)
            return
        self._thread = threading.Thread(
            target=self._write, args=(annotations,), name="annotations", daemon=True
        )
        self._thread.start()

    def close(self, timeout_s: float = 1.0) -> None:
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _write(self, annotations: StepAnnotations) -> None:
        path = self._paths.annotation(annotations.step)
        partial = path.with_suffix(".tmp")
        try:
            path.parent.mkdir(exist_ok=True)
            if shutil.disk_usage(path.parent).free < MIN_FREE_BYTES:
                raise OSError(f"less than {MIN_FREE_BYTES >> 20} MiB are free")
            partial.write_bytes(msgspec.msgpack.encode(annotations))
            partial.replace(path)
            _remove_oldest(path.parent, self._max_folder_bytes)
        except OSError as error:
            log.warning("annotations of step %d are left out: %s", annotations.step, error)
            with contextlib.suppress(OSError):
                partial.unlink()


def _remove_oldest(folder: Path, max_bytes: int) -> None:
    sizes = {path: path.stat().st_size for path in sorted(folder.glob("*.msgpack"))}
    total = sum(sizes.values())
    for path, size_bytes in sizes.items():
        if total <= max_bytes:
            return
        path.unlink()
        total -= size_bytes


_decoder = msgspec.msgpack.Decoder(StepAnnotations)


def read_annotations(paths: RunPaths, step: int) -> StepAnnotations | None:
    """Read the annotations of the batch that led to a step; None without a readable file."""
    try:
        content = paths.annotation(step).read_bytes()
        return _decoder.decode(content)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        log.warning("%s cannot be read: %s", paths.annotation(step), error)
        return None


def find_row_annotation(paths: RunPaths, step: int, shard: str, row: int) -> RowAnnotation | None:
    annotations = read_annotations(paths, step)
    rows = annotations.rows if annotations else []
    return next((each for each in rows if (each.shard, each.row) == (shard, row)), None)
