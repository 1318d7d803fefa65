"""Doctor's judgments of GPU nodes, on made-up facts and measurements."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from areal_hpc.launch.doctor.checks import CheckResult, CheckStatus
from areal_hpc.launch.doctor.gpu.fact_judgments import (
    find_min_driver_branch,
    judge_differences_between_nodes,
    judge_driver,
    judge_facts,
    judge_gpus,
    judge_memlock,
    judge_nccl,
    judge_nvcc,
    judge_python,
    judge_rdma,
)
from areal_hpc.launch.doctor.gpu.node_facts import has_nvlink, parse_nvidia_smi_gpus
from areal_hpc.launch.doctor.gpu.node_isolation import judge_isolation
from areal_hpc.launch.doctor.gpu.report import (
    GpuFacts,
    IsolationFacts,
    NodeFacts,
    PythonFacts,
    TinyRun,
    Unmeasured,
)
from areal_hpc.launch.doctor.gpu.step_judgments import (
    judge_rates,
    judge_run,
    judge_unmeasured,
)
from areal_hpc.trainer.config import CollectiveRates

H100 = "NVIDIA H100 80GB HBM3"


def python_of(role: str, **changes: Any) -> PythonFacts:
    sound = PythonFacts(role, f"/{role}/python", "2.14.1+cu130", "13.0", "2.30.7", (H100,) * 8)
    return msgspec.structs.replace(sound, **changes)


SOUND = NodeFacts(
    host="n01",
    visible_gpus=tuple("01234567"),
    visible_source="CUDA_VISIBLE_DEVICES='0,1,2,3,4,5,6,7'",
    driver="580.95.05",
    gpus=(GpuFacts(H100, 81559),) * 8,
    has_nvlink=True,
    has_ibverbs=True,
    rdma_devices=("uverbs0", "uverbs1"),
    memlock_bytes=None,
    nvcc="/usr/local/cuda/bin/nvcc",
    pythons=(python_of("train"), python_of("serve")),
)
"""A node on which nothing is wrong."""


def test_a_sound_node_passes_every_check() -> None:
    found = list(judge_facts(SOUND, "mlx5_0", is_one_of_several=True))
    assert {one.verdict for one in found} == {CheckStatus.OK}
    names = ["GPUs", "driver", "torch train", "torch serve", "NCCL", "RDMA", "memlock", "nvcc"]
    assert [one.name for one in found] == names
    assert found[0].finding == f"8 visible: {H100} with 80 GiB, joined by NVLink"


def test_a_node_that_isolates_nothing_fails_a_recipe_whose_agents_have_sandboxes() -> None:
    why = "bubblewrap cannot isolate on this machine: no user namespaces"
    programs = IsolationFacts(is_of_agents=False, problem=why, hint="allow them")
    warned = judge_isolation(programs)
    assert (warned.verdict, warned.hint) == (CheckStatus.WARN, "allow them")
    assert warned.finding == f"{why} (only code_reward needs it)"
    failed = judge_isolation(msgspec.structs.replace(programs, is_of_agents=True))
    assert (failed.verdict, failed.finding) == (CheckStatus.FAIL, why)


@dataclass(frozen=True)
class FaultCase:
    """A change of the sound node, and what is said of it."""

    judge: Callable[[NodeFacts], CheckResult]
    changes: dict[str, Any]
    verdict: CheckStatus
    said: str


def judge_network(facts: NodeFacts) -> CheckResult:
    return judge_rdma(facts, "", is_one_of_several=True)


NO_ADAPTER = {"rdma_devices": (), "has_ibverbs": False}
FAULTS = {
    "no GPU": FaultCase(
        judge_gpus, {"gpus": (), "visible_gpus": ()}, CheckStatus.FAIL, "shows none"
    ),
    "hidden": FaultCase(
        judge_gpus, {"visible_gpus": ()}, CheckStatus.FAIL, "8 in the node, none visible"
    ),
    "driver's error": FaultCase(
        judge_gpus, {"driver_error": "GPU is lost"}, CheckStatus.FAIL, "GPU is lost"
    ),
    "two kinds": FaultCase(
        judge_gpus,
        {"gpus": (GpuFacts(H100, 81559), GpuFacts("NVIDIA A100", 40960))},
        CheckStatus.WARN,
        "NVIDIA A100 with 40 GiB and NVIDIA H100",
    ),
    "old driver": FaultCase(
        judge_driver, {"driver": "570.133.20"}, CheckStatus.FAIL, "needs 580 or newer"
    ),
    "no driver": FaultCase(
        judge_driver, {"driver": "", "pythons": ()}, CheckStatus.FAIL, "none; CUDA 13 needs 580"
    ),
    "older CUDA": FaultCase(
        judge_driver,
        {"driver": "535.183", "pythons": (python_of("train", cuda="12.8"),)},
        CheckStatus.OK,
        "at least 525",
    ),
    "no libibverbs": FaultCase(
        judge_network, {"has_ibverbs": False}, CheckStatus.FAIL, "no libibverbs: NCCL takes TCP"
    ),
    "no adapter": FaultCase(judge_network, NO_ADAPTER, CheckStatus.WARN, "TCP between nodes"),
    "memlock": FaultCase(
        judge_memlock, {"memlock_bytes": 64 << 20}, CheckStatus.FAIL, "may lock 0.0625 GiB"
    ),
    "memlock, no RDMA": FaultCase(
        judge_memlock, {"memlock_bytes": 64 << 10} | NO_ADAPTER, CheckStatus.OK, "may lock"
    ),
    "no nvcc": FaultCase(judge_nvcc, {"nvcc": ""}, CheckStatus.WARN, "cannot compile kernels"),
}


@pytest.mark.parametrize("case", FAULTS.values(), ids=FAULTS.keys())
def test_what_is_wrong_with_a_node_is_said_with_a_way_out(case: FaultCase) -> None:
    found = case.judge(msgspec.structs.replace(SOUND, **case.changes))
    assert found.verdict is case.verdict
    assert case.said in found.finding
    assert bool(found.hint) == (case.verdict is not CheckStatus.OK)


def test_an_adapter_that_the_site_names_must_be_there() -> None:
    bare = msgspec.structs.replace(SOUND, **NO_ADAPTER)
    found = judge_rdma(bare, "mlx5_0", is_one_of_several=False)
    assert found.verdict is CheckStatus.FAIL
    assert "network.hca=mlx5_0" in found.finding
    assert judge_rdma(bare, "", is_one_of_several=False).verdict is CheckStatus.OK


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"error": "ImportError: libcudart.so.13"}, "libcudart"),
        ({"cuda": "", "torch": "2.13.0+cpu"}, "computes on CPUs alone"),
        ({"gpus": (H100,) * 7}, "sees 7 GPUs of 8"),
    ],
)
def test_an_environment_must_see_the_gpus(changes: dict[str, Any], said: str) -> None:
    found = judge_python(python_of("serve", **changes), SOUND)
    assert found.verdict is CheckStatus.FAIL
    assert said in found.finding
    assert "cluster.serve.python" in found.hint or "--nv" in found.hint


def test_both_roles_must_have_one_nccl() -> None:
    found = judge_nccl([python_of("train", nccl="2.29.7"), python_of("serve")])
    assert found.verdict is CheckStatus.FAIL
    assert (
        found.finding == "train 2.29.7, serve 2.30.7: they refuse one another, so no weights arrive"
    )
    assert judge_nccl([python_of("train", nccl=""), python_of("serve")]).verdict is CheckStatus.FAIL


def test_nodes_that_differ_are_named() -> None:
    other = msgspec.structs.replace(SOUND, driver="590.1", gpus=(GpuFacts("NVIDIA A100", 81920),))
    assert list(judge_differences_between_nodes([SOUND, SOUND])) == []
    found = list(judge_differences_between_nodes([SOUND, other]))
    assert [one.name for one in found] == ["driver of nodes", "GPUs of nodes"]
    assert found[0].finding == "differ: 580.95.05, 590.1"


def test_the_floor_of_an_unknown_cuda_is_the_newest() -> None:
    assert [find_min_driver_branch(one) for one in ("12.4", "13.0", "14.1", "")] == [
        525,
        580,
        580,
        580,
    ]


def test_what_nvidia_smi_says_is_read() -> None:
    listed = "580.95.05, NVIDIA H100 80GB HBM3, 81559\n580.95.05, NVIDIA GB10, [N/A]\n"
    version, gpus = parse_nvidia_smi_gpus(listed)
    assert version == "580.95.05"
    assert gpus == (GpuFacts(H100, 81559), GpuFacts("NVIDIA GB10", 0))
    assert parse_nvidia_smi_gpus("") == ("", ())
    matrix = "\tGPU0\tGPU1\tNIC0\nGPU0\t X \t{0}\tSYS\nGPU1\t{0}\t X \tSYS\nNIC0\tSYS\tSYS\t X\n"
    assert has_nvlink(matrix.format("NV18"))
    assert not has_nvlink(matrix.format("PHB"))
    assert not has_nvlink("")


RATES = CollectiveRates(8, "nccl", 256 << 20, 400e9, 150e9, 0)


def test_rates_have_a_floor_and_results_must_be_right() -> None:
    def verdict(floor: float | None, **changes: Any) -> CheckStatus:
        changed = msgspec.structs.replace(RATES, **changes)
        return judge_rates("all-reduce", changed, floor, "look").verdict

    assert verdict(100e9) is CheckStatus.OK
    assert verdict(100e9, all_reduce_bytes_per_s=90e9) is CheckStatus.FAIL
    assert verdict(None, all_reduce_bytes_per_s=1.0) is CheckStatus.OK
    assert verdict(None, wrong_elements=1) is CheckStatus.FAIL
    assert verdict(100e9, all_reduce_bytes_per_s=math.nan) is CheckStatus.FAIL


@pytest.mark.parametrize(
    ("dtype", "gaps", "norms", "verdict"),
    [
        ("bfloat16", (0.005, 0.006), (0.4, 0.3), CheckStatus.OK),
        ("bfloat16", (0.005, 0.04), (0.4, 0.3), CheckStatus.FAIL),
        ("bfloat16", (0.005, math.nan), (0.4, 0.3), CheckStatus.FAIL),
        ("float32", (0.005, 0.006), (0.4, 0.3), CheckStatus.FAIL),
        ("bfloat16", (0.005, 0.006), (0.4, 0.0), CheckStatus.FAIL),
    ],
)
def test_sglang_must_agree_with_the_trainer_before_and_after_an_update(
    dtype: str, gaps: tuple[float, ...], norms: tuple[float, ...], verdict: CheckStatus
) -> None:
    assert judge_run(TinyRun(dtype, gaps, norms)).verdict is verdict


def test_a_step_that_has_no_meaning_here_is_no_failure() -> None:
    alone = Unmeasured("one GPU has nobody to exchange with", is_failure=False)
    assert judge_unmeasured("all-reduce", alone).verdict is CheckStatus.OK
    found = judge_run(Unmeasured("the cell exited with code 1: no kernel image"))
    assert found.verdict is CheckStatus.FAIL
    assert "no kernel image" in found.finding
