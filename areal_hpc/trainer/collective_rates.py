"""Network rates between trainer ranks: one rank of a measured all-reduce and ring exchange.

Each rank runs it once with the variables of its position, over the backend that training uses.
"""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from areal_hpc.jobs.node import get_task_position
from areal_hpc.recipe.sections.trainer import ParallelConfig
from areal_hpc.rundir.files import write_atomic
from areal_hpc.trainer.collectives import all_reduce_max
from areal_hpc.trainer.config import CollectiveRates, CollectivesRequest
from areal_hpc.trainer.model.cpu import megatron_cpu
from areal_hpc.trainer.process_groups import (
    destroy_process_groups,
    join_process_groups,
)
from areal_hpc.wire.decoding import decode_json

WARM_UP_ROUNDS = 2
"""Rounds that are not measured: NCCL makes its communicators in the first collective."""
PATTERN_PERIOD = 251


def run_collectives(
    device: torch.device, collectives_request: CollectivesRequest
) -> CollectiveRates:
    """Return the rates of this group of ranks, equal on all of them. A collective."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    count = collectives_request.size_bytes // 4
    pattern = torch.arange(count, device=device).remainder_(PATTERN_PERIOD).float()

    summed = pattern * (rank + 1)
    dist.all_reduce(summed)
    # Whole numbers this small are exact in float32, in any order of summation.
    wrong = int((summed != pattern * (ranks * (ranks + 1) // 2)).sum())
    received = torch.empty_like(pattern)
    _send_around_ring(pattern + rank, received)
    wrong += int((received != pattern + (rank - 1) % ranks).sum())

    reduced = torch.zeros_like(pattern)
    reduce_s = _measure_median_round_s(
        lambda: dist.all_reduce(reduced), device, collectives_request.rounds
    )
    ring_s = _measure_median_round_s(
        lambda: _send_around_ring(pattern, received), device, collectives_request.rounds
    )
    wrongs = torch.tensor(wrong)
    dist.all_reduce(wrongs)
    return CollectiveRates(
        ranks=ranks,
        backend="nccl" if device.type == "cuda" else "gloo",
        size_bytes=4 * count,
        all_reduce_bytes_per_s=2 * (ranks - 1) / ranks * 4 * count / reduce_s,
        ring_bytes_per_s=4 * count / ring_s,
        wrong_elements=int(wrongs),
    )


def _send_around_ring(sent: torch.Tensor, received: torch.Tensor) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, sent, (rank + 1) % ranks),
            dist.P2POp(dist.irecv, received, (rank - 1) % ranks),
        ]
    )
    for work in works:
        work.wait()


def _measure_median_round_s(
    run_round: Callable[[], object], device: torch.device, rounds: int
) -> float:
    times_s = []
    for number in range(WARM_UP_ROUNDS + rounds):
        dist.barrier()
        began_s = time.perf_counter()
        run_round()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if number >= WARM_UP_ROUNDS:
            times_s.append(time.perf_counter() - began_s)
    return all_reduce_max(round(1e9 * statistics.median(times_s))) / 1e9


def main() -> None:
    """Take part as the rank that the environment specifies."""
    request = decode_json(Path(sys.argv[1]).read_bytes(), CollectivesRequest)
    task = get_task_position()
    parallel = ParallelConfig(dp=task.num_tasks)
    megatron_cpu.patch_torch_megatron_without_gpu()
    device = join_process_groups(task, parallel, request.device, Path(request.rendezvous_dir))
    rates = run_collectives(device, request)
    if task.is_first:
        write_atomic(Path(request.report), msgspec.json.encode(rates))
    destroy_process_groups()


if __name__ == "__main__":
    main()
