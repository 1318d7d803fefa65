"""Life of one rank of a training job: rendezvous, process groups, work, and leaving the groups."""

import datetime
import logging
import os
import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from areal_hpc.errors import ClusterError, LostTrainerRankError, RecipeError, StopRequestedError
from areal_hpc.jobs.node import (
    LOOPBACK_ADDRESS,
    TaskPosition,
    find_visible_gpus,
    get_advertised_host,
    get_task_log_dir,
    get_task_position,
    runs_on_one_node,
)
from areal_hpc.jobs.processes.native_call_threads import (
    list_native_calls,
    mark_native_threads_ended,
    note_library_threads,
)
from areal_hpc.jobs.processes.process_setup import StopRequest
from areal_hpc.recipe.sections.trainer import ParallelConfig
from areal_hpc.rundir import rendezvous
from areal_hpc.rundir.jobs import STOPPED_EXIT_CODE
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.telemetry.events import RANKS_HANG_EVENT, EventLog
from areal_hpc.trainer.collectives import (
    RankProgress,
    raise_for_lost_rank,
    report_first_failure,
)
from areal_hpc.trainer.config import RankJobConfig
from areal_hpc.trainer.model.cpu import megatron_cpu
from areal_hpc.trainer.private_apis.megatron_replacing_packages import (
    refuse_megatron_replacements,
)
from areal_hpc.trainer.private_apis.torch_private import (
    activate_flash_attention_4,
    get_default_store,
)

JobT = TypeVar("JobT", bound=RankJobConfig)

JOIN_RANKS_TIMEOUT_S = 300.0
COLLECTIVE_TIMEOUT_S = 1800.0
ARRIVED_RANK_COUNT_KEY = "arrived"
NATIVE_THREADS_OWNER = "torch.distributed"
ARRIVAL_POLL_S = 0.2
FLIGHT_RECORD_VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""Newer and older name of torch's variable for the path of its record of the last collectives,
which it writes when one fails; torch appends the rank."""

logger = logging.getLogger(__name__)


def run_rank(
    job: JobT,
    stop: StopRequest,
    train: Callable[[JobT, RunPaths, torch.device, StopRequest], bool],
) -> None:
    """Join the other ranks, call `train` as this rank's part in the work, and leave.

    `train` returns whether the work is complete. A stop also ends the wait for other ranks.
    """
    refuse_megatron_replacements()
    megatron_cpu.patch_torch_megatron_without_gpu()
    paths = RunPaths(job.run_dir)
    for variable in FLIGHT_RECORD_VARIABLES:  # torch reads them at its first write
        log_dir = get_task_log_dir(paths.logs_dir)
        os.environ.setdefault(variable, str(log_dir / "nccl_flight_record_rank_"))
    try:
        device = join_process_groups(
            get_task_position(),
            job.recipe.trainer.parallel,
            job.recipe.trainer.device,
            paths.rendezvous_dir,
            is_cancelled=lambda: stop.requested,
        )
    except ClusterError as error:
        if not stop.requested:
            raise
        logger.info("%s", error)
        raise SystemExit(STOPPED_EXIT_CODE) from error
    except RuntimeError as error:
        raise_for_lost_rank(error)
        raise
    with _watch_for_hanging_ranks(paths), report_first_failure():
        try:
            finished = train(job, paths, device, stop)
        except StopRequestedError:  # on all ranks, before they began any work
            finished = False
    if not list_native_calls():  # of an update group or the store: torch would wait for them
        destroy_process_groups()
    if not finished:
        raise SystemExit(STOPPED_EXIT_CODE)


def join_process_groups(
    task: TaskPosition,
    parallel: ParallelConfig,
    device: Literal["auto", "cpu", "cuda"],
    rendezvous_dir: Path,
    *,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> torch.device:
    """Join all ranks of the trainer, build Megatron's groups, and return this rank's device.

    Without a GPU `megatron_cpu.patch_torch_megatron_without_gpu` must come first.
    """
    if task.num_tasks != parallel.world_size:
        raise RecipeError(
            f"the layout tp x pp x cp x dp needs {parallel.world_size} ranks, "
            f"the job has {task.num_tasks} tasks",
            key="trainer.parallel",
        )
    own_device = _set_device(device, task.local_rank)
    if own_device.type == "cuda":
        has_flash_4 = activate_flash_attention_4(own_device)
        logger.info("attention runs FlashAttention-%d", 4 if has_flash_4 else 2)
    give_up_at = time.monotonic() + JOIN_RANKS_TIMEOUT_S
    store = _join_store(task, rendezvous_dir, give_up_at, is_cancelled)
    _await_all_ranks(store, task, give_up_at, is_cancelled)
    note_library_threads(NATIVE_THREADS_OWNER)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if own_device.type == "cuda" else "gloo",
        store=store,
        rank=task.rank,
        world_size=task.num_tasks,
        timeout=datetime.timedelta(seconds=COLLECTIVE_TIMEOUT_S),
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        # An expert is small and stays whole: only attention is divided over tensor-parallel ranks.
        expert_tensor_parallel_size=1,
    )
    # Its layers draw no random numbers (dropout is 0), but Megatron requires seeded trackers.
    model_parallel_cuda_manual_seed(1)
    return own_device


def _watch_for_hanging_ranks(paths: RunPaths) -> AbstractContextManager[None]:
    if dist.get_world_size() == 1:
        return nullcontext()
    events = EventLog(paths.events, "trainer")
    return RankProgress(
        get_default_store(),
        dist.get_rank(),
        dist.get_world_size(),
        lambda line: events.record(RANKS_HANG_EVENT, ranks=line),
    ).watch()


def destroy_process_groups() -> None:
    """Leave the groups, whose threads end with them."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    mark_native_threads_ended(NATIVE_THREADS_OWNER)


