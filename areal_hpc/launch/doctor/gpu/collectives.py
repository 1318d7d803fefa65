"""All-reduce and a ring of messages between GPUs, run as the trainer's ranks would be."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from areal_hpc.errors import ClusterError
from areal_hpc.inference.server.sglang_server import find_error_line
from areal_hpc.jobs.node.gpus import VISIBLE_DEVICES_VARIABLE
from areal_hpc.jobs.node.topology import LOOPBACK_ADDRESS
from areal_hpc.launch.doctor.gpu.report import GpuCheckPlan, Unmeasured
from areal_hpc.rundir.jsonl import read_tail_lines
from areal_hpc.trainer.config import CollectiveRates, CollectivesRequest

COLLECTIVES_MODULE = "areal_hpc.trainer.collective_rates"
DIE_WITH_PARENT_MODULE = "areal_hpc.jobs.processes.die_with_parent"
SIZE_BYTES_BY_DEVICE = {"cuda": 256 << 20, "cpu": 4 << 20}
ROUNDS = 5
TIMEOUT_S = 300.0
POLL_S = 0.2
LOG_TAIL_BYTES = 65536
REHEARSAL_RANKS = 2


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where this node's ranks stand among all."""

    node: int = 0
    first_rank: int = 0
    world_size: int | None = None
    """Of all nodes; None: those of this one."""
    node_address: str = LOOPBACK_ADDRESS


def list_rank_gpus(plan: GpuCheckPlan, visible_gpu_ids: Sequence[str]) -> tuple[str, ...]:
    return tuple(visible_gpu_ids) if plan.device == "cuda" else ("",) * REHEARSAL_RANKS


def measure_collectives(
    plan: GpuCheckPlan, gpus: Sequence[str], folder: Path, rank_place: RankPlace = RankPlace()
) -> CollectiveRates | Unmeasured:
    """Run this node's ranks. The node of rank 0 has the figures."""
    world_size = rank_place.world_size or len(gpus)
    if world_size < 2:
        return Unmeasured("one GPU has nobody to exchange with", is_failure=False)
    request = CollectivesRequest(
        device=plan.device,
        size_bytes=SIZE_BYTES_BY_DEVICE[plan.device],
        rounds=ROUNDS,
        rendezvous_dir=str(folder / "stores"),
        report=str(folder / "rates.json"),
    )
    folder.mkdir(parents=True, exist_ok=True)
    request_file = folder / f"request.{rank_place.node}.json"
    request_file.write_bytes(msgspec.json.encode(request))
    run_ranks(plan, COLLECTIVES_MODULE, request_file, gpus, rank_place)
    if rank_place.first_rank:
        return Unmeasured("the figures are on the first node", is_failure=False)
    return msgspec.json.decode(Path(request.report).read_bytes(), type=CollectiveRates)


def run_ranks(
    plan: GpuCheckPlan,
    module: str,
    request_file: Path,
    gpus: Sequence[str],
    rank_place: RankPlace = RankPlace(),
) -> None:
    """Run `python -m module REQUEST_FILE` as this node's ranks, a GPU each, to their ends.

    Raises:
        ClusterError: A rank failed, or they did not end in time.
    """
    ranks = []
    try:
        for local_rank, gpu in enumerate(gpus):
            rank = rank_place.first_rank + local_rank
            variables = {
                "AREAL_HPC_RANK": str(rank),
                "AREAL_HPC_NUM_TASKS": str(rank_place.world_size or len(gpus)),
                "AREAL_HPC_LOCAL_RANK": str(local_rank),
                "AREAL_HPC_NODE_RANK": str(rank_place.node),
                "AREAL_HPC_HOST": rank_place.node_address,
                VISIBLE_DEVICES_VARIABLE: gpu,
            }
            command = [plan.pythons["train"], "-m", module, str(request_file)]
            with (request_file.parent / f"rank-{rank}.log").open("wb") as log:
                ranks.append(
                    subprocess.Popen(
                        [sys.executable, "-m", DIE_WITH_PARENT_MODULE, str(os.getpid()), *command],
                        env={**os.environ, **plan.variables["train"], **variables},
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        _await_ranks(ranks, rank_place.first_rank, request_file.parent)
    finally:
        for process in ranks:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _await_ranks(ranks: Sequence[subprocess.Popen[bytes]], first_rank: int, folder: Path) -> None:
    give_up_at = time.monotonic() + TIMEOUT_S
    while True:
        codes = [process.poll() for process in ranks]
        for rank, code in enumerate(codes, start=first_rank):
            if code:
                log = read_tail_lines(folder / f"rank-{rank}.log", LOG_TAIL_BYTES)
                line = find_error_line(log.decode(errors="replace")) or "no output"
                raise ClusterError(f"rank {rank} exited with code {code}: {line}")
        if None not in codes:
            return
        if time.monotonic() > give_up_at:
            late = ", ".join(
                f"rank {first_rank + at}" for at, code in enumerate(codes) if code is None
            )
            raise ClusterError(f"no end of {late} within {TIMEOUT_S:.0f} s")
        time.sleep(POLL_S)
