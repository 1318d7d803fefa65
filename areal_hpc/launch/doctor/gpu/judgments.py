"""Judgments of a GPU node's facts and measurements. Pure.

Floors of rates are assumptions from data sheets: no GPU has confirmed them.
"""

from collections.abc import Iterator, Mapping, Sequence

from areal_hpc.launch.doctor.checks import CheckResult, fail, ok, warn
from areal_hpc.launch.doctor.gpu.facts import NodeFacts, PythonFacts
from areal_hpc.launch.doctor.gpu.steps import TinyRun
from areal_hpc.trainer.config import CollectiveRates

MIN_DRIVER_BY_CUDA = {12: 525, 13: 580}
"""Oldest branch of the driver that runs programs of a major version of CUDA (NVIDIA's CUDA
compatibility guide, table of minor version compatibility)."""
MIN_MEMLOCK_BYTES = 1 << 30
"""NCCL locks the buffers of every connection over RDMA: megabytes each, some per peer."""
MIN_NVLINK_ALLREDUCE_BYTES_PER_S = 100e9
"""Of an all-reduce within a node whose GPUs NVLink joins. An A100 has 300 GB/s a direction, an H100
450; half of them would still be above."""
MIN_PCIE_ALLREDUCE_BYTES_PER_S = 5e9
"""Without NVLink: PCIe 4.0 has 32 GB/s a direction, shared by several GPUs."""
MIN_RDMA_BYTES_PER_S = 5e9
"""Between nodes with RDMA: half of one adapter of 100 Gbit/s."""
MIN_TCP_BYTES_PER_S = 0.5e9
"""Between nodes without: half of 10 Gbit/s."""
MAX_ENGINE_LOGPROB_GAP_BY_DTYPE = {"float32": 1e-3, "bfloat16": 0.03}
"""Mean difference between engine and trainer."""
NODE_LINK_HINT = "nvidia-smi topo -m; is P2P disabled (NCCL_P2P_DISABLE, ACS in the BIOS)?"
NETWORK_HINT = "NCCL_DEBUG=INFO says which adapters it takes; cluster.slurm.network names others"
ISSUE_HINT = "attach --json FILE to an issue"
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
    if node_facts.driver_error:
        hint = "nvidia-smi must work; on Slurm drain the node, else load the driver or reboot"
        return fail("GPUs", f"the driver reports an error: {node_facts.driver_error}", hint)
    listed, visible, source = node_facts.gpus, node_facts.visible_gpus, node_facts.visible_source
    if not listed and not visible:
        return fail(
            "GPUs",
            f"none: no nvidia-smi lists one, {source} shows none",
            "run it on a node with NVIDIA GPUs, or by a job: --nodes 1 --site SITE; "
            "rehearse the steps with --device cpu",
        )
    if not visible:
        hint = "ask Slurm for GPUs (--gres=gpu:8), or unset CUDA_VISIBLE_DEVICES"
        return fail("GPUs", f"{len(listed)} in the node, none visible here ({source})", hint)
    kinds = sorted({f"{gpu.name} with {gpu.memory_mib / 1024:.0f} GiB" for gpu in listed})
    links = ", joined by NVLink" if node_facts.has_nvlink else ""
    found = f"{len(visible)} visible: {' and '.join(kinds) or 'of unknown kind'}{links}"
    if len(kinds) > 1:
        return warn("GPUs", found, "a run waits for its slowest GPU: use nodes of one kind")
    return ok("GPUs", found)


def judge_driver(node_facts: NodeFacts) -> CheckResult:
    """Compare the driver's version with what the torch builds need."""
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
    newest = max(MIN_DRIVER_BY_CUDA.values())
    return MIN_DRIVER_BY_CUDA.get(int(major), newest) if major.isdigit() else newest


def judge_python(python: PythonFacts, node_facts: NodeFacts) -> CheckResult:
    """Check that a role's environment sees all GPUs that are visible."""
    name, key = f"torch {python.role}", f"cluster.{python.role}.python"
    hint = f"scripts/setup.sh gpu, or set {key} to an environment with CUDA's torch"
    if python.error:
        return fail(name, f"{python.python}: {python.error}", hint)
    if not python.cuda:
        found = f"torch {python.torch} of {python.python} computes on CPUs alone"
        return fail(name, found, hint)
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
    """Check that the two ends of a weight broadcast have one NCCL, which refuses another."""
    versions = {python.role: python.nccl or "none" for python in pythons}
    listed = ", ".join(f"{role} {version}" for role, version in versions.items())
    hint = "scripts/setup.sh gpu makes both environments with one torch and one NCCL"
    if "none" in versions.values():
        return fail("NCCL", listed, hint)
    if len(set(versions.values())) > 1:
        return fail("NCCL", f"{listed}: they refuse one another, so no weights arrive", hint)
    return ok("NCCL", listed)


