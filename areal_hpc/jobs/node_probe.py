"""Health check of a node before a job starts its processes: GPUs, disk, clock, network.

A problem is either the node's fault, and the job goes to another node, or it concerns all nodes
alike, and another node would not help.
"""

import contextlib
import errno
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from areal_hpc.errors import ClusterError
from areal_hpc.jobs.node import parse_visible_device_ids

MAX_CLOCK_SKEW_S = 30.0
"""Allowed difference of clocks, as leases and time limits are compared across nodes."""
STORAGE_ERRNOS = (errno.EROFS, errno.ENOSPC, errno.EDQUOT)
"""Errors of writing that other nodes would meet as well."""
GPU_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 10.0
_GREETING = b"areal-hpc\n"


@dataclass(frozen=True, slots=True)
class NodeProblem:
    reason: str
    is_fault_of_node: bool = True


def probe_node(
    environ: Mapping[str, str], job_dir: Path, least_free_bytes: int, first_address: str
) -> list[NodeProblem]:
    """Find all problems of this node.

    Both the shared storage of `job_dir` and the node's own disk need `least_free_bytes`.
    `first_address` is the address of the job's first task; empty on that task's node.
    """
    local_dir = Path(environ.get("SLURM_TMPDIR") or tempfile.gettempdir())
    findings = [
        *_find_free_space_problems(job_dir, least_free_bytes, is_shared=True),
        *_find_free_space_problems(local_dir, least_free_bytes, is_shared=False),
        *_find_clock_problems(job_dir),
        *(_find_reachability_problems(first_address) if first_address else ()),
    ]
    allocated = list(parse_visible_device_ids(environ) or ())
    if allocated and shutil.which("nvidia-smi"):  # other makes of GPU have other tools
        findings += compare_gpus_with_driver(allocated, *query_gpu_errors())
    return findings


def query_gpu_errors() -> tuple[dict[str, int], str]:
    """Query the errors of the driver's GPUs (`parse_gpu_errors`), and the driver's own error."""
    fields = "index,ecc.errors.uncorrected.volatile.total"
    output, complaint = run_nvidia_smi(f"--query-gpu={fields}", "--format=csv,noheader,nounits")
    return {} if complaint else parse_gpu_errors(output), complaint


