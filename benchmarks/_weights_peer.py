"""The receiver of `benchmarks.weights`: `python -m benchmarks._weights_peer SPECS.json`.

Each line of standard input is an order: take one transfer in, as plain broadcasts of the buckets'
bytes (`bare`) or through the codec (`codec`).
"""

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from areal_hpc.weights.buckets import BucketPlan, PackingBuffers, TensorSpec, plan_buckets

TIMEOUT_S = 120.0


def join(name: str, port: int, backend: str) -> dist.ProcessGroup:
    """Rank 1 of an update group, joined as SGLang joins it."""
    store = dist.TCPStore("127.0.0.1", port, None, False)  # type: ignore[attr-defined]
    group, _ = c10d._new_process_group_helper(
        2,
        1,
        [],
        c10d.Backend(backend),
        c10d.PrefixStore(name, store),
        group_name=c10d.GroupName(name),
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    assert isinstance(group, dist.ProcessGroup)
    c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
    return group


def read_specs(path: Path) -> list[TensorSpec]:
    """Read the tensors' specifications, from which both ends plan buckets."""
    held = json.loads(path.read_text())
    return [TensorSpec(name, tuple(shape), dtype) for name, shape, dtype in held]


def receive(
    group: dist.ProcessGroup, buckets: list[BucketPlan], buffers: PackingBuffers, *, packed: bool
) -> None:
    """Receive every bucket as a replica does."""
    for bucket in buckets:
        held = buffers.open_bucket_in_older_buffer(bucket)
        messages = held.tensors_to_send if packed else held.tensors.values()
        works = [dist.broadcast(message, src=0, group=group, async_op=True) for message in messages]
        for work in works:
            work.wait()
        assert len(held.tensors) == len(bucket.specs)


def main() -> None:
    """Receive the ordered transfers until standard input ends."""
    config = json.loads(Path(sys.argv[1]).read_text())
    device = torch.device(config["device"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    buckets = plan_buckets(read_specs(Path(config["specs"])), config["bucket_bytes"])
    buffers = PackingBuffers(device)
    group = join(config["name"], config["port"], config["backend"])
    done = torch.zeros(1, device=device)
    for line in sys.stdin:
        if line.strip() == "codec":
            receive(group, buckets, buffers, packed=config["packed"])
        else:
            for bucket in buckets:
                dist.broadcast(
                    buffers.open_bucket_in_older_buffer(bucket).tensors_to_send[0],
                    src=0,
                    group=group,
                )
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        dist.broadcast(done, src=1, group=group)


if __name__ == "__main__":
    main()