def judge_rdma(node_facts: NodeFacts, hca: str, *, is_one_of_several: bool) -> CheckResult:
    """Check that NCCL can use RDMA between nodes."""
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
            f"NCCL_IB_HCA={hca}, but /dev/infiniband has no adapter here",
            "show the container /dev/infiniband, or leave it out of cluster.slurm.network.nccl",
        )
    if is_one_of_several:
        hint = "name the fastest interface (cluster.slurm.network.interface), or use other nodes"
        return warn("RDMA", "no adapter in /dev/infiniband: NCCL takes TCP between nodes", hint)
    return ok("RDMA", "no adapter in /dev/infiniband; one node needs none")


def judge_memlock(node_facts: NodeFacts) -> CheckResult:
    """Check that processes may lock the memory that RDMA needs."""
    limit = node_facts.memlock_bytes
    if limit is None:
        return ok("memlock", "unlimited")
    found = f"a process may lock {limit / GIB:.3g} GiB"
    if not node_facts.rdma_devices or limit >= MIN_MEMLOCK_BYTES:
        return ok("memlock", found)
    hint = "ulimit -l unlimited; under Slurm PropagateResourceLimitsExcept=MEMLOCK in slurm.conf"
    return fail("memlock", f"{found}: NCCL's connections over RDMA fail", hint)


def judge_nvcc(node_facts: NodeFacts) -> CheckResult:
    """Check that SGLang can compile the kernels that it compiles at its first start."""
    if node_facts.nvcc:
        return ok("nvcc", node_facts.nvcc)
    return warn(
        "nvcc",
        "none on PATH, in CUDA_HOME or /usr/local/cuda: SGLang cannot compile kernels at run time",
        "module load cuda among cluster.slurm.setup, or use the images of slurm/containers",
    )


def judge_differences_between_nodes(nodes: Sequence[NodeFacts]) -> Iterator[CheckResult]:
    kinds: Mapping[str, set[str]] = {
        "driver": {one.driver for one in nodes},
        "GPUs": {f"{len(one.visible_gpus)} x {one.gpus[0].name}" for one in nodes if one.gpus},
        "NCCL": {python.nccl for one in nodes for python in one.pythons if python.nccl},
    }
    for name, found in kinds.items():
        if len(found) > 1:
            hint = "use nodes that are alike (sbatch.constraint), or ask the administrators"
            yield warn(f"{name} of nodes", f"differ: {', '.join(sorted(found))}", hint)


def judge_node_rates(rates: CollectiveRates, node_facts: NodeFacts) -> CheckResult:
    """Judge collectives between the GPUs of one node."""
    floor = MIN_PCIE_ALLREDUCE_BYTES_PER_S
    if node_facts.has_nvlink:
        floor = MIN_NVLINK_ALLREDUCE_BYTES_PER_S
    return _judge_rates("all-reduce", rates, floor, NODE_LINK_HINT)


def judge_network_rates(rates: CollectiveRates, node_facts: NodeFacts, nodes: int) -> CheckResult:
    """Judge collectives between all nodes by the links that the first of them has."""
    has_rdma = bool(node_facts.rdma_devices) and node_facts.has_ibverbs
    floor = MIN_RDMA_BYTES_PER_S if has_rdma else MIN_TCP_BYTES_PER_S
    return _judge_rates(f"{nodes} nodes", rates, floor, NETWORK_HINT)


def _judge_rates(
    check_name: str, rates: CollectiveRates, floor_bytes_per_s: float, hint: str
) -> CheckResult:
    reduced, ring = rates.all_reduce_bytes_per_s / 1e9, rates.ring_bytes_per_s / 1e9
    found = (
        f"{rates.ranks} ranks over {rates.backend}, {rates.size_bytes >> 20} MiB: "
        f"all-reduce {reduced:.3g} GB/s, ring {ring:.3g} GB/s"
    )
    if rates.wrong_elements:
        return fail(
            check_name,
            f"{found}; {rates.wrong_elements} elements of the results are wrong",
            "nvidia-smi -q -d ECC; NCCL_P2P_DISABLE=1 tells whether direct copies are at fault",
        )
    # A rehearsal over gloo has no floor. Written so that what is not a number fails.
    if rates.backend == "nccl" and not rates.all_reduce_bytes_per_s >= floor_bytes_per_s:
        expected = f"{found}; expected at least {floor_bytes_per_s / 1e9:g} GB/s"
        return fail(check_name, expected, hint)
    return ok(check_name, found)


def judge_run(run: TinyRun) -> CheckResult:
    """Check that SGLang agrees with the trainer before and after an update."""
    name, bound = "tiny run", MAX_ENGINE_LOGPROB_GAP_BY_DTYPE[run.dtype]
    gaps = ", ".join(f"{gap:.1e}" for gap in run.mean_gaps)
    found = (
        f"{len(run.mean_gaps)} steps with updates between them; log-probabilities of SGLang "
        f"({run.dtype}) and the trainer differ by {gaps} on average"
    )
    # Written so that what is not a number fails.
    if not all(gap <= bound for gap in run.mean_gaps):
        hint = f"another inference.extra_args --attention-backend; {ISSUE_HINT}"
        return fail(name, f"{found}; {bound:g} is rounding", hint)
    if not all(norm > 0 for norm in run.gradient_norms):
        return fail(name, f"{found}; a step had no gradient", ISSUE_HINT)
    return ok(name, found)
