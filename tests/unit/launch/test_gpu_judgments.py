"""Doctor's judgments of GPU nodes, on made-up facts and measurements."""

import math
from typing import Any

import msgspec
import pytest

from areal_hpc.launch.doctor.checks import CheckStatus
from areal_hpc.launch.doctor.gpu.facts import (
    GpuFacts,
    NodeFacts,
    PythonFacts,
    has_nvlink,
    parse_nvidia_smi_gpus,
)
from areal_hpc.launch.doctor.gpu.judgments import (
    judge_differences_between_nodes,
    judge_facts,
    judge_node_rates,
    judge_rdma,
    judge_run,
)
from areal_hpc.launch.doctor.gpu.steps import TinyRun
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


NO_ADAPTER = {"rdma_devices": (), "has_ibverbs": False}
A100 = GpuFacts("NVIDIA A100", 40960)


@pytest.mark.parametrize(
    ("changes", "check", "verdict", "said"),
    [
        ({"gpus": (), "visible_gpus": ()}, "GPUs", "fail", "shows none"),
        ({"visible_gpus": ()}, "GPUs", "fail", "8 in the node, none visible"),
        ({"driver_error": "GPU is lost"}, "GPUs", "fail", "GPU is lost"),
        ({"gpus": (*SOUND.gpus[:1], A100)}, "GPUs", "warn", "A100 with 40 GiB and NVIDIA H100"),
        ({"driver": "570.133.20"}, "driver", "fail", "needs 580 or newer"),
        ({"driver": "", "pythons": ()}, "driver", "fail", "none; CUDA 13 needs 580"),
        (
            {"driver": "535.183", "pythons": (python_of("train", cuda="12.8"),)},
            *("driver", "ok", "at least 525"),
        ),
        ({"pythons": (python_of("train", cuda="14.1"),)}, "driver", "ok", "at least 580"),
        ({"has_ibverbs": False}, "RDMA", "fail", "no libibverbs: NCCL takes TCP"),
        (NO_ADAPTER, "RDMA", "warn", "TCP between nodes"),
        ({"memlock_bytes": 64 << 20}, "memlock", "fail", "may lock 0.0625 GiB"),
        ({"memlock_bytes": 64 << 10} | NO_ADAPTER, "memlock", "ok", "may lock"),
        ({"nvcc": ""}, "nvcc", "warn", "cannot compile kernels"),
        (
            {"pythons": (python_of("serve", error="ImportError: libcudart.so.13"),)},
            *("torch serve", "fail", "libcudart"),
        ),
        (
            {"pythons": (python_of("serve", cuda="", torch="2.13.0+cpu"),)},
            *("torch serve", "fail", "computes on CPUs alone"),
        ),
        (
            {"pythons": (python_of("serve", gpus=(H100,) * 7),)},
            *("torch serve", "fail", "sees 7 GPUs of 8"),
        ),
        (
            {"pythons": (python_of("train", nccl="2.29.7"), python_of("serve"))},
            *("NCCL", "fail", "train 2.29.7, serve 2.30.7: they refuse one another"),
        ),
        ({"pythons": (python_of("train", nccl=""),)}, "NCCL", "fail", "train none"),
    ],
)
def test_a_fault_of_a_node_is_told_with_a_way_out(
    changes: dict[str, Any], check: str, verdict: str, said: str
) -> None:
    results = judge_facts(msgspec.structs.replace(SOUND, **changes), "", is_one_of_several=True)
    (found,) = (one for one in results if one.name == check)
    assert found.verdict == verdict
    assert said in found.finding
    assert bool(found.hint) == (verdict != "ok")


def test_an_adapter_that_the_site_names_must_be_there() -> None:
    bare = msgspec.structs.replace(SOUND, **NO_ADAPTER)
    found = judge_rdma(bare, "mlx5_0", is_one_of_several=False)
    assert found.verdict is CheckStatus.FAIL
    assert "NCCL_IB_HCA=mlx5_0" in found.finding
    assert judge_rdma(bare, "", is_one_of_several=False).verdict is CheckStatus.OK


def test_nodes_that_differ_are_named() -> None:
    other = msgspec.structs.replace(SOUND, driver="590.1", gpus=(GpuFacts("NVIDIA A100", 81920),))
    assert list(judge_differences_between_nodes([SOUND, SOUND])) == []
    found = list(judge_differences_between_nodes([SOUND, other]))
    assert [one.name for one in found] == ["driver of nodes", "GPUs of nodes"]
    assert found[0].finding == "differ: 580.95.05, 590.1"


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


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "ok"),
        ({"all_reduce_bytes_per_s": 90e9}, "fail"),
        ({"all_reduce_bytes_per_s": 1.0, "backend": "gloo"}, "ok"),
        ({"wrong_elements": 1, "backend": "gloo"}, "fail"),
        ({"all_reduce_bytes_per_s": math.nan}, "fail"),
    ],
)
def test_rates_have_a_floor_and_results_must_be_right(
    changes: dict[str, Any], verdict: str
) -> None:
    assert judge_node_rates(msgspec.structs.replace(RATES, **changes), SOUND).verdict == verdict


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
