"""Facts of this GPU node and their judgment: driver, GPUs, RDMA, limits, each role's Python."""

import ctypes
import os
import re
import resource
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from areal_hpc.jobs.node import (
    find_visible_gpus,
    read_numa_nodes,
    select_wanted_gpus,
)
from areal_hpc.jobs.node_probe import run_nvidia_smi, split_csv
from areal_hpc.launch.checks.role_python import RolePythonError, ask_role
from areal_hpc.launch.doctor.results import CheckResult, fail, ok, warn
from areal_hpc.recipe.sections.cluster import WantedGpus

MIN_DRIVER_BY_CUDA = {12: 525, 13: 580}
"""Oldest branch of the driver that runs programs of a major version of CUDA (NVIDIA's CUDA
compatibility guide, table of minor version compatibility)."""
MIN_MEMLOCK_BYTES = 1 << 30
"""NCCL locks the buffers of every connection over RDMA: megabytes each, some per peer."""
PYTHON_TIMEOUT_S = 180.0
"""Time to import torch from cold storage, and to initialize every GPU."""

_GPU_FACTS_SCRIPT = """
import json, torch
found = {"torch": torch.__version__, "cuda": torch.version.cuda or "", "nccl": "", "gpus": 0}
if torch.version.cuda:
    found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    found["gpus"] = torch.cuda.device_count()
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class PythonFacts:
    role: str
    python: str
    torch: str = ""
    cuda: str = ""
    """CUDA version that torch was built for; empty: for CPUs."""
    nccl: str = ""
    """NCCL version that torch has loaded."""
    gpus: int = 0
    error: str = ""
    """Reason why the facts could not be read; empty if they could."""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    visible_gpus: tuple[str, ...]
    visible_source: str
    driver: str = ""
    """Version of NVIDIA's driver; empty: there is none."""
    driver_error: str = ""
    gpus: tuple[tuple[str, int], ...] = ()
    """Name and memory in MiB of each GPU that the driver lists."""
    has_nvlink: bool = False
    has_ibverbs: bool = False
    adapters: int = 0
    """Number of files in /dev/infiniband through which programs use adapters."""
    memlock_bytes: int | None = None
    """Memory that a process may lock; None: any amount."""
    nvcc: str = ""
    """Path of CUDA's compiler; empty: there is none."""
    pythons: tuple[PythonFacts, ...] = ()


def gather_node_facts(
    wanted: WantedGpus, pythons: Mapping[str, str], variables: Mapping[str, Mapping[str, str]]
) -> NodeFacts:
    """Gather facts of this node, with the interpreter and the variables of each role."""
    visible = select_wanted_gpus(find_visible_gpus(os.environ), wanted, read_numa_nodes())
    listed = driver_error = topology = ""
    if shutil.which("nvidia-smi") is not None:
        listed, driver_error = run_nvidia_smi(
            "--query-gpu=driver_version,name,memory.total", "--format=csv,noheader,nounits"
        )
        topology, _ = run_nvidia_smi("topo", "-m")
    driver, gpus = parse_nvidia_smi_gpus("" if driver_error else listed)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    cuda = Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda") / "bin" / "nvcc"
    return NodeFacts(
        visible_gpus=visible.ids,
        visible_source=visible.source,
        driver=driver,
        driver_error=driver_error,
        gpus=gpus,
        has_nvlink=has_nvlink(topology),
        has_ibverbs=_can_load_library("libibverbs.so.1"),
        adapters=len(list(Path("/dev/infiniband").glob("uverbs*"))),
        memlock_bytes=None if soft == resource.RLIM_INFINITY else soft,
        nvcc=str(cuda) if os.access(cuda, os.X_OK) else shutil.which("nvcc") or "",
        pythons=tuple(
            read_gpu_facts(role, pythons[role], variables[role]) for role in ("train", "serve")
        ),
    )


def parse_nvidia_smi_gpus(nvidia_smi_output: str) -> tuple[str, tuple[tuple[str, int], ...]]:
    """Parse the driver's version and the GPUs from the lines of nvidia-smi. Pure."""
    rows = split_csv(nvidia_smi_output)
    gpus = tuple((name, int(memory) if memory.isdigit() else 0) for _, name, memory in rows)
    return rows[0][0] if rows else "", gpus


def has_nvlink(topology: str) -> bool:
    """Return whether a matrix of `nvidia-smi topo -m` has NVLink between GPUs (as NV18). Pure."""
    return bool(re.search(r"^GPU\d+\s.*\bNV\d+\b", topology, re.MULTILINE))


def read_gpu_facts(role: str, python: str, variables: Mapping[str, str]) -> PythonFacts:
    """Read facts in a role's Python, run with the variables of the role's processes."""
    program = ("-W", "ignore", "-c", _GPU_FACTS_SCRIPT)
    environ = {**os.environ, **variables}
    try:
        facts = ask_role(python, *program, environ=environ, timeout_s=PYTHON_TIMEOUT_S)
    except RolePythonError as error:
        late = f"importing torch and asking for GPUs took more than {PYTHON_TIMEOUT_S:.0f} s"
        return PythonFacts(role, python, error=late if error.is_late else str(error))
    return PythonFacts(role, python, **facts)


def _can_load_library(library: str) -> bool:
    with suppress(OSError):
        ctypes.CDLL(library)
        return True
    return False


