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

from areal_hpc.jobs.node.gpus import (
    find_visible_gpus,
    read_numa_node_by_gpu,
    select_wanted_gpus_or_raise,
)
from areal_hpc.launch.doctor.gpu.node_isolation import try_isolation
from areal_hpc.launch.doctor.gpu.report import GpuCheckPlan, GpuFacts, NodeFacts, PythonFacts
from areal_hpc.launch.role_python import RolePythonError, ask_role
from areal_hpc.recipe.sections.cluster import WantedGpus

GPU_ROLES = ("train", "serve")
"""The roles whose processes use GPUs."""
PYTHON_TIMEOUT_S = 180.0
"""To import torch from cold storage, and to wake every GPU."""
DRIVER_TIMEOUT_S = 30.0
DEV_INFINIBAND_DIR = Path("/dev/infiniband")
IBVERBS_LIBRARY = "libibverbs.so.1"
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


def gather_node_facts(plan: GpuCheckPlan) -> NodeFacts:
    """Everything about this node that takes no run of ours."""
    wanted = cast("WantedGpus", plan.gpus)
    visible = select_wanted_gpus_or_raise(
        find_visible_gpus(os.environ), wanted, read_numa_node_by_gpu()
    )
    driver, gpus, driver_error = query_nvidia_driver()
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return NodeFacts(
        host=socket.gethostname(),
        visible_gpus=visible.ids,
        visible_source=visible.source,
        driver=driver,
        driver_error=driver_error,
        gpus=gpus,
        has_nvlink=_query_nvlink(),
        has_ibverbs=_can_load_library(IBVERBS_LIBRARY),
        rdma_devices=tuple(sorted(one.name for one in DEV_INFINIBAND_DIR.glob("uverbs*"))),
        memlock_bytes=None if soft == resource.RLIM_INFINITY else soft,
        nvcc=find_nvcc(os.environ, CUDA_DIRS),
        pythons=tuple(
            ask_python_for_gpu_facts(role, plan.pythons[role], plan.variables[role])
            for role in GPU_ROLES
        ),
        isolation=try_isolation(plan.agent),
    )


def query_nvidia_driver() -> tuple[str, tuple[GpuFacts, ...], str]:
    """Version of the driver, its GPUs, and its complaint if it has one."""
    if shutil.which("nvidia-smi") is None:
        return "", (), ""
    listed, complaint = _run_nvidia_smi(
        "--query-gpu=driver_version,name,memory.total", "--format=csv,noheader,nounits"
    )
    return (*parse_nvidia_smi_gpus(listed), complaint) if not complaint else ("", (), complaint)


def parse_nvidia_smi_gpus(nvidia_smi_output: str) -> tuple[str, tuple[GpuFacts, ...]]:
    """Version and GPUs in the lines of nvidia-smi. Pure."""
    rows = [
        [word.strip() for word in line.split(",")]
        for line in nvidia_smi_output.splitlines()
        if line
    ]
    gpus = tuple(GpuFacts(name, int(memory) if memory.isdigit() else 0) for _, name, memory in rows)
    return rows[0][0] if rows else "", gpus


def has_nvlink(topology: str) -> bool:
    """True if a matrix of `nvidia-smi topo -m` joins GPUs by NVLink (as NV18). Pure."""
    rows = [line.split() for line in topology.splitlines()]
    return any(
        re.fullmatch(r"GPU\d+", row[0]) and any(re.fullmatch(r"NV\d+", one) for one in row[1:])
        for row in rows
        if row
    )


def find_nvcc(environ: Mapping[str, str], default_cuda_homes: tuple[Path, ...]) -> str:
    """CUDA's compiler, where those who compile kernels at run time look for it."""
    homes = [Path(environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if environ.get(name)]
    on_path = shutil.which("nvcc", path=environ.get("PATH"))
    candidates = [*(home / "bin" / "nvcc" for home in homes), *([Path(on_path)] if on_path else [])]
    candidates += [home / "bin" / "nvcc" for home in default_cuda_homes]
    return next((str(path) for path in candidates if os.access(path, os.X_OK)), "")


def ask_python_for_gpu_facts(role: str, python: str, variables: Mapping[str, str]) -> PythonFacts:
    """What a role's Python, with the variables of its processes, says of torch and GPUs."""
    program = ("-W", "ignore", "-c", _GPU_FACTS_SCRIPT)
    environ = {**os.environ, **variables}
    try:
        found = ask_role(python, *program, environ=environ, timeout_s=PYTHON_TIMEOUT_S)
    except RolePythonError as error:
        late = f"importing torch and asking for GPUs took more than {PYTHON_TIMEOUT_S:.0f} s"
        return PythonFacts(role, python, error=late if error.is_late else str(error))
    return msgspec.convert({"role": role, "python": python, **found}, PythonFacts)


def _query_nvlink() -> bool:
    return shutil.which("nvidia-smi") is not None and has_nvlink(_run_nvidia_smi("topo", "-m")[0])


def _run_nvidia_smi(*words: str) -> tuple[str, str]:
    try:
        asked = subprocess.run(
            ["nvidia-smi", *words],
            capture_output=True,
            text=True,
            timeout=DRIVER_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "", f"nvidia-smi gave no answer within {DRIVER_TIMEOUT_S:.0f} s"
    said = (asked.stdout + asked.stderr).strip()
    return asked.stdout, "" if asked.returncode == 0 else said or "nvidia-smi failed"


def _can_load_library(library: str) -> bool:
    with suppress(OSError):
        ctypes.CDLL(library)
        return True
    return False
