"""Sealed shards are read in place: the file is mapped, rows are views into it."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import msgspec
import numpy as np
import numpy.typing as npt

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
        return [self._read_row(row, with_meta) for row in rows]

    def _read_row(self, row: int, with_meta: bool) -> Trajectory:
        if not 0 <= row < self.num_rows:
            raise IndexError(f"{self.path} has rows 0..{self.num_rows - 1}, got {row}")
        column = self.columns
        tokens = slice(int(column["offsets"][row]), int(column["offsets"][row + 1]))
        meta = slice(int(column["meta_offsets"][row]), int(column["meta_offsets"][row + 1]))
        return Trajectory(
            ticket_id=int(column["ticket_id"][row]),
            attempt=int(column["attempt"][row]),
            episode=int(column["episode"][row]),
            row=int(column["row"][row]),
            input_ids_T=column["input_ids"][tokens],
            loss_mask_T=column["loss_mask"][tokens],
            logprobs_T=column["logprobs"][tokens],
            versions_T=column["versions"][tokens],
            reward=float(column["reward"][row]),
            temperature=float(column["temperature"][row]),
            meta=msgspec.json.decode(column["meta"][meta].data) if with_meta else {},
        )

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
                dataset = file[expected.name]
                if dataset.dtype != expected.dtype or dataset.ndim != 1 or dataset.chunks:
                    raise ValueError(
                        f"{expected.name}: expected 1-D contiguous {expected.dtype.str}, "
                        f"got {dataset.ndim}-D {dataset.dtype.str}, chunks {dataset.chunks}"
                    )
                # HDF5 knows no place for an empty dataset.
                places[expected.name] = (dataset.id.get_offset() or 0, len(dataset))
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
