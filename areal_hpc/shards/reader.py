"""Reader of sealed shards: plain reads into the caller's own memory.

Shards are not mapped. Truncation of a mapped file, or loss of its server, kills the process
that touches it; a failed read is an error that can be retried. Mapping would not be faster
either: a batch is read once, and setting up and removing pages costs as much as a copy.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from h5py import h5a, h5d, h5f, h5l, h5p

from areal_hpc.errors import ShardError
from areal_hpc.rundir.files import open_regular_file, read_exact
from areal_hpc.shards.schema import (
    ALL_DATASETS,
    ALWAYS_WRITTEN_DATASETS,
    FORMAT_VERSION,
    MASK_DATASETS,
    OFFSETS_BY_JSON_DATASET,
    ROUTES_DATASET,
    Axis,
    DatasetSpec,
)
from areal_hpc.wire.fault_points import fault_point
from areal_hpc.wire.trajectory import RowKind, RowRecord, SamplingMask, TrajectoryRow

NumpyArray = npt.NDArray[Any]
Columns = dict[str, NumpyArray]
Spans = Sequence[tuple[int, int]]
"""First element, and the element behind the last, of each piece of a column."""

_VERIFY_HINT = "run areal-hpc shards verify"
_TOKEN_COLUMNS = tuple(spec.name for spec in ALWAYS_WRITTEN_DATASETS if spec.axis is Axis.TOKEN)
_ROW_COLUMNS = tuple(
    spec.name
    for spec in (*ALWAYS_WRITTEN_DATASETS, *MASK_DATASETS)
    if spec.axis in (Axis.ROW, Axis.ROW_BOUND)
)
_RARE_COLUMNS = (*(spec.name for spec in MASK_DATASETS[:2]), ROUTES_DATASET.name)
_BOUNDS_BY_COLUMN = {**OFFSETS_BY_JSON_DATASET, "sampling_mask": "sampling_mask_offsets"}
_ROW_KINDS = tuple(RowKind)
_record_decoder = msgspec.json.Decoder(RowRecord)
_meta_decoder = msgspec.json.Decoder(dict[str, Any])
_JsonValue = TypeVar("_JsonValue")


@dataclass(frozen=True, slots=True)
class _DatasetExtent:
    dtype: np.dtype[Any]
    offset: int
    element_count: int

    @property
    def end(self) -> int:
        return self.offset + self.element_count * self.dtype.itemsize


class ShardReader:
    """One sealed shard. The file is open only during a read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open_regular_file(path) as descriptor:
                self._extents = _read_dataset_extents(descriptor)
                self._check_size(os.fstat(descriptor).st_size)
                self._rows = {
                    name: _read_spans(descriptor, self._extents[name], None)
                    for name in _ROW_COLUMNS
                    if name in self._extents
                }
        except FileNotFoundError as error:
            raise ShardError("there is no such shard", key=str(path), hint=_VERIFY_HINT) from error
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            message = f"incomplete shard: {error}"
            if isinstance(error, OSError) and error.errno is not None:
                message = f"cannot be read: {error.strerror}"
            raise ShardError(message, key=str(path), hint=_VERIFY_HINT) from error
        self._has_masks = MASK_DATASETS[0].name in self._extents
        self._check_dataset_consistency()

    def _check_size(self, size_bytes: int) -> None:
        end = max((extent.end for extent in self._extents.values()), default=0)
        if end > size_bytes:
            raise ShardError(
                f"cut short: expected at least {end} bytes, got {size_bytes}", key=str(self.path)
            )

    @property
    def num_rows(self) -> int:
        return self._extents["ticket_id"].element_count

    @property
    def num_tokens(self) -> int:
        return self._extents["input_ids"].element_count

    def read_column(self, dataset_name: str) -> NumpyArray:
        """Read a whole dataset by its name in the schema; ShardError if the storage fails."""
        if dataset_name in self._rows:
            return self._rows[dataset_name]
        return self._read_columns({dataset_name: None})[dataset_name]

    def list_kinds(self) -> list[RowKind]:
        return [_ROW_KINDS[kind] for kind in self._rows["kind"].tolist()]

    @cached_property
    def tool_schemas(self) -> dict[str, Any]:
        """Schemas of all tools that calls of the shard name, by their hash."""
        return self._decode_json("tools", _meta_decoder, self.read_column("tools"))

    def read_records(self, rows: Sequence[int] | None = None) -> list[RowRecord]:
        """Read the episodes and calls of these rows; of all rows without an argument."""
        numbers = self._validate_row_numbers(range(self.num_rows) if rows is None else rows)
        stored = self._read_rows_of_columns(["record"], numbers)
        return list(self._decode_rows("record", _record_decoder, stored, numbers))

    def read_rows(self, rows: Sequence[int], *, with_messages: bool = True) -> list[TrajectoryRow]:
        """Read the trajectories at `rows`, in that order.

        Without messages `meta` and `tool_schemas` stay empty: the trainer needs neither, and they
        may be larger than all tokens.
        """
        numbers = self._validate_row_numbers(rows)
        columns = [*_TOKEN_COLUMNS, "record", *(["meta"] if with_messages else ())]
        columns += [name for name in _RARE_COLUMNS if name in self._extents]
        stored = self._read_rows_of_columns(columns, numbers)
        ids, masks, logprobs, versions = (stored[name] for name in _TOKEN_COLUMNS)

        def values(dataset_name: str) -> list[Any]:
            # One conversion per column, not one per row: a batch has many short rows.
            return self._rows[dataset_name][numbers].tolist()  # type: ignore[no-any-return]

        row_identities = (values(name) for name in ("ticket_id", "attempt", "episode", "row"))
        kinds = map(_ROW_KINDS.__getitem__, values("kind"))
        records = list(self._decode_rows("record", _record_decoder, stored, numbers))
        details = self._decode_details(stored, numbers, records) if with_messages else ()
        slices = _compute_row_slices(self._rows["offsets"], numbers)
        trajectories = [
            TrajectoryRow(
                ticket, attempt, episode, row, ids[T], masks[T], logprobs[T], versions[T], *fields
            )
            for ticket, attempt, episode, row, T, *fields in zip(
                *row_identities,
                slices,
                values("reward"),
                values("temperature"),
                kinds,
                values("eval_step"),
                records,
                *details,
                strict=True,
            )
        ]
        if self._has_masks:
            bounds = _compute_row_slices(self._rows["sampling_mask_offsets"], numbers)
            counts, masked_ids = stored["sampling_mask_counts"], stored["sampling_mask"]
            trajectories = [
                replace(row, sampling_mask=SamplingMask(counts[T], masked_ids[K]))
                if K.stop > K.start
                else row
                for row, T, K in zip(trajectories, slices, bounds, strict=True)
            ]
        if (routes := stored.get(ROUTES_DATASET.name)) is not None:
            routed = zip(trajectories, slices, strict=True)
            trajectories = [replace(row, routes_TLK=routes[T]) for row, T in routed]
        return trajectories

    def _decode_details(
        self, stored: Columns, rows: NumpyArray, records: Sequence[RowRecord]
    ) -> tuple[Iterable[dict[str, Any]], Iterable[dict[str, Any]]]:
        schemas = self.tool_schemas
        tools = [
            {call.tools: schemas.get(call.tools) for call in record.calls if call.tools}
            for record in records
        ]
        return self._decode_rows("meta", _meta_decoder, stored, rows), tools

    def _validate_row_numbers(self, rows: Sequence[int]) -> NumpyArray:
        numbers = np.asarray(rows, dtype=np.int64)
        outside = numbers[(numbers < 0) | (numbers >= self.num_rows)]
        if len(outside):
            raise IndexError(f"{self.path} has rows 0..{self.num_rows - 1}, got {outside[0]}")
        return numbers

    def _decode_rows(
        self,
        dataset_name: str,
        decoder: msgspec.json.Decoder[_JsonValue],
        stored: Columns,
        rows: NumpyArray,
    ) -> Iterator[_JsonValue]:
        bounds = self._rows[OFFSETS_BY_JSON_DATASET[dataset_name]]
        for piece in _compute_row_slices(bounds, rows):
            yield self._decode_json(dataset_name, decoder, stored[dataset_name][piece])

    def _decode_json(
        self, dataset_name: str, decoder: msgspec.json.Decoder[_JsonValue], content: NumpyArray
    ) -> _JsonValue:
        try:
            return decoder.decode(content.data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ShardError(
                f"{dataset_name}: expected a JSON object: {error}",
                key=str(self.path),
                hint=_VERIFY_HINT,
            ) from error

    def _read_rows_of_columns(self, names: Iterable[str], rows: NumpyArray) -> Columns:
        bounds = {name: self._rows[_BOUNDS_BY_COLUMN.get(name, "offsets")] for name in names}
        return self._read_columns({name: _locate_spans(bounds[name], rows) for name in bounds})

    def _read_columns(self, spans: Mapping[str, Spans | None]) -> Columns:
        """Read columns, whole or in pieces, with one opening of the file.

        Each opening costs the metadata server of a shared file system a call.
        """
        try:
            fault_point("shard.before_read")
            with open_regular_file(self.path) as descriptor:
                return {
                    name: _read_spans(descriptor, self._extents[name], spans[name])
                    for name in spans
                }
        except OSError as error:
            raise ShardError(
                f"cannot be read: {error}", key=str(self.path), hint=_VERIFY_HINT
            ) from error

    def _check_dataset_consistency(self) -> None:
        sizes = {
            Axis.TOKEN: self.num_tokens,
            Axis.ROW: self.num_rows,
            Axis.ROW_BOUND: self.num_rows + 1,
        }
        lengths = {name: extent.element_count for name, extent in self._extents.items()}
        wrong = [
            f"{dataset.name} has {lengths[dataset.name]} elements, expected {sizes[dataset.axis]}"
            for dataset in ALL_DATASETS
            if dataset.name in lengths and dataset.axis in sizes
            if lengths[dataset.name] != sizes[dataset.axis]
        ]
        json_sizes = {
            bounds: lengths[name]
            for name, bounds in OFFSETS_BY_JSON_DATASET.items()
            if name in lengths
        }
        if self._has_masks:
            json_sizes["sampling_mask_offsets"] = lengths["sampling_mask"]
        for name, size in {"offsets": self.num_tokens, **json_sizes}.items():
            bounds = self._rows[name]
            if len(bounds) and (
                bounds[0] != 0 or bounds[-1] != size or (np.diff(bounds) < 0).any()
            ):
                wrong.append(f"{name} does not rise from 0 to {size}")
        if (self._rows["kind"] >= len(RowKind)).any():
            wrong.append(f"kind has a value of {len(RowKind)} or more")
        if wrong:
            raise ShardError("; ".join(wrong), key=str(self.path))


def _locate_spans(bounds: NumpyArray, rows: NumpyArray) -> Spans:
    if not len(rows):
        return []
    first = np.flatnonzero(np.diff(rows, prepend=-2) != 1)
    last = np.append(first[1:], len(rows)) - 1
    return list(zip(bounds[rows[first]].tolist(), bounds[rows[last] + 1].tolist(), strict=True))


def _compute_row_slices(bounds: NumpyArray, rows: NumpyArray) -> list[slice]:
    lengths = bounds[rows + 1] - bounds[rows]
    ends = np.cumsum(lengths)
    return list(map(slice, (ends - lengths).tolist(), ends.tolist()))


def _read_spans(descriptor: int, extent: _DatasetExtent, spans: Spans | None) -> NumpyArray:
    spans = [(0, extent.element_count)] if spans is None else spans
    array = np.empty(sum(end - begin for begin, end in spans), extent.dtype)
    position = 0
    for begin, end in spans:
        piece = array[position : position + end - begin]
        read_exact(descriptor, piece, extent.offset + begin * extent.dtype.itemsize)
        position += len(piece)
    return array


def _read_dataset_extents(descriptor: int) -> dict[str, _DatasetExtent]:
    access = h5p.create(h5p.FILE_ACCESS)
    # No lock: sealed files never change, and NFS and Lustre often have no flock.
    access.set_file_locking(False, True)
    # Opens the very file that was checked to be regular, even if its name now means another file.
    file = h5f.open(f"/proc/self/fd/{descriptor}".encode(), h5f.ACC_RDONLY, fapl=access)
    try:
        if (version := _read_version(file)) != FORMAT_VERSION:
            raise ValueError(f"expected version {FORMAT_VERSION}, got {version}")
        has_masks = file.links.exists(MASK_DATASETS[1].name.encode())  # others may use the first
        has_routes = file.links.exists(ROUTES_DATASET.name.encode())
        datasets = [*ALWAYS_WRITTEN_DATASETS, *(MASK_DATASETS if has_masks else ())]
        datasets += [ROUTES_DATASET] if has_routes else []
        return {dataset.name: _locate_dataset(file, dataset) for dataset in datasets}
    finally:
        file.close()


def _read_version(file: h5f.FileID) -> int | None:
    """Return the number in the root group's attribute `version`; None without one.

    Text attributes are not read: they lie in a heap, and a damaged heap makes HDF5 loop forever.
    """
    if not h5a.exists(file, b"version"):
        return None
    attribute = h5a.open(file, b"version")
    if attribute.dtype.kind not in "iu" or attribute.shape != ():
        return None
    value = np.empty((), attribute.dtype)
    attribute.read(value)
    return int(value)


def _locate_dataset(file: h5f.FileID, expected: DatasetSpec) -> _DatasetExtent:
    name = expected.name.encode()
    if file.links.get_info(name).type != h5l.TYPE_HARD:
        raise ValueError(f"{expected.name}: expected a dataset of this file, got a link")
    dataset = h5d.open(file, name)
    creation = dataset.get_create_plist()
    if creation.get_external_count():
        raise ValueError(f"{expected.name}: expected a dataset of this file, got other files")
    shape = dataset.shape
    contiguous = creation.get_layout() == h5d.CONTIGUOUS
    has_type, num_axes = dataset.get_type() == expected.hdf5_type, 1
    if expected is ROUTES_DATASET:
        has_type, num_axes = dataset.dtype.str in ("|u1", "<u2"), 3
    if not (has_type and len(shape) == num_axes and contiguous):
        raise ValueError(
            f"{expected.name}: expected {num_axes}-D contiguous {expected.dtype.str}, got "
            f"{len(shape)}-D {dataset.dtype.str}, contiguous: {contiguous}"
        )
    # HDF5 assigns no offset to an empty dataset.
    element = np.dtype((dataset.dtype, shape[1:])) if num_axes > 1 else expected.dtype
    return _DatasetExtent(element, dataset.get_offset() or 0, shape[0])