def judge_facts(facts: NodeFacts, hca: str) -> Iterator[CheckResult]:
    """Judge all facts of the node; `hca` names the InfiniBand adapters of the site."""
    yield _judge_gpus(facts)
    yield _judge_driver(facts)
    for python in facts.pythons:
        yield _judge_python(python, len(facts.visible_gpus))
    yield _judge_nccl(facts.pythons)
    yield _judge_rdma(facts, hca)
    limit = facts.memlock_bytes
    finding = "unlimited" if limit is None else f"a process may lock {limit / 2**30:.3g} GiB"
    if limit is None or not facts.adapters or limit >= MIN_MEMLOCK_BYTES:
        yield ok("memlock", finding)
    else:
        hint = "ulimit -l unlimited; in slurm.conf PropagateResourceLimitsExcept=MEMLOCK"
        yield fail("memlock", f"{finding}: NCCL's connections over RDMA fail", hint)
    if facts.nvcc:
        yield ok("nvcc", facts.nvcc)
    else:
        missing = "none in CUDA_HOME or on PATH: SGLang cannot compile kernels at run time"
        hint = "module load cuda among cluster.slurm.setup, or use the images of slurm/containers"
        yield warn("nvcc", missing, hint)


def _judge_gpus(facts: NodeFacts) -> CheckResult:
    if facts.driver_error:
        hint = "nvidia-smi must work; on Slurm drain the node, else load the driver or reboot"
        return fail("GPUs", f"the driver reports an error: {facts.driver_error}", hint)
    listed, visible, source = facts.gpus, facts.visible_gpus, facts.visible_source
    if not listed and not visible:
        return fail(
            "GPUs",
            f"none: no nvidia-smi lists one, {source} shows none",
            "run it on a node with NVIDIA GPUs (srun --exclusive --gres=gpu:8 areal-hpc doctor "
            "RECIPE --gpu); rehearse the steps with --device cpu",
        )
    if not visible:
        hint = "ask Slurm for GPUs (--gres=gpu:8), or unset CUDA_VISIBLE_DEVICES"
        return fail("GPUs", f"{len(listed)} in the node, none visible here ({source})", hint)
    kinds = sorted({f"{name} with {memory_mib / 1024:.0f} GiB" for name, memory_mib in listed})
    links = ", joined by NVLink" if facts.has_nvlink else ""
    finding = f"{len(visible)} visible: {' and '.join(kinds) or 'of unknown kind'}{links}"
    if len(kinds) > 1:
        return warn("GPUs", finding, "a run waits for its slowest GPU: use nodes of one kind")
    return ok("GPUs", finding)


def _judge_driver(facts: NodeFacts) -> CheckResult:
    newest = max(MIN_DRIVER_BY_CUDA.values())
    majors = {python.cuda.partition(".")[0] for python in facts.pythons if python.cuda}
    floors = {MIN_DRIVER_BY_CUDA.get(int(major), newest) for major in majors if major.isdigit()}
    floor = max(floors, default=newest)
    requirement = f"torch for CUDA {', '.join(sorted(majors)) or '13'} needs {floor} or newer"
    if facts.driver and int(facts.driver.partition(".")[0]) >= floor:
        return ok("driver", f"{facts.driver}; {requirement}")
    hint = "ask the administrators for a newer driver, or make environments for an older CUDA"
    return fail("driver", f"{facts.driver or 'none'}; {requirement}", hint)


def _judge_python(python: PythonFacts, visible_gpus: int) -> CheckResult:
    name, key = f"torch {python.role}", f"cluster.{python.role}.python"
    hint = f"scripts/setup.sh gpu, or set {key} to an environment with CUDA's torch"
    if python.error:
        return fail(name, f"{python.python}: {python.error}", hint)
    if not python.cuda:
        finding = f"torch {python.torch} of {python.python} computes on CPUs alone"
        return fail(name, finding, hint)
    finding = f"torch {python.torch} for CUDA {python.cuda} sees {python.gpus} GPUs"
    if python.gpus < visible_gpus:
        return fail(
            name,
            f"{finding} of {visible_gpus}",
            f"{python.python} -c 'import torch; torch.cuda.init()' says why; in a container, was "
            "it started with --nv?",
        )
    return ok(name, finding)


def _judge_nccl(pythons: Sequence[PythonFacts]) -> CheckResult:
    """Compare the NCCL versions of both ends of a weight broadcast; NCCL refuses other versions."""
    versions = {python.role: python.nccl or "none" for python in pythons}
    listed = ", ".join(f"{role} {version}" for role, version in versions.items())
    hint = "scripts/setup.sh gpu makes both environments with one torch and one NCCL"
    if "none" in versions.values():
        return fail("NCCL", listed, hint)
    if len(set(versions.values())) > 1:
        return fail("NCCL", f"{listed}: they refuse one another, so no weights arrive", hint)
    return ok("NCCL", listed)


def _judge_rdma(facts: NodeFacts, hca: str) -> CheckResult:
    devices = f"{facts.adapters} adapters in /dev/infiniband"
    if facts.adapters and not facts.has_ibverbs:
        finding = f"{devices}, but no libibverbs: NCCL takes TCP, 10 to 50 times slower"
        hint = "install libibverbs1 ibverbs-providers rdma-core, in the image if jobs run in one"
        return fail("RDMA", finding, hint)
    if hca and not facts.adapters:
        finding = f"NCCL_IB_HCA={hca}, but /dev/infiniband has no adapter here"
        hint = "show the container /dev/infiniband, or leave it out of cluster.slurm.network.nccl"
        return fail("RDMA", finding, hint)
    if facts.adapters:
        return ok("RDMA", f"{devices}, libibverbs there")
    return ok("RDMA", "no adapter in /dev/infiniband: NCCL takes TCP between nodes")
