"""Processes see their own GPUs of the machine, and a rank that fails a check ends the others."""

import os
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from areal_hpc.errors import ClusterError
from areal_hpc.jobs.processes.process_setup import StopEvent
from areal_hpc.launch import foreground_launcher
from areal_hpc.launch.doctor.gpu import build_check_plan, list_rank_gpus, measure_collectives
from areal_hpc.launch.plan import JobStage, PlanInputs, plan_run
from areal_hpc.launch.prepare import write_run_recipe
from areal_hpc.recipe.loading import load_recipe
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.recipe.sections.cluster import SlurmConfig
from areal_hpc.rundir.jobs import JobSpec, ProcessSpec
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.view.state.live_progress import PlainReporter
from tests.support.commands import write_program
from tests.support.environments import CHECKOUT

RECORDER = """
import os, time
from pathlib import Path

def record(config):
    seen = Path(config["folder"]) / f"{config['name']}.{os.environ['AREAL_HPC_RANK']}"
    seen.with_suffix(seen.suffix + ".new").write_text(os.environ["CUDA_VISIBLE_DEVICES"])
    seen.with_suffix(seen.suffix + ".new").rename(seen)
    while not (config["leads"] and len(list(seen.parent.glob("*.[0-9]"))) == config["awaited"]):
        time.sleep(0.05)
    Path(config["marker"]).touch()
"""


SGLANG = """#!/bin/sh
{{ echo "$CUDA_VISIBLE_DEVICES"; printf '%s\\n' "$@"; }} >{folder}/server.$$.new
mv {folder}/server.$$.new {folder}/server.$$.1
exec sleep 600
"""
"""SGLang's Python, which writes its visible GPUs and its arguments, a line each."""


def recording(stage: JobStage, folder: Path, servers: int = 0) -> JobStage:
    """Return the stage with recorders in place of its processes; it ends when all have written.

    Processes that manage servers stay, if servers are awaited.
    """
    marker = folder / "done"
    awaited = servers + sum(
        {"all": job.tasks, "first": 1, "others": job.tasks - 1}[spec.tasks]
        for job in stage.jobs
        for spec in job.processes
        if not (servers and spec.name == "inference")
    )
    shared = {"folder": str(folder / "seen"), "marker": str(marker), "awaited": awaited}

    def recorder(spec: ProcessSpec) -> ProcessSpec:
        if servers and spec.name == "inference":
            return spec
        config = {**shared, "name": spec.name, "leads": spec.name == "trainer"}
        return msgspec.structs.replace(spec, entry="recorder:record", config=config)

    def recorder_job(job: JobSpec) -> JobSpec:
        return msgspec.structs.replace(job, processes=[recorder(spec) for spec in job.processes])

    others = tuple(recorder_job(job) for job in stage.others)
    return replace(stage, leader=recorder_job(stage.leader), others=others, done_marker=marker)


def start_stage(recipe: Recipe, folder: Path, *, serve_python: str, servers: int = 0) -> None:
    paths = RunPaths(folder / "run")
    paths.root.mkdir()
    write_run_recipe(recipe, paths.recipe)
    facts = PlanInputs(
        train_tasks=8, tasks_by_evaluation_set={"valid": 8}, serve_python=serve_python, sys_path=()
    )
    stage = recording(plan_run(recipe, paths, facts)[-1], folder, servers)
    with closing(PlainReporter(paths, 1, 0)) as reporter:
        foreground_launcher.run_standalone_stage(
            stage, recipe, paths, reporter=reporter, stop=StopEvent()
        )


def recipe_of(folder: Path, *overrides: str, name: str = "quickstart") -> Recipe:
    path = os.pathsep.join([str(folder), str(CHECKOUT)])
    roles = [
        f"cluster.{role}={{python: {sys.executable}, variables: {{PYTHONPATH: '{path}'}}}}"
        for role in ("serve", "train", "agents")
    ]
    return load_recipe(CHECKOUT / "recipes" / f"{name}.yaml", [*roles, *overrides])


def list_recipes_of_one_node() -> list[str]:
    paths = sorted((CHECKOUT / "recipes").rglob("*.yaml"), key=lambda path: path.name)
    return [path.stem for path in paths if _has_eight_gpus(load_recipe(path))]


