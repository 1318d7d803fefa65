"""Shards against the disk, and against one HDF5 group per trajectory. All in one run, paired.

What is compared:

- seal: finished trajectories in memory -> a durable shard with digest and index line. Its peer
  is one `write` and one `fsync` of as many bytes.
- read: a shard's name -> what the trainer gets of all its rows: trajectories whose token arrays
  lie in fresh memory. Its peer is one warm `pread` of the bytes of the token columns into fresh
  memory.
- verify: the digest of the whole file, as `areal-hpc shards verify` takes it. Its peer is one
  warm `pread` of the whole file into fresh memory.
- group layout: the same trajectories with one HDF5 group each, synced and renamed, without
  digest and index; read back as an array per trajectory and column.

Every round runs all sides in alternating order; ratios are medians of the rounds' ratios. CPU
time is that of the whole process, threads and kernel included.
"""

import argparse
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import msgspec
import numpy as np
import numpy.typing as npt

from areal_hpc.rundir.files import fsync_path
from areal_hpc.shards.reader import ShardReader
from areal_hpc.shards.verify import measure_file
from areal_hpc.shards.writer import write_sealed_shard
from areal_hpc.wire.trajectory import TrajectoryRow
from benchmarks._pairs import (
    Samples,
    Side,
    add_out,
    cpu_ratio,
    measure_pairs,
    print_samples,
    report,
    wall_ratio,
)
from benchmarks._trajectories import make_trajectories

SHORTEST_TOKENS = 300
COLUMNS = ("input_ids", "loss_mask", "logprobs", "versions")


class Bench:
    """One set of trajectories and the folder they are written to and read from."""

    def __init__(self, trajectories: Sequence[TrajectoryRow], folder: Path) -> None:
        self.trajectories = trajectories
        self.folder = folder
        self.shard = folder / "shards" / self.seal()
        self.group_path = folder / "group.h5"
        self.raw_path = folder / "raw.bin"
        self.shard_bytes = self.shard.stat().st_size
        self.token_bytes = sum(ShardReader(self.shard).read_column(name).nbytes for name in COLUMNS)
        self.content = np.random.default_rng(0).bytes(self.shard_bytes)

    def seal(self) -> str:
        shards_dir, index_dir = self.folder / "shards", self.folder / "index"
        return write_sealed_shard(self.trajectories, shards_dir, index_dir, "bench").file

    def forget_seal(self) -> None:
        for path in self.shard.parent.iterdir():
            if path != self.shard:
                path.unlink()

    def write_raw(self) -> None:
        descriptor = os.open(self.raw_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        assert os.write(descriptor, self.content) == self.shard_bytes
        os.fsync(descriptor)
        os.close(descriptor)

    def read(self) -> list[TrajectoryRow]:
        reader = ShardReader(self.shard)
        return reader.read_rows(range(reader.num_rows), with_messages=False)

    def read_raw(self, size_bytes: int) -> npt.NDArray[np.uint8]:
        content = np.empty(size_bytes, np.uint8)
        descriptor = os.open(self.shard, os.O_RDONLY)
        assert os.preadv(descriptor, [content.data], 0) == size_bytes
        os.close(descriptor)
        return content

    def write_groups(self) -> None:
        partial = self.group_path.with_suffix(".tmp")
        with h5py.File(partial, "w") as file:
            for number, trajectory in enumerate(self.trajectories):
                group = file.create_group(f"{number:08d}")
                for name in COLUMNS:
                    group.create_dataset(name, data=getattr(trajectory, f"{name}_T"))
                meta = np.frombuffer(
                    msgspec.json.encode([trajectory.record, trajectory.meta]), np.uint8
                )
                group.create_dataset("meta", data=meta)
                for name in ("ticket_id", "attempt", "episode", "row", "reward", "temperature"):
                    group.attrs[name] = getattr(trajectory, name)
        descriptor = os.open(partial, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
        partial.rename(self.group_path)
        fsync_path(self.folder)

    def read_groups(self) -> list[list[Any]]:
        with h5py.File(self.group_path, "r") as file:
            return [
                [
                    *(file[key][name][:] for name in COLUMNS),
                    *(file[key].attrs[name] for name in ("reward", "temperature")),
                ]
                for key in file
            ]


def measure_writes(bench: Bench, pairs: int) -> Samples:
    sides = (
        Side("seal", bench.seal, bench.forget_seal),
        Side("raw write + fsync", bench.write_raw, bench.raw_path.unlink),
        Side("group per trajectory", bench.write_groups, bench.group_path.unlink),
    )
    samples = measure_pairs(sides, pairs)
    print_samples(f"write {bench.shard_bytes / 1e6:.1f} MB", samples, bench.shard_bytes / 1e6)
    return samples


def measure_reads(bench: Bench, pairs: int) -> Samples:
    bench.write_groups()
    sides = (
        Side("read", bench.read),
        Side("raw read", lambda: bench.read_raw(bench.token_bytes)),
        Side("group per trajectory", bench.read_groups),
    )
    samples = measure_pairs(sides, pairs)
    print_samples(f"read {bench.token_bytes / 1e6:.1f} MB", samples, bench.token_bytes / 1e6)
    return samples


def measure_verify(bench: Bench, pairs: int) -> Samples:
    sides = (
        Side("digest", lambda: measure_file(bench.shard)),
        Side("raw read", lambda: bench.read_raw(bench.shard_bytes)),
    )
    samples = measure_pairs(sides, pairs)
    print_samples(f"verify {bench.shard_bytes / 1e6:.1f} MB", samples, bench.shard_bytes / 1e6)
    return samples


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="areal-hpc bench shards", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--pairs", type=int, default=9, help="rounds that count")
    parser.add_argument("--trajectories", type=int, default=512)
    parser.add_argument("--dir", type=Path, help="folder on the disk to measure")
    add_out(parser, "shards")
    arguments = parser.parse_args(argv)

    trajectories = make_trajectories(arguments.trajectories, SHORTEST_TOKENS)
    tokens = sum(trajectory.num_tokens for trajectory in trajectories)
    print(f"{len(trajectories)} trajectories, {tokens} tokens, {arguments.pairs} rounds")
    with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
        bench = Bench(trajectories, Path(folder))
        writes = measure_writes(bench, arguments.pairs)
        reads = measure_reads(bench, arguments.pairs)
        verifies = measure_verify(bench, arguments.pairs)
        megabytes = bench.shard_bytes / 1e6
    figures = {
        "seal_over_raw": wall_ratio(writes, "raw write + fsync", "seal"),
        "read_over_raw": wall_ratio(reads, "raw read", "read"),
        "group_layout_cpu_over_ours_write": cpu_ratio(writes, "group per trajectory", "seal"),
        "group_layout_cpu_over_ours_read": cpu_ratio(reads, "group per trajectory", "read"),
        "verify_over_raw": wall_ratio(verifies, "raw read", "digest"),
    }
    settings = {
        "pairs": arguments.pairs,
        "trajectories": len(trajectories),
        "tokens": tokens,
        "megabytes": round(megabytes, 1),
        "h5py": h5py.__version__,
    }
    report(figures, settings, arguments.out)


if __name__ == "__main__":
    main()
