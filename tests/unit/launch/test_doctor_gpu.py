"""What doctor's examination of a GPU node starts, and how it judges facts and measurements."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.errors import RecipeError
from areal_hpc.launch.doctor import gpu_facts
from areal_hpc.launch.doctor.gpu import (
    GpuCheckPlan,
    TinyRun,
    build_check_plan,
    build_single_replica_config,
    build_tiny_recipe,
    examine_gpu_node,
    judge_rates,
    judge_run,
)
from areal_hpc.launch.doctor.gpu_facts import (
    NodeFacts,
    PythonFacts,
    has_nvlink,
    judge_facts,
    parse_nvidia_smi_gpus,
    read_gpu_facts,
)
from areal_hpc.launch.doctor.results import CheckStatus
from areal_hpc.recipe.loading import load_recipe
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.recipe.sections.cluster import SlurmConfig
from areal_hpc.trainer.config import CollectiveRates
from tests.support.commands import exit_code_of, write_program
from tests.support.environments import CHECKOUT

RECIPE = CHECKOUT / "recipes" / "gpu8_gsm8k_qwen3_0.6b.yaml"
H100 = "NVIDIA H100 80GB HBM3"


def gpu_recipe(*overrides: str) -> Recipe:
    return load_recipe(RECIPE, overrides)


def plan_of(recipe: Recipe | None = None, device: Any = "cuda") -> GpuCheckPlan:
    return build_check_plan(recipe, SlurmConfig(), device)


def test_the_plan_has_the_variables_and_the_flags_of_a_run() -> None:
    recipe = gpu_recipe("cluster.serve={python: /serve/python, variables: {SGLANG_X: '1'}}")
    plan = plan_of(recipe)
    assert plan.pythons["serve"] == "/serve/python"
    serve, train = plan.variables["serve"], plan.variables["train"]
    assert serve["NCCL_CUMEM_ENABLE"] == train["NCCL_CUMEM_ENABLE"] == "0"
    assert train["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert serve["SGLANG_X"] == "1"
    assert (plan.inference, plan.dtype, plan.gpus) == (recipe.inference, "bfloat16", "auto")
    assert plan_of(gpu_recipe("cluster.gpus=[2, 3]")).gpus == (2, 3)
    rehearsed = plan_of(device="cpu")
    assert rehearsed.dtype == "float32"
    assert rehearsed.variables["train"] == {"TORCHDYNAMO_DISABLE": "1"}


def test_the_replica_is_the_recipes_as_far_as_the_node_has_gpus() -> None:
    recipe = gpu_recipe(
        "inference={replicas_per_cell: 1, tp: 8, nodes_per_replica: 2}",
        "inference.extra_args=[--log-level=info]",
    )
    plan = plan_of(recipe)
    found = build_single_replica_config(plan, gpus=8)
    assert (found.tp, found.nodes_per_replica, found.cells) == (4, 1, 1)
    Recipe.model_validate(build_tiny_recipe(plan, found, ("0", "GPU-1"), Path("/x/model")))
    assert found.extra_args == ("--log-level=info",)
    assert build_single_replica_config(plan, gpus=3).tp == 2
    rehearsed = build_single_replica_config(plan_of(recipe, device="cpu"), gpus=2)
    assert (rehearsed.tp, rehearsed.extra_args) == (1, ())


@pytest.mark.parametrize(
    ("gpus", "steps"),
    [("", []), ("0", [("all-reduce", CheckStatus.OK), ("tiny run", CheckStatus.WARN)])],
)
def test_with_less_than_two_gpus_no_step_runs(
    gpus: str, steps: list[tuple[str, CheckStatus]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    monkeypatch.setattr(
        gpu_facts, "read_gpu_facts", lambda role, *rest: PythonFacts(role, "python")
    )
    started: list[str] = []
    results = [*examine_gpu_node(plan_of(), started.append)]
    assert [(one.name, one.verdict) for one in results[8:]] == steps
    assert started == []


def test_gpus_that_the_recipe_names_must_be_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    with pytest.raises(RecipeError, match=r"cluster\.gpus names GPUs 7"):
        next(examine_gpu_node(plan_of(gpu_recipe("cluster.gpus=[7]"))))


def test_a_device_belongs_to_the_examination(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of("doctor", "--device", "cpu") == RecipeError.exit_code
    assert "--device belongs to --gpu" in capsys.readouterr().err


def test_a_python_that_fails_says_its_last_line(tmp_path: Path) -> None:
    broken = write_program(tmp_path / "python", "echo Traceback >&2\necho oh no >&2\nexit 1\n")
    assert read_gpu_facts("train", str(broken), {}).error == "oh no"
    nowhere = read_gpu_facts("train", str(tmp_path / "nowhere"), {})
    assert "does not start" in nowhere.error
    answer = '{"torch": "2.14.1", "cuda": "13.0", "nccl": "2.30.7", "gpus": 2}'
    sound = write_program(tmp_path / "sound", f"echo noise\necho '{answer}'\n")
    found = read_gpu_facts("serve", str(sound), {})
    assert (found.role, found.nccl, found.gpus) == ("serve", "2.30.7", 2)


def python_of(role: str, **changes: Any) -> PythonFacts:
    return replace(
        PythonFacts(role, f"/{role}/python", "2.14.1+cu130", "13.0", "2.30.7", 8), **changes
    )


SOUND = NodeFacts(
    visible_gpus=tuple("01234567"),
    visible_source="CUDA_VISIBLE_DEVICES='0,1,2,3,4,5,6,7'",
    driver="580.95.05",
    gpus=((H100, 81559),) * 8,
    has_nvlink=True,
    has_ibverbs=True,
    adapters=2,
    memlock_bytes=None,
    nvcc="/usr/local/cuda/bin/nvcc",
    pythons=(python_of("train"), python_of("serve")),
)
"""A node on which nothing is wrong."""


def test_a_sound_node_passes_every_check() -> None:
    found = list(judge_facts(SOUND, "mlx5_0"))
    assert {one.verdict for one in found} == {CheckStatus.OK}
    names = ["GPUs", "driver", "torch train", "torch serve", "NCCL", "RDMA", "memlock", "nvcc"]
    assert [one.name for one in found] == names
    assert found[0].finding == f"8 visible: {H100} with 80 GiB, joined by NVLink"


NO_ADAPTER = {"adapters": 0, "has_ibverbs": False}


@pytest.mark.parametrize(
    ("changes", "check", "verdict", "said"),
    [
        ({"gpus": (), "visible_gpus": ()}, "GPUs", "fail", "shows none"),
        ({"visible_gpus": ()}, "GPUs", "fail", "8 in the node, none visible"),
        ({"driver_error": "GPU is lost"}, "GPUs", "fail", "GPU is lost"),
        ({"gpus": (SOUND.gpus[0], ("A100", 40960))}, "GPUs", "warn", "A100 with 40 GiB and NVIDIA"),
        ({"driver": "570.133.20"}, "driver", "fail", "needs 580 or newer"),
        ({"driver": "", "pythons": ()}, "driver", "fail", "none; torch for CUDA 13 needs 580"),
        (
            {"driver": "535.183", "pythons": (python_of("train", cuda="12.8"),)},
            *("driver", "ok", "needs 525"),
        ),
        ({"pythons": (python_of("train", cuda="14.1"),)}, "driver", "ok", "needs 580"),
        ({"has_ibverbs": False}, "RDMA", "fail", "no libibverbs: NCCL takes TCP"),
        (NO_ADAPTER, "RDMA", "fail", "NCCL_IB_HCA=mlx5_0"),
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
            {"pythons": (python_of("serve", gpus=7),)},
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
    results = judge_facts(replace(SOUND, **changes), "mlx5_0")
    (found,) = (one for one in results if one.name == check)
    assert found.verdict == verdict
    assert said in found.finding
    assert bool(found.hint) == (verdict != "ok")


def test_what_nvidia_smi_says_is_read() -> None:
    listed = "580.95.05, NVIDIA H100 80GB HBM3, 81559\n580.95.05, NVIDIA GB10, [N/A]\n"
    assert parse_nvidia_smi_gpus(listed) == ("580.95.05", ((H100, 81559), ("NVIDIA GB10", 0)))
    assert parse_nvidia_smi_gpus("") == ("", ())
    matrix = "\tGPU0\tGPU1\tNIC0\nGPU0\t X \t{0}\tSYS\nGPU1\t{0}\t X \tSYS\nNIC0\tSYS\tSYS\t X\n"
    assert has_nvlink(matrix.format("NV18"))
    assert not has_nvlink(matrix.format("PHB"))


@pytest.mark.parametrize(
    ("backend", "bytes_per_s", "wrong", "verdict"),
    [
        ("nccl", 400e9, 0, "ok"),
        ("nccl", 90e9, 0, "fail"),
        ("gloo", 1.0, 0, "ok"),
        ("gloo", 1.0, 1, "fail"),
        ("nccl", math.nan, 0, "fail"),
    ],
)
def test_rates_have_a_floor_and_results_must_be_right(
    backend: str, bytes_per_s: float, wrong: int, verdict: str
) -> None:
    rates = CollectiveRates(8, backend, 256 << 20, bytes_per_s, 150e9, wrong)
    assert judge_rates(rates, 100e9).verdict == verdict


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
