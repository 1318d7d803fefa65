"""What the processes of `areal-hpc run` see of the machine's GPUs: real jobs, made-up GPUs.

The launcher, submitit's local executor and the supervisors are real; each process of the plan is
replaced by one that writes down the variable by which CUDA would decide.
"""

import os
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from areal_hpc.jobs.processes.signals import StopEvent
from areal_hpc.launch import local_launcher
from areal_hpc.launch.plan import JobStage, LaunchFacts, plan_run
from areal_hpc.launch.setup import write_recipe
from areal_hpc.recipe.loading import load_recipe
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.rundir.jobs import JobSpec, ProcessSpec
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.view.live_progress import PlainReporter
from tests.support.environments import CHECKOUT

OUTER = "3,5,7,9"
RECORDER = """
import os, time
from pathlib import Path

def record(config):
    seen = Path(config["folder"]) / f"{config['name']}.{os.environ['AREAL_HPC_RANK']}"
    seen.with_suffix(seen.suffix + ".new").write_text(os.environ["CUDA_VISIBLE_DEVICES"])
    seen.with_suffix(seen.suffix + ".new").rename(seen)
    while not (config["leads"] and len(list(seen.parent.glob("*.[0-9]"))) == config["processes"]):
        time.sleep(0.05)
    Path(config["marker"]).touch()
"""


def recording(stage: JobStage, folder: Path) -> JobStage:
    """The stage, its processes replaced by recorders; it ends when all have written."""
    marker = folder / "done"
    processes = sum(
        {"all": job.tasks, "first": 1, "others": job.tasks - 1}[spec.tasks]
        for job in stage.jobs
        for spec in job.processes
    )

    shared = {"folder": str(folder / "seen"), "marker": str(marker), "processes": processes}

    def recorder(spec: ProcessSpec) -> ProcessSpec:
        config = {**shared, "name": spec.name, "leads": spec.name == "trainer"}
        return msgspec.structs.replace(spec, entry="recorder:record", config=config)

    def recorder_job(job: JobSpec) -> JobSpec:
        return msgspec.structs.replace(job, processes=[recorder(one) for one in job.processes])

    others = tuple(recorder_job(job) for job in stage.others)
    return replace(stage, leader=recorder_job(stage.leader), others=others, done_marker=marker)


def recipe_of(folder: Path, *overrides: str) -> Recipe:
    path = os.pathsep.join([str(folder), str(CHECKOUT)])
    roles = [
        f"cluster.{role}={{python: {sys.executable}, variables: {{PYTHONPATH: '{path}'}}}}"
        for role in ("serve", "train", "agents")
    ]
    return load_recipe(CHECKOUT / "recipes" / "quickstart.yaml", [*roles, *overrides])


@pytest.mark.parametrize(
    ("device", "shape", "expected"),
    [
        (
            "cuda",
            ("trainer.parallel.dp=2", "inference.replicas_per_cell=2"),
            {"trainer.0": "3", "trainer.1": "5", "inference.0": "7,9"},
        ),
        (
            "auto",
            ("inference.tp=2", "inference.nodes_per_replica=2"),
            {"trainer.0": "3", "inference.0": "5", "follower.1": "7"},
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
    recipe = recipe_of(tmp_path, f"trainer.device={device}", f"inference.device={device}", *shape)
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    write_recipe(recipe, paths.recipe)
    facts = LaunchFacts(train_tasks=8, valid_tasks=8, serve_python=sys.executable, sys_path=())
    stage = recording(plan_run(recipe, paths, facts)[-1], tmp_path)
    with closing(PlainReporter(paths, 1, 0)) as reporter:
        local_launcher.run_standalone_stage(
            stage, recipe, paths, reporter=reporter, stop=StopEvent()
        )
    seen = {path.name: path.read_text() for path in (tmp_path / "seen").iterdir()}
    without = {"ledger.0": "", "proxy.0": "", "driver.0": ""}
    assert seen == without | expected
