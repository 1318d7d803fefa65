"""Sealed shards are read in place: the file is mapped, rows are views into it."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import msgspec
import numpy as np
import numpy.typing as npt
from h5py import h5d

from areal_hpc.errors import ShardError
from areal_hpc.shards.schema import DATASETS, FORMAT, VERSION, Axis
from areal_hpc.trajectory import Trajectory

Array = npt.NDArray[Any]


class ShardReader:
    """One sealed shard, mapped. Arrays stay valid after the reader is gone; there is no close.

    Arrays are read-only views into the file: copy before changing them.

    Raises:
        ShardError: The file is missing, cut short, or not a shard of a format this code reads.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.writer = ""
        self.created = ""
        try:
            places = self._read_headers()
            with path.open("rb") as stream:
                self._mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError as error:
            raise ShardError(
                "there is no such shard", key=str(path), hint="run areal-hpc shards verify"
            ) from error
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise ShardError(
                f"not a whole shard: {error}", key=str(path), hint="run areal-hpc shards verify"
            ) from error
        self.columns: Mapping[str, Array] = {
            dataset.name: self._view(dataset.dtype, *places[dataset.name]) for dataset in DATASETS
        }
        """Every dataset by its name (`schema.DATASETS`)."""
        self._check_lengths()

    @property
    def num_rows(self) -> int:
        """Trajectories in this shard."""
        return len(self.columns["ticket_id"])

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return len(self.columns["input_ids"])

    def read_rows(self, rows: Sequence[int], *, with_meta: bool = True) -> list[Trajectory]:
        """The trajectories at `rows`, in that order; token arrays are views, not copies.

        Without metadata (`meta` stays empty) no JSON is parsed: the trainer needs none.

        Raises:
            IndexError: A row is not in the shard.
        """
        chosen = np.asarray(rows, dtype=np.int64)
        outside = chosen[(chosen < 0) | (chosen >= self.num_rows)]
        if len(outside):
            raise IndexError(f"{self.path} has rows 0..{self.num_rows - 1}, got {outside[0]}")
        column = self.columns

        def values(name: str) -> list[Any]:
            # One conversion a column, not one a row: a batch has many short rows.
            return column[name][chosen].tolist()  # type: ignore[no-any-return]

        ids, masks = column["input_ids"], column["loss_mask"]
        logprobs, versions = column["logprobs"], column["versions"]
        return [
            Trajectory(
                ticket, attempt, episode, row, ids[T], masks[T], logprobs[T], versions[T], *score
            )
            for ticket, attempt, episode, row, T, *score in zip(
                values("ticket_id"),
                values("attempt"),
                values("episode"),
                values("row"),
                self._slices("offsets", chosen),
                values("reward"),
                values("temperature"),
                self._metas(chosen) if with_meta else ({} for _ in rows),
                strict=True,
            )
        ]

    def _slices(self, bounds: str, rows: Array) -> list[slice]:
        column = self.columns[bounds]
        return list(map(slice, column[rows].tolist(), column[rows + 1].tolist()))

    def _metas(self, rows: Array) -> Iterator[dict[str, Any]]:
        column = self.columns["meta"]
        for place in self._slices("meta_offsets", rows):
            yield msgspec.json.decode(column[place].data)

    def _read_headers(self) -> dict[str, tuple[int, int]]:
        """Byte offset and length of every dataset."""
        # No lock: sealed files never change, and NFS and Lustre often have no flock.
        with h5py.File(self.path, "r", locking=False) as file:
            found, version = file.attrs.get("format"), file.attrs.get("version")
            if found != FORMAT:
                raise ValueError(f"expected format {FORMAT!r}, got {found!r}")
            if version is None or not 1 <= int(version) <= VERSION:
                raise ValueError(f"expected version 1 to {VERSION}, got {version!r}")
            self.writer, self.created = str(file.attrs["writer"]), str(file.attrs["created"])
            places = {}
            for expected in DATASETS:
                # h5py's own Dataset objects would take twice as long.
                dataset = h5d.open(file.id, expected.name.encode())
                contiguous = dataset.get_create_plist().get_layout() == h5d.CONTIGUOUS
                if dataset.dtype != expected.dtype or dataset.rank != 1 or not contiguous:
                    raise ValueError(
                        f"{expected.name}: expected 1-D contiguous {expected.dtype.str}, got "
                        f"{dataset.rank}-D {dataset.dtype.str}, contiguous: {contiguous}"
                    )
                # HDF5 knows no place for an empty dataset.
                places[expected.name] = (dataset.get_offset() or 0, dataset.shape[0])
        return places

    def _view(self, dtype: np.dtype[Any], offset: int, length: int) -> Array:
        end = offset + length * dtype.itemsize
        if end > len(self._mapped):
            raise ShardError(
                f"cut short: expected at least {end} bytes, got {len(self._mapped)}",
                key=str(self.path),
            )
        return np.frombuffer(self._mapped, dtype, length, offset)

    def _check_lengths(self) -> None:
        sizes = {
            Axis.TOKEN: self.num_tokens,
            Axis.ROW: self.num_rows,
            Axis.ROW_BOUND: self.num_rows + 1,
            Axis.META_BYTE: len(self.columns["meta"]),
        }
        wrong = [
            f"{dataset.name} has {len(self.columns[dataset.name])} elements, "
            f"expected {sizes[dataset.axis]}"
            for dataset in DATASETS
            if len(self.columns[dataset.name]) != sizes[dataset.axis]
        ]
        for name, total in (
            ("offsets", sizes[Axis.TOKEN]),
            ("meta_offsets", sizes[Axis.META_BYTE]),
        ):
            bounds = self.columns[name]
            if len(bounds) and (
                bounds[0] != 0 or bounds[-1] != total or (np.diff(bounds) < 0).any()
            ):
                wrong.append(f"{name} does not rise from 0 to {total}")
        if wrong:
            raise ShardError("; ".join(wrong), key=str(self.path))
