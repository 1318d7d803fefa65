"""What an examination of GPU nodes is asked for, and what it finds: facts and measurements."""

from typing import Any, Literal

from msgspec import Struct

from areal_hpc.trainer.config import CollectiveRates

Device = Literal["cpu", "cuda"]


class GpuCheckPlan(Struct, frozen=True):
    """What is examined, and with what: read from a recipe, or the defaults of one."""

    device: Device
    """`cpu` rehearses the same steps on processors."""
    nodes: int
    """Nodes of a Slurm job; 0: this machine, without one."""
    pythons: dict[str, str]
    """By role."""
    variables: dict[str, dict[str, str]]
    """By role."""
    inference: dict[str, Any]
    """The recipe's section."""
    trainer_dtype: Literal["float32", "bfloat16"]
    gpus: str | int | tuple[str | int, ...] = "auto"
    """`cluster.gpus`, for this machine alone."""
    interface: str = ""
    hca: str = ""
    """InfiniBand adapters that the site names."""
    agent: dict[str, Any] | None = None
    """The recipe's section `rollout.agent` where it gives agents sandboxes."""


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


class IsolationFacts(Struct, frozen=True):
    """Whether a node keeps apart what models write or ask for."""

    is_of_agents: bool
    """True of the sandboxes that a recipe gives agents, false of programs that are judged."""
    problem: str = ""
    """Why it cannot; empty if it can."""
    hint: str = ""


class NodeFacts(Struct, frozen=True):
    """One node."""

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
    isolation: tuple[IsolationFacts, ...] = ()


class Unmeasured(Struct, frozen=True, tag=True):
    """A step that gave no figures."""

    reason: str
    hint: str = ""
    is_failure: bool = True
    """False where the step has no meaning here, as a collective of one GPU."""


class TinyRun(Struct, frozen=True, tag=True):
    """A short run of a tiny model, by step."""

    dtype: str
    """SGLang's."""
    mean_gaps: tuple[float, ...]
    """Mean difference of log-probabilities between SGLang and the trainer. From the second step on
    SGLang's weights are those of an update."""
    gradient_norms: tuple[float, ...]


class GpuReport(Struct, frozen=True):
    """All that an examination found."""

    device: Device
    nodes: tuple[NodeFacts, ...]
    node_rates: CollectiveRates | Unmeasured
    """Between the GPUs of the first node."""
    cluster_rates: CollectiveRates | Unmeasured | None
    """Between the GPUs of all nodes; None if there is but one."""
    run: TinyRun | Unmeasured