def _has_eight_gpus(recipe: Recipe) -> bool:
    served_on = count_servers(recipe) * recipe.inference.tp
    gpus = served_on + recipe.trainer.parallel.world_size
    return recipe.trainer.device != "cpu" and gpus == 8


def count_servers(recipe: Recipe) -> int:
    return recipe.inference.cells * recipe.inference.replicas_per_cell


def check_servers_get_gpus_of_their_own(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Start a shipped recipe on eight made-up GPUs: the servers' GPUs and command lines."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    records = tmp_path / "seen"
    records.mkdir()
    (tmp_path / "recorder.py").write_text(RECORDER)
    sglang = tmp_path / "sglang"
    sglang.write_text(SGLANG.format(folder=records))
    sglang.chmod(0o755)
    devices = ("trainer.device=cuda",)
    recipe = recipe_of(tmp_path, *devices, name=name)
    servers = count_servers(recipe)
    start_stage(recipe, tmp_path, serve_python=str(sglang), servers=servers)
    trained_on = {path.read_text() for path in records.glob("trainer.*")}
    used: set[str] = set()
    for path in records.glob("server.*.1"):
        visible, *words = path.read_text().splitlines()
        first = int(words[words.index("--base-gpu-id") + 1])
        used |= set(visible.split(",")[first : first + recipe.inference.tp])
        served = recipe.inference
        wanted = {
            "--context-length": served.context_length,
            "--dtype": recipe.trainer.dtype,
            "--device": "cuda",
            "--mem-fraction-static": served.mem_fraction_static,
            "--reasoning-parser": served.reasoning_parser,
            "--tool-call-parser": served.tool_call_parser,
            "--tp": served.tp,
        }
        options = {word: words[words.index(word) + 1] for word in wanted if word in words}
        assert options == {word: str(value) for word, value in wanted.items() if value is not None}
    assert len(used) == servers * recipe.inference.tp
    assert not used & trained_on
    assert len(used | trained_on) == 8


OUTER = "3,5,7,9"


@pytest.mark.parametrize(
    ("device", "shape", "expected"),
    [
        (
            "cuda",
            ("trainer.parallel.dp=2", "inference.replicas_per_cell=2"),
            {"trainer.0": "3", "trainer.1": "5", "inference.0": "7,9"},
        ),
        pytest.param(
            "auto",
            ("inference.tp=2", "inference.nodes_per_replica=2"),
            {"trainer.0": "3", "inference.0": "5", "follower.1": "7"},
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_each_process_sees_its_own_gpus_of_those_that_the_launcher_sees(
    device: str,
    shape: tuple[str, ...],
    expected: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", OUTER)
    (tmp_path / "seen").mkdir()
    (tmp_path / "recorder.py").write_text(RECORDER)
    recipe = recipe_of(tmp_path, f"trainer.device={device}", *shape)
    start_stage(recipe, tmp_path, serve_python=sys.executable)
    environments = {path.name: path.read_text() for path in (tmp_path / "seen").iterdir()}
    without = {"ledger.0": "", "proxy.0": "", "driver.0": ""}
    assert environments == without | expected


@pytest.mark.thorough
@pytest.mark.parametrize("name", list_recipes_of_one_node())
def test_each_recipe_of_one_node_starts_its_servers_on_gpus_of_their_own(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_servers_get_gpus_of_their_own(name, tmp_path, monkeypatch)


@pytest.mark.timeout(600)
def test_a_rank_that_fails_ends_the_others_and_says_why(tmp_path: Path) -> None:
    plan = build_check_plan(None, SlurmConfig(), "cpu")
    script = 'if [ "$AREAL_HPC_RANK" = 1 ]; then echo "CudaError: no kernel image"; exit 3; fi\n'
    python = write_program(tmp_path / "python", f"{script}exec sleep 300\n")
    broken = replace(plan, pythons={**plan.pythons, "train": str(python)})
    with pytest.raises(ClusterError, match="rank 1 exited with code 3: CudaError: no kernel image"):
        measure_collectives(broken, list_rank_gpus(broken, ()), tmp_path / "collectives")