def _set_device(device_setting: str, local_rank: int) -> torch.device:
    if device_setting == "cpu" or (device_setting == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ClusterError("trainer.device is cuda, and this node shows no GPU")
    visible = torch.cuda.device_count()
    index = 0 if visible == 1 else local_rank  # a single visible GPU is bound to this task
    if index >= visible:
        raise ClusterError(
            f"local rank {local_rank} of the trainer needs a GPU of its own, and {visible} are "
            f"visible to it ({find_visible_gpus(os.environ).source})",
            key="cluster.slurm.srun",
            hint="show each task one GPU (--gpus-per-task=1), or all of its node's (no --gpu-bind)",
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _join_store(
    task: TaskPosition,
    rendezvous_dir: Path,
    give_up_at: float,
    is_cancelled: Callable[[], bool],
) -> dist.Store:  # type: ignore[name-defined]
    if task.num_tasks == 1:
        return dist.HashStore()  # type: ignore[attr-defined]
    if task.is_first:
        host = LOOPBACK_ADDRESS if runs_on_one_node() else get_advertised_host()
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, 0), family=family)
        port = listener.getsockname()[1]
        # The store takes over the descriptor, so that it listens on this address only.
        store = dist.TCPStore(  # type: ignore[attr-defined]
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        rendezvous.publish_endpoint(
            rendezvous_dir, rendezvous.RANK_STORE_SERVICE, f"tcp://{host}:{port}"
        )
        return store
    return _connect_to_store(task, rendezvous_dir, give_up_at, is_cancelled)


def _connect_to_store(
    task: TaskPosition,
    rendezvous_dir: Path,
    give_up_at: float,
    is_cancelled: Callable[[], bool],
) -> dist.Store:  # type: ignore[name-defined]
    """Connect to rank 0's store of this start. The file may still name a store of an earlier start.

    That store is either gone, or has already counted this rank: each store accepts a rank once.
    """
    used_urls: set[str] = set()
    while time.monotonic() < give_up_at and not is_cancelled():
        endpoint = rendezvous.find_endpoint(rendezvous_dir, rendezvous.RANK_STORE_SERVICE)
        if endpoint is None or endpoint.url in used_urls:
            time.sleep(0.1)
            continue
        host, _, port = endpoint.url.removeprefix("tcp://").rpartition(":")
        try:
            # Refused at once without a listener; the store's own client would retry for seconds.
            socket.create_connection((host, int(port)), timeout=2).close()
            store = dist.TCPStore(  # type: ignore[attr-defined]
                host, int(port), is_master=False, timeout=datetime.timedelta(seconds=5)
            )
            if store.add(f"joined/{task.rank}", 1) == 1:
                return store
            used_urls.add(endpoint.url)
        except (OSError, dist.DistNetworkError, dist.DistStoreError) as error:
            logger.debug("the rendezvous store at %s is gone (%s)", endpoint.url, error)
            time.sleep(0.1)
    if is_cancelled():
        raise ClusterError(f"rank {task.rank} was stopped while it waited for rank 0")
    raise ClusterError(
        f"rank {task.rank} found no living {rendezvous.RANK_STORE_SERVICE} "
        f"within {JOIN_RANKS_TIMEOUT_S:.0f} s",
        hint="read rank 0's log in logs/latest",
    )


def _await_all_ranks(
    store: dist.Store,  # type: ignore[name-defined]
    task: TaskPosition,
    give_up_at: float,
    is_cancelled: Callable[[], bool],
) -> None:
    """Wait until every rank has the store: torch's own wait is as long as that of a collective."""
    try:
        store.set(f"arrived/{task.rank}", "")
        arrived = store.add(ARRIVED_RANK_COUNT_KEY, 1)
        while arrived < task.num_tasks:
            if is_cancelled():
                raise ClusterError(f"rank {task.rank} was stopped while it waited for other ranks")
            if time.monotonic() >= give_up_at:
                ranks = range(task.num_tasks)
                missing = [rank for rank in ranks if not store.check([f"arrived/{rank}"])]
                raise ClusterError(
                    f"of {task.num_tasks} trainer ranks these did not come within "
                    f"{JOIN_RANKS_TIMEOUT_S:.0f} s: {', '.join(map(str, missing))}",
                    hint="read their logs in logs/latest; a rank without one has a node that hangs",
                )
            time.sleep(ARRIVAL_POLL_S)
            arrived = store.add(ARRIVED_RANK_COUNT_KEY, 0)
    except RuntimeError as error:
        raise LostTrainerRankError(
            f"rank 0 ended while rank {task.rank} waited for other ranks: {error}",
            hint="read rank 0's log in logs/latest",
        ) from error
