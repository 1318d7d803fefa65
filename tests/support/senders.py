"""Trainer ranks that send weights, each a process of its own, and their orders.

`python -m tests.support.senders CONFIG` is one rank. The parameters pass from rank 0 to all one by
one, as a trainer's do when they are gathered.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from msgspec import Struct
from safetensors.torch import load_file

from areal_hpc.jobs.processes.native_call_threads import (
    exit_beside_native_calls,
    list_native_calls,
)
from areal_hpc.recipe.sections.inference import WeightsConfig
from areal_hpc.trainer.collectives import broadcast_object, gather_objects_on_first_rank
from areal_hpc.weights.publisher import (
    Publisher,
    ReplicasBySender,
    WeightSenders,
    make_transport,
)
from areal_hpc.wire.weight_version import WeightVersion
from tests.support import nccl_like
from tests.support.deadlines import scaled
from tests.support.environments import CHECKOUT
from tests.support.service_keys import SERVICE_KEY
from tests.support.weight_updates import await_outdated, read_probe, specs_of


class Senders:
    """The ranks of one generation of a trainer, which find control proxies in a folder."""

    def __init__(
        self,
        directory: Path,
        log_dir: Path,
        *,
        cells: int,
        ranks: int = 1,
        backend: str = "gloo",
        service_key: str = SERVICE_KEY,
        generation: int = 1,
        **weights: Any,
    ) -> None:
        self.generation = generation
        self._is_ready = False
        config = {
            "directory": str(directory),
            "store": str(log_dir / f"store.{generation}"),
            "service_key": service_key,
            "generation": generation,
            "cells": cells,
            "ranks": ranks,
            "backend": backend,
            "weights": {"bucket_bytes": 100_000, **weights},
        }
        self.processes = []
        for rank in range(ranks):
            pipe = subprocess.DEVNULL if rank else subprocess.PIPE
            with (log_dir / f"sender.{generation}.{rank}.log").open("wb") as log:
                command = [sys.executable, "-m", "tests.support.senders"]
                self.processes.append(
                    subprocess.Popen(
                        [*command, json.dumps({**config, "rank": rank})],
                        stdin=pipe, stdout=pipe, stderr=log, cwd=CHECKOUT,
                    )
                )  # fmt: skip
        first = self.processes[0]
        assert first.stdin is not None
        assert first.stdout is not None
        self._orders, self._reports = first.stdin, first.stdout

    def await_ready(self) -> None:
        if not self._is_ready:
            assert self.read() == {"ready": True}
            self._is_ready = True

    def order(self, step: int, weights: Path, at_least: int) -> None:
        """Have all replicas updated that lack the step, so many or more; `read` has the report."""
        order = {"step": step, "weights": str(weights), "at_least": at_least}
        self._orders.write(json.dumps(order).encode() + b"\n")
        self._orders.flush()

    def read(self) -> dict[str, Any] | None:
        line = self._reports.readline()
        report: dict[str, Any] | None = json.loads(line) if line else None
        return report

    def publish(self, step: int, weights: Path, at_least: int) -> dict[str, Any]:
        self.order(step, weights, at_least)
        report = self.read()
        assert report is not None, "rank 0 is gone: read its log"
        return report

    def stop(self) -> list[int]:
        with suppress(OSError):
            self._orders.close()
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(scaled(20))
            process.kill()
        self._reports.close()
        return [process.wait() for process in self.processes]


@contextmanager
def sender_ranks(*paths: Path, **settings: Any) -> Iterator[Senders]:
    """Two ranks, which end in order, with code 0."""
    senders = Senders(*paths, ranks=2, **settings)
    try:
        senders.await_ready()
        yield senders
    finally:
        codes = senders.stop()
    assert codes == [0, 0]


class _Update(Struct):
    version: WeightVersion
    weights: str
    shares: ReplicasBySender


def _stream(weights: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters, which all ranks have to take at the same time."""
    for name, tensor in weights.items():
        dist.broadcast(tensor, src=0)
        yield name, tensor


def main() -> None:
    """Update on orders until rank 0's standard input ends."""
    config = json.loads(sys.argv[1])
    rank, ranks, directory = config["rank"], config["ranks"], Path(config["directory"])
    if config["backend"] == nccl_like.BACKEND:
        nccl_like.register()
    store = dist.FileStore(config["store"], ranks)  # type: ignore[attr-defined]
    limit = timedelta(seconds=scaled(120))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=limit)
    key, settings = config["service_key"], WeightsConfig(senders=ranks, **config["weights"])
    transport = make_transport(settings, key, config["backend"], torch.device("cpu"), directory)
    publisher = Publisher(transport, directory, config["cells"], key) if rank == 0 else None
    made: list[WeightSenders] = []

    def get_senders(file: str) -> WeightSenders:
        """Return this rank's senders, made with the first weights: all have the same parameters."""
        if not made:
            specs = specs_of(load_file(file))
            made.append(WeightSenders(rank, ranks, specs, transport, gather_objects_on_first_rank))
        return made[0]

    def read_order() -> _Update | None:
        line = sys.stdin.readline() if publisher else ""
        if not line or not publisher:
            return None
        order = json.loads(line)
        version = WeightVersion(config["generation"], order["step"])
        replicas = await_outdated(publisher, version, order["at_least"])
        file = order["weights"]
        return _Update(version, file, get_senders(file).assign(replicas))

    if publisher:
        print(json.dumps({"ready": True}), flush=True)
    while update := broadcast_object(read_order(), _Update | None):
        parameters, probe = _stream(load_file(update.weights)), read_probe(Path(update.weights))
        senders = get_senders(update.weights)
        report = senders.send(update.version, update.shares, parameters, probe)
        if publisher:
            outcome = {
                "ok": [key.cell_and_index for key in report.ok],
                "failed": {key.cell: str(why) for key, why in report.failed.items()},
                "shares": [[key.cell_and_index for key in share] for share in update.shares],
                "ended_at": time.monotonic(),
            }
            print(json.dumps(outcome), flush=True)
    (publisher or transport).close()
    if not list_native_calls():
        dist.destroy_process_group()


if __name__ == "__main__":
    with exit_beside_native_calls():
        main()
