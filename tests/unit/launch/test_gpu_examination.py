"""What doctor's examination of GPU nodes would start, and with what."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from areal_hpc.errors import RecipeError
from areal_hpc.launch.doctor.checks import ok
from areal_hpc.launch.doctor.gpu import facts
from areal_hpc.launch.doctor.gpu.examination import (
    GpuExamination,
    NodeTaskRequest,
    build_examination_script,
    examine_node,
    list_sbatch_flags,
)
from areal_hpc.launch.doctor.gpu.facts import PythonFacts, ask_python_for_gpu_facts, find_nvcc
from areal_hpc.launch.doctor.gpu.plan import GpuCheckPlan, build_check_plan
from areal_hpc.launch.doctor.gpu.steps import (
    RankPlace,
    build_single_replica_config,
    build_tiny_recipe,
)
from areal_hpc.launch.doctor.registry import write_evidence
from areal_hpc.recipe.loading import load_recipe
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.recipe.sections.cluster import JobOptions, SlurmConfig
from tests.support.commands import exit_code_of, write_program
from tests.support.environments import CHECKOUT

RECIPE = CHECKOUT / "recipes" / "gpu8_gsm8k_qwen3_0.6b.yaml"
NETWORK: dict[str, Any] = {"interface": "ib0", "nccl": {"NCCL_IB_HCA": "mlx5_0"}}


def gpu_recipe(*overrides: str) -> Recipe:
    return load_recipe(RECIPE, overrides)


def plan_of(recipe: Recipe | None = None, device: Any = "cuda", nodes: int = 0) -> GpuCheckPlan:
    slurm = SlurmConfig.model_validate({"network": NETWORK})
    return build_check_plan(recipe, slurm, device, nodes)


def test_the_plan_has_the_variables_and_the_flags_of_a_run() -> None:
    recipe = gpu_recipe("cluster.serve={python: /serve/python, variables: {SGLANG_X: '1'}}")
    plan = plan_of(recipe, nodes=2)
    assert plan.pythons["serve"] == "/serve/python"
    serve, train = plan.variables["serve"], plan.variables["train"]
    assert serve["NCCL_CUMEM_ENABLE"] == train["NCCL_CUMEM_ENABLE"] == "0"
    assert train["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert (serve["SGLANG_X"], serve["NCCL_IB_HCA"]) == ("1", "mlx5_0")
    assert plan.inference == recipe.inference.model_dump(mode="json")
    assert plan.trainer_dtype == "bfloat16"
    assert plan.gpus == "auto"
    assert plan_of(gpu_recipe("cluster.gpus=[2, 3]")).gpus == (2, 3)
    alone = plan_of(recipe)
    assert "NCCL_IB_HCA" not in alone.variables["serve"]
    rehearsed = plan_of(device="cpu")
    assert rehearsed.trainer_dtype == "float32"
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
    assert (rehearsed.tp, rehearsed.extra_args, rehearsed.dtype) == (1, (), "float32")


@pytest.fixture
def visible_gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Nothing is asked of Pythons; `CUDA_VISIBLE_DEVICES` names four GPUs."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.setattr(
        facts, "ask_python_for_gpu_facts", lambda role, *rest: PythonFacts(role, "python")
    )
    return monkeypatch


@pytest.mark.parametrize(
    ("gpus", "skipped"), [("", []), ("2", [("all-reduce", "ok"), ("tiny run", "warn")])]
)
def test_fewer_than_two_gpus_measure_nothing(
    gpus: str, skipped: list[tuple[str, str]], visible_gpus: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    visible_gpus.setenv("CUDA_VISIBLE_DEVICES", gpus)
    started: list[str] = []
    report = examine_node(plan_of(), tmp_path, RankPlace(), started.append)
    results = [(one.name, one.verdict) for one in report.results]
    assert results[-len(skipped) or len(results) :] == skipped
    assert (report.node_rates, report.run, started) == (None, None, [])


def test_the_job_asks_for_nodes_as_the_trainers_would(tmp_path: Path) -> None:
    options = JobOptions(
        gpus_per_node=8, cpus_per_task=64, exclusive=True, setup=("module load cuda",)
    )
    plan = plan_of(nodes=4)
    flags = list_sbatch_flags(plan, options)
    assert {"--nodes=4", "--ntasks-per-node=1", "--gres=gpu:8", "--cpus-per-task=64"} < {*flags}
    assert {"--mem=0", "--exclusive"} < {*flags}
    script = build_examination_script(plan, options, tmp_path / "a b" / "order.json").splitlines()
    assert script[:2] == ["#!/bin/bash", "module load cuda"]
    assert script[2].startswith("srun --ntasks-per-node=1")
    assert "--cpus-per-task=64" in script[2]
    assert script[2].endswith(f"examination '{tmp_path}/a b/order.json'")
    bare = JobOptions(gpus_per_node=8)
    assert {"--mem=0", "--exclusive"} < {*list_sbatch_flags(plan, bare)}
    assert "--cpu-bind=none" in build_examination_script(plan, bare, tmp_path)
    rehearsed = list_sbatch_flags(plan_of(device="cpu", nodes=2), options)
    assert not [word for word in rehearsed if word.startswith("--gres")]
    with pytest.raises(RecipeError, match="how many GPUs a node has") as refused:
        list_sbatch_flags(plan, JobOptions())
    assert refused.value.problems[0].key == "cluster.slurm.gpus_per_node"


def test_a_request_survives_its_file(tmp_path: Path) -> None:
    plan = msgspec.structs.replace(plan_of(gpu_recipe(), nodes=2), gpus=("2", 3))
    request = NodeTaskRequest(plan, str(tmp_path))
    assert msgspec.json.decode(msgspec.json.encode(request), type=NodeTaskRequest) == request


@pytest.mark.usefixtures("visible_gpus")
def test_gpus_that_the_recipe_names_are_those_examined() -> None:
    found = facts.gather_node_facts(plan_of(gpu_recipe("cluster.gpus=[2, 3]")))
    assert found.visible_gpus == ("2", "3")
    with pytest.raises(RecipeError, match=r"cluster\.gpus names GPUs 7"):
        facts.gather_node_facts(plan_of(gpu_recipe("cluster.gpus=[7]")))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--nodes 2", "--nodes and --device belong to --gpu"),
        ("--gpu --nodes -1", "--nodes must be positive, got -1"),
        ("--gpu --nodes 2", "needs shared storage"),
        ("{recipe} --gpu --nodes 2 {container}", "each image has only one"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    container = "cluster.slurm.container={kind: apptainer, train: a.sif, serve: b.sif}"
    given = [
        {"{recipe}": str(RECIPE), "{container}": container}.get(word, word)
        for word in words.split()
    ]
    assert exit_code_of("doctor", *given) == RecipeError.exit_code
    assert said in capsys.readouterr().err


def test_a_python_that_fails_says_its_last_line(tmp_path: Path) -> None:
    broken = write_program(tmp_path / "python", "echo Traceback >&2\necho oh no >&2\nexit 1\n")
    assert ask_python_for_gpu_facts("train", str(broken), {}).error == "oh no"
    assert (
        "does not start" in ask_python_for_gpu_facts("train", str(tmp_path / "nowhere"), {}).error
    )
    answer = '{"torch": "2.14.1", "cuda": "13.0", "nccl": "2.30.7", "gpus": ["A", "B"]}'
    sound = write_program(tmp_path / "sound", f"echo noise\necho '{answer}'\n")
    found = ask_python_for_gpu_facts("serve", str(sound), {})
    assert (found.role, found.nccl, found.gpus) == ("serve", "2.30.7", ("A", "B"))


def test_the_compiler_is_looked_for_in_cuda_home_first(tmp_path: Path) -> None:
    for folder in ("home", "other", "path"):
        (tmp_path / folder / "bin").mkdir(parents=True)
        write_program(tmp_path / folder / "bin" / "nvcc", "true\n")
    environ = {"CUDA_HOME": str(tmp_path / "home"), "PATH": str(tmp_path / "path" / "bin")}
    assert find_nvcc(environ, ()) == str(tmp_path / "home" / "bin" / "nvcc")
    del environ["CUDA_HOME"]
    assert find_nvcc(environ, ()) == str(tmp_path / "path" / "bin" / "nvcc")
    nowhere = {"PATH": str(tmp_path)}
    assert find_nvcc(nowhere, (tmp_path / "other",)) == str(tmp_path / "other" / "bin" / "nvcc")
    assert find_nvcc(nowhere, ()) == ""


def test_the_evidence_has_results_and_what_was_measured(
    tmp_path: Path, visible_gpus: pytest.MonkeyPatch
) -> None:
    visible_gpus.setenv("SECRET_KEY", "do-not-tell")
    visible_gpus.setenv("CUDA_VISIBLE_DEVICES", "")
    examination = GpuExamination(plan_of())
    path = tmp_path / "doctor.json"
    write_evidence(path, [ok("GPUs", "8 visible")], examination)
    assert "gpu_nodes" not in json.loads(path.read_text())
    assert next(one.name for one in examination.list_results()) == "GPUs"
    write_evidence(path, [ok("GPUs", "8 visible")], examination)
    told = json.loads(path.read_text())
    assert told["results"] == [
        {"name": "GPUs", "verdict": "ok", "finding": "8 visible", "hint": ""}
    ]
    assert told["gpu_nodes"][0]["facts"]["visible_gpus"] == []
    assert told["commit"]
    assert "do-not-tell" not in path.read_text()
