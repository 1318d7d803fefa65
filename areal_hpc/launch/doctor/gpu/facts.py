"""Facts of this node: driver, GPUs, RDMA, limits, and what each role's Python sees."""

import ctypes
import os
import re
import resource
import shutil
import socket
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import cast

import msgspec
from msgspec import Struct

from areal_hpc.jobs.node.gpus import (
    find_visible_gpus,
    read_numa_node_by_gpu,
    select_wanted_gpus_or_raise,
)
from areal_hpc.launch.doctor.gpu.plan import GpuCheckPlan
from areal_hpc.launch.role_python import RolePythonError, ask_role
from areal_hpc.recipe.sections.cluster import WantedGpus

GPU_ROLES = ("train", "serve")
PYTHON_TIMEOUT_S = 180.0
"""To import torch from cold storage, and to wake every GPU."""
DRIVER_TIMEOUT_S = 30.0
CUDA_DIRS = (Path("/usr/local/cuda"),)
"""Where CUDA's compiler lies if neither PATH nor CUDA_HOME names it."""

_GPU_FACTS_SCRIPT = """
import json, torch
found = {"torch": torch.__version__, "cuda": torch.version.cuda or "", "nccl": "", "gpus": []}
if torch.version.cuda:
    found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    found["gpus"] = [torch.cuda.get_device_name(one) for one in range(torch.cuda.device_count())]
print(json.dumps(found))
"""


class GpuFacts(Struct, frozen=True):
    """One GPU as its driver lists it."""

    name: str
    memory_mib: int


class PythonFacts(Struct, frozen=True):
    """What a role's Python sees of GPUs."""

    role: str
    python: str
    torch: str = ""
    cuda: str = ""
    """Version that torch was built for; empty: for CPUs."""
    nccl: str = ""
    """Version that torch has loaded."""
    gpus: tuple[str, ...] = ()
    """Names."""
    error: str = ""
    """Why it could not be asked; empty if it could."""


class NodeFacts(Struct, frozen=True):
    host: str
    visible_gpus: tuple[str, ...]
    visible_source: str
    driver: str = ""
    """Version of NVIDIA's driver; empty: there is none."""
    driver_error: str = ""
    gpus: tuple[GpuFacts, ...] = ()
    has_nvlink: bool = False
    has_ibverbs: bool = False
    rdma_devices: tuple[str, ...] = ()
    """Files of /dev/infiniband through which programs reach adapters."""
    memlock_bytes: int | None = None
    """Memory that a process may lock; None: any amount."""
    nvcc: str = ""
    """Path of CUDA's compiler; empty: there is none."""
    pythons: tuple[PythonFacts, ...] = ()


def gather_node_facts(plan: GpuCheckPlan) -> NodeFacts:
    visible = select_wanted_gpus_or_raise(
        find_visible_gpus(os.environ), cast("WantedGpus", plan.gpus), read_numa_node_by_gpu()
    )
    listed = driver_error = topology = ""
    if shutil.which("nvidia-smi") is not None:
        listed, driver_error = _run_nvidia_smi(
            "--query-gpu=driver_version,name,memory.total", "--format=csv,noheader,nounits"
        )
        topology, _ = _run_nvidia_smi("topo", "-m")
    driver, gpus = parse_nvidia_smi_gpus("" if driver_error else listed)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return NodeFacts(
        host=socket.gethostname(),
        visible_gpus=visible.ids,
        visible_source=visible.source,
        driver=driver,
        driver_error=driver_error,
        gpus=gpus,
        has_nvlink=has_nvlink(topology),
        has_ibverbs=_can_load_library("libibverbs.so.1"),
        rdma_devices=tuple(sorted(one.name for one in Path("/dev/infiniband").glob("uverbs*"))),
        memlock_bytes=None if soft == resource.RLIM_INFINITY else soft,
        nvcc=find_nvcc(os.environ, CUDA_DIRS),
        pythons=tuple(
            ask_python_for_gpu_facts(role, plan.pythons[role], plan.variables[role])
            for role in GPU_ROLES
        ),
    )


def parse_nvidia_smi_gpus(nvidia_smi_output: str) -> tuple[str, tuple[GpuFacts, ...]]:
    """Version of the driver and the GPUs in the lines of nvidia-smi. Pure."""
    rows = [
        [word.strip() for word in line.split(",")]
        for line in nvidia_smi_output.splitlines()
        if line
    ]
    gpus = tuple(GpuFacts(name, int(memory) if memory.isdigit() else 0) for _, name, memory in rows)
    return rows[0][0] if rows else "", gpus


def has_nvlink(topology: str) -> bool:
    """True if a matrix of `nvidia-smi topo -m` joins GPUs by NVLink (as NV18). Pure."""
    return bool(re.search(r"^GPU\d+\s.*\bNV\d+\b", topology, re.MULTILINE))


def find_nvcc(environ: Mapping[str, str], default_cuda_homes: tuple[Path, ...]) -> str:
    """CUDA's compiler, in the places and the order in which kernel compilers look for it."""
    homes = [Path(environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if environ.get(name)]
    on_path = shutil.which("nvcc", path=environ.get("PATH"))
    candidates = [*(home / "bin" / "nvcc" for home in homes), *([Path(on_path)] if on_path else [])]
    candidates += [home / "bin" / "nvcc" for home in default_cuda_homes]
    return next((str(path) for path in candidates if os.access(path, os.X_OK)), "")


def ask_python_for_gpu_facts(role: str, python: str, variables: Mapping[str, str]) -> PythonFacts:
    """Facts from a role's Python, run with the variables of the role's processes."""
    program = ("-W", "ignore", "-c", _GPU_FACTS_SCRIPT)
    environ = {**os.environ, **variables}
    try:
        found = ask_role(python, *program, environ=environ, timeout_s=PYTHON_TIMEOUT_S)
    except RolePythonError as error:
        late = f"importing torch and asking for GPUs took more than {PYTHON_TIMEOUT_S:.0f} s"
        return PythonFacts(role, python, error=late if error.is_late else str(error))
    return msgspec.convert({"role": role, "python": python, **found}, PythonFacts)


def _run_nvidia_smi(*words: str) -> tuple[str, str]:
    """Output, and the error if there is one."""
    try:
        answer = subprocess.run(
            ["nvidia-smi", *words],
            capture_output=True,
            text=True,
            timeout=DRIVER_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "", f"nvidia-smi gave no answer within {DRIVER_TIMEOUT_S:.0f} s"
    if answer.returncode == 0:
        return answer.stdout, ""
    return answer.stdout, (answer.stdout + answer.stderr).strip() or "nvidia-smi failed"


def _can_load_library(library: str) -> bool:
    with suppress(OSError):
        ctypes.CDLL(library)
        return True
    return False
