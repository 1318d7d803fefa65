"""Judgments of a node's facts. Pure: each takes facts and says passed, or what to do."""

from collections.abc import Iterator, Mapping, Sequence

from areal_hpc.launch.doctor.checks import CheckResult, fail, ok, warn
from areal_hpc.launch.doctor.gpu.report import NodeFacts, PythonFacts

MIN_DRIVER_BY_CUDA = {12: 525, 13: 580}
"""Oldest branch of the driver that runs programs of a major version of CUDA (NVIDIA's CUDA
compatibility guide, table of minor version compatibility)."""
MIN_MEMLOCK_BYTES = 1 << 30
"""NCCL locks the buffers of every connection over RDMA: megabytes each, some per peer."""
GIB = 2**30


def judge_facts(
    node_facts: NodeFacts, hca: str, *, is_one_of_several: bool
) -> Iterator[CheckResult]:
    """All judgments of one node; `hca` names adapters that the site promises."""
    yield judge_gpus(node_facts)
    yield judge_driver(node_facts)
    for python in node_facts.pythons:
        yield judge_python(python, node_facts)
    yield judge_nccl(node_facts.pythons)
    yield judge_rdma(node_facts, hca, is_one_of_several=is_one_of_several)
    yield judge_memlock(node_facts)
    yield judge_nvcc(node_facts)


def judge_gpus(node_facts: NodeFacts) -> CheckResult:
    """GPUs that the driver lists, and those that this process may use."""
    if node_facts.driver_error:
        hint = "nvidia-smi must work; on Slurm drain the node, else load the driver or reboot"
        return fail("GPUs", f"the driver reports an error: {node_facts.driver_error}", hint)
    if not node_facts.gpus and not node_facts.visible_gpus:
        return fail(
            "GPUs",
            f"none: no nvidia-smi lists one, {node_facts.visible_source} shows none",
            "run it on a node with NVIDIA GPUs, or by a job: --nodes 1 --site SITE; "
            "rehearse the steps with --device cpu",
        )
    if not node_facts.visible_gpus:
        hint = "ask Slurm for GPUs (--gres=gpu:8), or unset CUDA_VISIBLE_DEVICES"
        found = (
            f"{len(node_facts.gpus)} in the node, none visible here ({node_facts.visible_source})"
        )
        return fail("GPUs", found, hint)
    kinds = sorted({f"{gpu.name} with {gpu.memory_mib / 1024:.0f} GiB" for gpu in node_facts.gpus})
    links = ", joined by NVLink" if node_facts.has_nvlink else ""
    found = (
        f"{len(node_facts.visible_gpus)} visible: {' and '.join(kinds) or 'of unknown kind'}{links}"
    )
    if len(kinds) > 1:
        return warn("GPUs", found, "a run waits for its slowest GPU: use nodes of one kind")
    return ok("GPUs", found)


def judge_driver(node_facts: NodeFacts) -> CheckResult:
    """The driver's version against what the torch builds need."""
    needs = [
        (find_min_driver_branch(python.cuda), python)
        for python in node_facts.pythons
        if python.cuda
    ]
    floor, python = max(needs, default=(MIN_DRIVER_BY_CUDA[13], None), key=lambda one: one[0])
    reason = f"CUDA {python.cuda} of the Python of role {python.role}" if python else "CUDA 13"
    if not node_facts.driver:
        hint = f"install NVIDIA's driver {floor} or newer, or use another node"
        return fail("driver", f"none; {reason} needs {floor} or newer", hint)
    if int(node_facts.driver.partition(".")[0]) < floor:
        return fail(
            "driver",
            f"{node_facts.driver}; {reason} needs {floor} or newer",
            "ask the administrators for a newer driver, or make environments for an older CUDA",
        )
    return ok("driver", f"{node_facts.driver}, at least {floor} is needed")


def find_min_driver_branch(cuda: str) -> int:
    major = cuda.partition(".")[0]
    known = max(MIN_DRIVER_BY_CUDA.values())
    return MIN_DRIVER_BY_CUDA.get(int(major), known) if major.isdigit() else known


