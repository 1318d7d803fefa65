"""`python -m tests.support.sender_rank CONFIG`: one of two trainer ranks that send weights.

Rank 0 reads orders and writes what came of them, as `tests/support/update_sender.py` does. The
parameters pass from rank 0 to both one by one, as a trainer's do when they are gathered.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from msgspec import Struct
from safetensors.torch import load_file

from areal_hpc.jobs.processes.native_call_threads import (
    exit_at_block_end_if_native_calls_run,
    list_native_calls,
)
from areal_hpc.recipe.sections.weights import WeightsConfig
from areal_hpc.trainer.collectives import broadcast_object
from areal_hpc.trainer.loop.weight_senders import ReplicasBySender, WeightSenders
from areal_hpc.weights.publisher import Publisher, make_transport
from areal_hpc.wire.weight_version import WeightVersion
from tests.support import nccl_like
from tests.support.deadlines import scaled
from tests.support.weight_updates import await_outdated, read_probe, specs_of

RANKS = 2


class Update(Struct):
    """What rank 0 tells the other one."""

    version: WeightVersion
    weights: str
    shares: ReplicasBySender


def stream(weights: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters that both ranks have to take at the same time."""
    for name, tensor in weights.items():
        dist.broadcast(tensor, src=0)
        yield name, tensor


def main() -> None:
    """Update as told until rank 0's standard input ends."""
    config = json.loads(sys.argv[1])
    rank, directory = config["rank"], Path(config["directory"])
    weights = load_file(config["first_weights"])
    settings = WeightsConfig(senders=RANKS, **config["weights"])
    if config["backend"] == nccl_like.BACKEND:
        nccl_like.register()
    store = dist.FileStore(config["store"], RANKS)  # type: ignore[attr-defined]
    limit = timedelta(seconds=scaled(120))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=limit)
    key, cpu = config["service_key"], torch.device("cpu")
    transport = make_transport(settings, key, config["backend"], cpu, directory)
    publisher = Publisher(transport, directory, config["cells"], key) if rank == 0 else None
    senders = WeightSenders(rank, RANKS, specs_of(weights), transport)
    if publisher:
        print(json.dumps({"ready": True}), flush=True)
    while update := broadcast_object(_read_order(config, publisher, senders), Update | None):
        report = senders.send(
            update.version,
            update.shares,
            stream(load_file(update.weights)),
            read_probe(Path(update.weights)),
        )
        if publisher:
            failed = {key.cell: str(why) for key, why in report.failed.items()}
            shares = [[key.cell_and_index for key in share] for share in update.shares]
            ok = [key.cell_and_index for key in report.ok]
            print(json.dumps({"ok": ok, "failed": failed, "shares": shares}), flush=True)
    (publisher or senders).close()
    if not list_native_calls():
        dist.destroy_process_group()


def _read_order(
    config: Mapping[str, Any], publisher: Publisher | None, senders: WeightSenders
) -> Update | None:
    line = sys.stdin.readline() if publisher else ""
    if not line or not publisher:
        return None
    order = json.loads(line)
    version = WeightVersion(config["generation"], order["step"])
    replicas = await_outdated(publisher, version, order["at_least"])
    return Update(version, order["weights"], senders.assign(replicas))


if __name__ == "__main__":
    with exit_at_block_end_if_native_calls_run():
        main()
