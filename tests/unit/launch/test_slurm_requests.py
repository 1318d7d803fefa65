"""A run's plan and requests to Slurm are pure functions of the recipe and a few facts."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from areal_hpc.errors import RecipeError
from areal_hpc.jobs.config import get_interpreters
from areal_hpc.launch.plan import JobStage, PlanInputs, plan_run
from areal_hpc.launch.prepare import PreparedRun
from areal_hpc.launch.slurm_launcher import (
    build_remaining_job_requests,
    build_slurm_launch_file,
    format_dry_run,
)
from areal_hpc.recipe.loading import load_recipe
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.rundir.jobs import EXCLUDED_NODE_LIFETIME_S, ExcludedNode, add_excluded_node
from areal_hpc.rundir.jsonl import append_line
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.slurm.submit import render_script

QUICKSTART = Path(__file__).parents[3] / "recipes" / "quickstart_slurm.yaml"
HERE = Path("/home/ada")
JOBS_BEHIND_SFT = ("trainer", "cell-0", "cell-1", "caretaker")


def load(fileroot: Path, *overrides: str) -> Recipe:
    return load_recipe(QUICKSTART, [f"cluster.fileroot={fileroot}", *overrides])


def dependencies(recipe: Recipe, after: Sequence[str] = ()) -> dict[str, str]:
    return {
        request.job: request.parameters.get("dependency", "")
        for request in build_remaining_job_requests(recipe, HERE, after)
    }


def test_all_jobs_wait_for_sft_and_that_for_what_was_asked(tmp_path: Path) -> None:
    assert dependencies(load(tmp_path), ["7", "8"]) == {
        "sft": "afterok:7:8",
        "trainer": "afterok:SFT_JOBID",
        "cell-0": "afterok:SFT_JOBID",
        "cell-1": "afterok:SFT_JOBID",
        "caretaker": "afternotok:TRAINER_JOBID,afterany:SFT_JOBID:CELL-0_JOBID:CELL-1_JOBID",
    }


def test_who_waits_for_a_run_that_comes_back_stays_and_for_sft_goes(tmp_path: Path) -> None:
    requests = build_remaining_job_requests(load(tmp_path), HERE, ["7"])
    options = {request.job: request.parameters["additional_parameters"] for request in requests}
    kills = {job: flags["kill-on-invalid-dep"] for job, flags in options.items()}
    assert kills == {"sft": "no", **dict.fromkeys(JOBS_BEHIND_SFT, "yes")}


def test_the_caretaker_asks_for_little_whatever_the_other_jobs_ask_for(tmp_path: Path) -> None:
    section = "{sbatch: {exclusive: true, mem: 900G}, partition: gpu, time_limit_minutes: 600}"
    own = "cluster.slurm.jobs.caretaker.partition=login"
    recipe = load(tmp_path, f"cluster.slurm={section}", own)
    *_, caretaker = build_remaining_job_requests(recipe, HERE)
    shown = format_dry_run(RunPaths(tmp_path), [caretaker])
    for line in ("partition=login", "mem=1G", "cpus-per-task=1", "time=15", "nodes=1"):
        assert f"#SBATCH --{line}\n" in shown
    assert "exclusive" not in shown
    assert "  0 jobs, " in shown, "it costs nothing worth a count"


def test_what_is_done_is_not_submitted_again(tmp_path: Path) -> None:
    recipe = load(tmp_path)
    RunPaths(recipe.run_dir).sft_export.mkdir(parents=True)
    waits = "afternotok:TRAINER_JOBID,afterany:CELL-0_JOBID:CELL-1_JOBID"
    assert dependencies(recipe) == {"trainer": "", "cell-0": "", "cell-1": "", "caretaker": waits}


def test_nodes_that_failed_are_excluded_for_a_day(tmp_path: Path) -> None:
    recipe = load(tmp_path, "cluster.slurm.sbatch.exclude=n9")
    nodes = RunPaths(recipe.run_dir).excluded_nodes
    nodes.parent.mkdir(parents=True)
    long_ago = ExcludedNode("n1", "no GPU", time.time() - EXCLUDED_NODE_LIFETIME_S - 1)
    append_line(nodes, long_ago)
    for node in ("n4", "n2", "n4"):
        add_excluded_node(nodes, node, "no GPU", "7")
    assert "#SBATCH --exclude=n9,n2,n4\n" in render_script(
        build_remaining_job_requests(recipe, HERE)[0]
    )


def test_tasks_are_told_the_network_and_how_to_go_on(tmp_path: Path) -> None:
    network = "cluster.slurm.network={interface: ib0, nccl: {NCCL_IB_HCA: mlx5_0}}"
    recipe = load(tmp_path, network, "cluster.train.variables={NCCL_IB_HCA: mlx5_3}")
    paths = RunPaths(recipe.run_dir)
    stages = plan_run(recipe, paths)
    ready = PreparedRun(paths, 3, get_interpreters(recipe), stages)
    launch = build_slurm_launch_file(stages[-1].leader, stages[-1], recipe, ready)
    assert launch.variables["agents"]["GLOO_SOCKET_IFNAME"] == "ib0"
    assert launch.variables["agents"]["NCCL_IB_HCA"] == "mlx5_0"
    assert launch.recipe == str(paths.recipe), "a role's own are read from there, and win"
    assert "mlx5_3" not in str(launch)
    assert launch.launcher_lock is None
    assert launch.slurm is not None
    assert launch.slurm.interface == "ib0"
    assert launch.slurm.done_marker == f"{recipe.run_dir}/FINISHED"


@pytest.mark.parametrize(
    ("ranks", "slurm", "switches_are_used"),
    [
        (8, "{gpus_per_node: 8}", True),
        (4, "{gpus_per_node: 8}", False),
        (4, "{gpus_per_node: 8, sbatch: {exclusive: true}}", True),
        (4, "{gpus_per_node: 8, sbatch: {exclusive: user}}", False),
    ],
)
def test_only_a_trainer_with_nodes_of_its_own_reduces_in_their_switches(
    tmp_path: Path, ranks: int, slurm: str, switches_are_used: bool
) -> None:
    recipe = load(
        tmp_path,
        "trainer.device=cuda",
        f"trainer.parallel.dp={ranks}",
        f"cluster.slurm={slurm}",
        "cluster.slurm.jobs.trainer.sbatch.ntasks-per-node=false",
    )
    paths = RunPaths(recipe.run_dir)
    stages = plan_run(recipe, paths)
    ready = PreparedRun(paths, 1, get_interpreters(recipe), stages)
    launch = build_slurm_launch_file(stages[-1].leader, stages[-1], recipe, ready)
    assert ("NCCL_NVLS_ENABLE" not in launch.variables["train"]) == switches_are_used


def test_containers_bring_their_own_interpreters(tmp_path: Path) -> None:
    images = "cluster.slurm.container={kind: apptainer, train: a.sif, serve: b.sif}"
    site = load(tmp_path, images, "cluster.agents.python=/mine/python")
    assert get_interpreters(site)["train"] == "/opt/areal_hpc/.venvs/main/bin/python"
    assert get_interpreters(site)["agents"] == "/mine/python"
    scripts = {
        request.job: render_script(request) for request in build_remaining_job_requests(site, HERE)
    }
    assert "a.sif /opt/areal_hpc/.venvs/main/bin/python -u" in scripts["trainer"]
    assert "b.sif /mine/python -u" in scripts["cell-1"]
    assert f"--bind={site.run_dir}" in scripts["cell-1"]
    assert "--nv" not in scripts["cell-1"], "it has no GPU"


def test_an_image_beside_the_recipe_is_a_file_to_pyxis_and_a_name_is_not(tmp_path: Path) -> None:
    images = "cluster.slurm.container={kind: pyxis, train: a.sqsh, serve: 'nvcr.io#me/b:1'}"
    requests = build_remaining_job_requests(load(tmp_path, images), HERE)
    scripts = {request.job: render_script(request) for request in requests}
    assert "--container-image=./a.sqsh " in scripts["trainer"]
    assert "--container-image=nvcr.io#me/b:1 " in scripts["cell-0"].replace("'", "")


def test_a_mount_that_pyxis_would_split_is_refused(tmp_path: Path) -> None:
    images = "cluster.slurm.container={kind: pyxis, train: a.sqsh, serve: b.sqsh, mounts: ['/a,b']}"
    with pytest.raises(RecipeError, match="without commas, got /a,b"):
        build_remaining_job_requests(load(tmp_path, images), HERE)


LOCAL = Path(__file__).parents[3] / "recipes" / "quickstart.yaml"
FACTS = PlanInputs(
    train_tasks=100,
    tasks_by_evaluation_set={"valid": 20},
    serve_python="/serve/python",
    sys_path=("/here",),
)


def planned(*overrides: str, facts: PlanInputs = FACTS) -> tuple[JobStage, ...]:
    return plan_run(load_recipe(LOCAL, overrides), RunPaths(Path("/run")), facts)


def test_the_trainer_imports_a_custom_loss_from_where_the_run_was_launched() -> None:
    name = "trainer.objective.custom=examples.objectives.sapo:compute_terms"
    (trainer,) = [spec for spec in planned(name)[1].leader.processes if spec.name == "trainer"]
    assert trainer.config["sys_path"] == ["/here"]
    assert [spec.config["sys_path"] for spec in planned()[1].leader.processes] == [[], []]


def test_every_cell_is_one_job_with_its_share_of_the_episodes() -> None:
    cells = ("inference.cells=3", "rollout.max_concurrent_rollouts=60")
    train = planned(*cells)[1]
    assert [job.name for job in train.others] == ["cell-0", "cell-1", "cell-2"]
    assert load_recipe(LOCAL, cells).episode_slots_per_cell == 20


def test_a_replica_that_spans_nodes_has_a_task_on_each_and_serves_from_the_first() -> None:
    overrides = ("inference.tp=4", "inference.nodes_per_replica=2")
    train = planned(*overrides, "trainer.device=cuda", "evaluation.separate_cell=true")[1]
    for job, name in zip(train.others, ("cell-0", "evaluation"), strict=True):
        assert (job.tasks, job.is_task_a_node, job.gpus_per_task) == (2, True, 2)
        run_by = {process.name: process.tasks for process in job.processes}
        assert run_by.pop("follower") == "others"
        assert run_by == dict.fromkeys(("inference", "proxy", "driver"), "first")
        assert {process.config["cell"] for process in job.processes} == {name}


def test_the_ledger_knows_the_size_of_every_source() -> None:
    parts = "[{generator: 'a:b', weight: 2.0}, {path: c.jsonl}]"
    facts = replace(FACTS, tasks_of_sources=(30, 70))
    _, train = planned(f"train_dataset={{sources: {parts}, generator: null}}", facts=facts)
    assert train.leader.processes[0].config["tasks_of_sources"] == [30, 70]


def test_the_trainer_has_a_task_per_rank_and_one_ledger() -> None:
    leader = planned("trainer.parallel.tp=2", "trainer.parallel.dp=2")[1].leader
    assert leader.tasks == 4
    assert leader.processes[1].config["tasks_by_evaluation_set"] == {"valid": 20}
    assert [process.name for process in leader.processes if process.tasks == "first"] == ["ledger"]


def test_training_cells_evaluate_unless_a_job_of_its_own_does() -> None:
    train = planned()[1]
    assert [job.processes[-1].config["splits"] for job in train.others] == [["train", "valid"]]
    train = planned("evaluation.separate_cell=true", "inference.cells=2")[1]
    assert {job.name: job.processes[-1].config["splits"] for job in train.others} == {
        "cell-0": ["train"],
        "cell-1": ["train"],
        "evaluation": ["valid"],
    }