def judge_python(python: PythonFacts, node_facts: NodeFacts) -> CheckResult:
    """Whether a role's environment sees all GPUs that are visible."""
    name, key = f"torch {python.role}", f"cluster.{python.role}.python"
    if python.error:
        hint = f"scripts/setup.sh gpu, or set {key} to an environment with CUDA's torch"
        return fail(name, f"{python.python}: {python.error}", hint)
    if not python.cuda:
        return fail(
            name,
            f"torch {python.torch} of {python.python} computes on CPUs alone",
            f"scripts/setup.sh gpu, or set {key} to an environment with CUDA's torch",
        )
    seen = len(python.gpus)
    found = f"torch {python.torch} for CUDA {python.cuda} sees {seen} GPUs"
    if seen < len(node_facts.visible_gpus):
        return fail(
            name,
            f"{found} of {len(node_facts.visible_gpus)}",
            f"{python.python} -c 'import torch; torch.cuda.init()' says why; in a container, was "
            "it started with --nv?",
        )
    return ok(name, found)


def judge_nccl(pythons: Sequence[PythonFacts]) -> CheckResult:
    """Whether the two ends of a weight broadcast have one NCCL, which refuses another."""
    versions = {python.role: python.nccl or "none" for python in pythons}
    told = ", ".join(f"{role} {version}" for role, version in versions.items())
    hint = "scripts/setup.sh gpu makes both environments with one torch and one NCCL"
    if "none" in versions.values():
        return fail("NCCL", told, hint)
    if len(set(versions.values())) > 1:
        return fail("NCCL", f"{told}: they refuse one another, so no weights arrive", hint)
    return ok("NCCL", told)


def judge_rdma(node_facts: NodeFacts, hca: str, *, is_one_of_several: bool) -> CheckResult:
    """Whether NCCL can use RDMA between nodes."""
    devices = f"{len(node_facts.rdma_devices)} adapters in /dev/infiniband"
    if node_facts.rdma_devices and node_facts.has_ibverbs:
        return ok("RDMA", f"{devices}, libibverbs there")
    if node_facts.rdma_devices:
        return fail(
            "RDMA",
            f"{devices}, but no libibverbs: NCCL takes TCP, 10 to 50 times slower",
            "install libibverbs1 ibverbs-providers rdma-core, in the image if jobs run in one",
        )
    if hca:
        return fail(
            "RDMA",
            f"network.hca={hca}, but /dev/infiniband has no adapter here",
            "show the container /dev/infiniband, or leave cluster.slurm.network.hca out",
        )
    if is_one_of_several:
        hint = "name the fastest interface (cluster.slurm.network.interface), or use other nodes"
        return warn("RDMA", "no adapter in /dev/infiniband: NCCL takes TCP between nodes", hint)
    return ok("RDMA", "no adapter in /dev/infiniband; one node needs none")


def judge_memlock(node_facts: NodeFacts) -> CheckResult:
    """Whether processes may lock the memory that RDMA needs."""
    limit = node_facts.memlock_bytes
    if limit is None:
        return ok("memlock", "unlimited")
    found = f"a process may lock {limit / GIB:.3g} GiB"
    if not node_facts.rdma_devices or limit >= MIN_MEMLOCK_BYTES:
        return ok("memlock", found)
    hint = "ulimit -l unlimited; under Slurm PropagateResourceLimitsExcept=MEMLOCK in slurm.conf"
    return fail("memlock", f"{found}: NCCL's connections over RDMA fail", hint)


def judge_nvcc(node_facts: NodeFacts) -> CheckResult:
    """Whether SGLang can compile the kernels that it compiles at its first start."""
    if node_facts.nvcc:
        return ok("nvcc", node_facts.nvcc)
    return warn(
        "nvcc",
        "none on PATH, in CUDA_HOME or /usr/local/cuda: SGLang cannot compile kernels at run time",
        "module load cuda among cluster.slurm.setup, or use the images of slurm/containers",
    )


def prefix_findings_with_host(results: Sequence[CheckResult], host: str) -> Iterator[CheckResult]:
    for one in results:
        yield CheckResult(one.name, one.verdict, f"{host}: {one.finding}", one.hint)


def judge_differences_between_nodes(nodes: Sequence[NodeFacts]) -> Iterator[CheckResult]:
    """What is not the same on all nodes and should be."""
    kinds: Mapping[str, set[str]] = {
        "driver": {one.driver for one in nodes},
        "GPUs": {f"{len(one.visible_gpus)} x {one.gpus[0].name}" for one in nodes if one.gpus},
        "NCCL": {python.nccl for one in nodes for python in one.pythons if python.nccl},
    }
    for name, found in kinds.items():
        if len(found) > 1:
            hint = "use nodes that are alike (cluster.slurm.constraint), or ask the administrators"
            yield warn(f"{name} of nodes", f"differ: {', '.join(sorted(found))}", hint)