def run_nvidia_smi(*words: str) -> tuple[str, str]:
    """Run nvidia-smi; return its output and its error, empty if there is none."""
    try:
        answer = subprocess.run(
            ["nvidia-smi", *words],
            capture_output=True,
            text=True,
            check=False,
            timeout=GPU_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return "", f"nvidia-smi gave no answer within {GPU_TIMEOUT_S:.0f} s"
    if answer.returncode == 0:
        return answer.stdout, ""
    return answer.stdout, (answer.stdout + answer.stderr).strip() or "nvidia-smi failed"


def split_csv(nvidia_smi_output: str) -> list[list[str]]:
    lines = (line.split(",") for line in nvidia_smi_output.splitlines() if line)
    return [[word.strip() for word in line] for line in lines]


def parse_gpu_errors(nvidia_smi_output: str) -> dict[str, int]:
    """Parse the uncorrected errors of each GPU; 0 for a GPU without error correction."""
    rows = split_csv(nvidia_smi_output)
    return {index: int(errors) if errors.isdigit() else 0 for index, errors in rows}


def compare_gpus_with_driver(
    slurm_gpus: list[str], driver_gpus: dict[str, int], complaint: str
) -> list[NodeProblem]:
    """Compare the GPUs that Slurm allocated with those that the driver lists."""
    if complaint:
        return [NodeProblem(f"the GPU driver reports an error: {complaint.splitlines()[0]}")]
    # For MIG slices the driver lists their GPU, once for all slices.
    whole = [name for name in slurm_gpus if not name.startswith("MIG-")]
    if len(driver_gpus) < len(whole):
        return [
            NodeProblem(f"the driver shows {len(driver_gpus)} GPUs, Slurm allocated {len(whole)}")
        ]
    # With device control groups the driver lists only the job's GPUs, counted from 0.
    own = driver_gpus if len(driver_gpus) == len(whole) else driver_gpus.keys() & set(whole)
    return [
        NodeProblem(f"its GPU {index} has {errors} uncorrected memory errors")
        for index, errors in driver_gpus.items()
        if index in own and errors
    ]


def _find_free_space_problems(
    folder: Path, least_bytes: int, *, is_shared: bool
) -> list[NodeProblem]:
    try:
        free_bytes = shutil.disk_usage(folder).free
    except OSError as error:
        return [NodeProblem(f"{folder} cannot be read: {error.strerror}")]
    if free_bytes >= least_bytes:
        return []
    free_mib, least_mib = free_bytes / 2**20, least_bytes / 2**20
    reason = f"{folder} has {free_mib:,.0f} MiB free, expected at least {least_mib:,.0f} MiB"
    return [NodeProblem(reason, is_fault_of_node=not is_shared)]


def _find_clock_problems(folder: Path) -> list[NodeProblem]:
    """Compare this node's clock with that of the shared storage, which may answer slowly."""
    try:
        before = time.time()
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".probe-") as file:
            written_at = os.fstat(file.fileno()).st_mtime
            after = time.time()
    except OSError as error:
        reason = f"{folder} cannot be written: {error.strerror}"
        return [NodeProblem(reason, is_fault_of_node=not is_fault_of_storage(error))]
    return find_clock_skew_problems(compute_clock_skew_s(before, written_at, after), folder)


def compute_clock_skew_s(before: float, written_at: float, after: float) -> float:
    """Compute the least skew that explains the time of a file made between two clock readings."""
    return max(0.0, before - written_at) + min(0.0, after - written_at)


def is_fault_of_storage(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in STORAGE_ERRNOS


def find_clock_skew_problems(skew_s: float, folder: Path) -> list[NodeProblem]:
    """Report a clock skew that is too large; a positive skew means that the node is ahead."""
    if abs(skew_s) <= MAX_CLOCK_SKEW_S:
        return []
    return [NodeProblem(f"its clock differs by {skew_s:+.0f} s from that of {folder}")]


def _find_reachability_problems(address: str) -> list[NodeProblem]:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S) as connection:
            connection.settimeout(CONNECT_TIMEOUT_S)
            if connection.recv(len(_GREETING), socket.MSG_WAITALL) == _GREETING:
                return []
            return [NodeProblem(f"something else answered at {address}")]
    except OSError as error:
        return [NodeProblem(f"cannot reach the job's first node at {address}: {error}")]


class ReachabilityServer:
    """Server on a job's first node that answers the other nodes' connection probes."""

    def __init__(self, host: str) -> None:
        """Listen.

        Raises:
            ClusterError: The address is not this node's.
        """
        try:
            self._listener = socket.create_server((host, 0), backlog=1024)
        except OSError as error:
            raise ClusterError(
                f"cannot listen on {host}: {error}",
                key="cluster.slurm.network.interface",
                hint="set AREAL_HPC_HOST to an address of this host",
            ) from error
        self.address = f"{host}:{self._listener.getsockname()[1]}"

    def start_answering(self, for_s: float) -> None:
        threading.Thread(
            target=self._answer_probes, args=(for_s,), name="greeter", daemon=True
        ).start()

    def _answer_probes(self, for_s: float) -> None:
        give_up_at = time.monotonic() + for_s
        with self._listener:
            while (left_s := give_up_at - time.monotonic()) > 0:
                self._listener.settimeout(left_s)
                try:
                    connection, _ = self._listener.accept()
                except TimeoutError:
                    return
                with connection, contextlib.suppress(OSError):  # the client hung up
                    connection.sendall(_GREETING)
