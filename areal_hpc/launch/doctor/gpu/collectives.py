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
from areal_hpc.launch.doctor.gpu.plan import GpuCheckPlan
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
    """Position of this node's ranks among those of all nodes."""

    node: int = 0
    nodes: int = 1
    node_address: str = LOOPBACK_ADDRESS


def list_rank_gpus(plan: GpuCheckPlan, visible_gpu_ids: Sequence[str]) -> tuple[str, ...]:
    return tuple(visible_gpu_ids) if plan.device == "cuda" else ("",) * REHEARSAL_RANKS


def measure_collectives(
    plan: GpuCheckPlan, gpus: Sequence[str], folder: Path, rank_place: RankPlace = RankPlace()
) -> CollectiveRates | None:
    """Run this node's ranks. The node of rank 0 gets the figures, others None.

    Each node has as many GPUs as this one: the job asks for them.
    """
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
    if rank_place.node:
        return None
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
    first_rank = rank_place.node * len(gpus)
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for local_rank, gpu in enumerate(gpus):
            rank = first_rank + local_rank
            variables = {
                "AREAL_HPC_RANK": str(rank),
                "AREAL_HPC_NUM_TASKS": str(rank_place.nodes * len(gpus)),
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
        _await_ranks(ranks, first_rank, request_file.parent)
    finally:
        for process in ranks:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _await_ranks(ranks: Sequence[subprocess.Popen[bytes]], first_rank: int, folder: Path) -> None:
    give_up_at = time.monotonic() + TIMEOUT_S
    while True:
        codes = {rank: process.poll() for rank, process in enumerate(ranks, start=first_rank)}
        for rank, code in codes.items():
            if code:
                log = read_tail_lines(folder / f"rank-{rank}.log", LOG_TAIL_BYTES)
                line = find_error_line(log.decode(errors="replace")) or "no output"
                raise ClusterError(f"rank {rank} exited with code {code}: {line}")
        late = [f"rank {rank}" for rank, code in codes.items() if code is None]
        if not late:
            return
        if time.monotonic() > give_up_at:
            raise ClusterError(f"no end of {', '.join(late)} within {TIMEOUT_S:.0f} s")
        time.sleep(POLL_S)
