"""From a job and the options of a site to nodes and scripts, on each release of Slurm."""

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.errors import RecipeError
from areal_hpc.recipe.sections.cluster import JobOptions, SlurmConfig
from areal_hpc.rundir.jobs import JobSpec
from areal_hpc.slurm.batch_script import (
    DEFAULT_TIME_LIMIT_MINUTES,
    JobResources,
    RunContext,
    build_job_requests,
    compute_resources,
)
from areal_hpc.slurm.states import (
    describe_proof,
    find_error_time,
    is_release_covered,
    is_slurm_error_line,
    parse_exit_status,
    parse_release,
)
from areal_hpc.slurm.submit import render_script

PLACE = RunContext(
    name="exp-trial",
    run_dir=Path("/runs/exp/trial"),
    jobs_dir=Path("/runs/exp/trial/jobs"),
    pythons={"train": "/env/train python", "agents": "/env/agents/python"},
    working_folder=Path("/home/ada"),
)


def job(name: str = "trainer", tasks: int = 1, gpus: int = 0) -> JobSpec:
    return JobSpec(name, "train", [], tasks=tasks, gpus_per_task=gpus)


def script(spec: JobSpec, **slurm: Any) -> list[str]:
    return render_script(
        build_job_requests([spec], SlurmConfig.model_validate(slurm), PLACE)[0]
    ).splitlines()


@pytest.mark.parametrize(
    ("tasks", "gpus", "options", "nodes", "tasks_per_node", "gpus_per_node"),
    [
        (4, 0, {}, 1, 4, 0),
        (4, 0, {"sbatch": {"ntasks-per-node": 2}}, 2, 2, 0),
        (1, 0, {"sbatch": {"ntasks-per-node": 8}}, 1, 1, 0),
        (32, 1, {"gpus_per_node": 8}, 4, 8, 8),
        (4, 1, {"gpus_per_node": 8}, 1, 4, 4),
        (1, 4, {}, 1, 1, 4),
        (8, 1, {"gpus_per_node": 8, "sbatch": {"ntasks-per-node": 2}}, 4, 2, 2),
    ],
)
def test_tasks_are_spread_over_whole_nodes(
    tasks: int,
    gpus: int,
    options: dict[str, Any],
    nodes: int,
    tasks_per_node: int,
    gpus_per_node: int,
) -> None:
    shape = compute_resources(job(tasks=tasks, gpus=gpus), JobOptions.model_validate(options))
    assert shape == JobResources(nodes, tasks_per_node, gpus_per_node, DEFAULT_TIME_LIMIT_MINUTES)


def test_every_job_that_does_not_fit_is_reported_at_once() -> None:
    jobs = [job(tasks=12, gpus=1), job("cell-0", gpus=16), job("cell-1", gpus=16)]
    with pytest.raises(RecipeError) as caught:
        build_job_requests(jobs, SlurmConfig(gpus_per_node=8), PLACE)
    assert [problem.message for problem in caught.value.problems] == [
        "12 tasks of the trainer job do not fill nodes of 8 tasks",
        "the cell job needs 16 GPUs per node; nodes have 8",
    ]


def test_tasks_with_gpus_need_to_know_how_many_a_node_has() -> None:
    with pytest.raises(RecipeError, match="the number of GPUs per node is not set"):
        compute_resources(job(tasks=16, gpus=1), JobOptions())


@pytest.mark.parametrize(
    ("spec", "options", "lines"),
    [
        (job(), {"partition": "a,b"}, {"partition=a,b"}),
        (
            job(tasks=4, gpus=1),
            {"gpus_per_node": 2, "sbatch": {"gres": "gpu:a100:{count}"}},
            {"gres=gpu:a100:2", "nodes=2", "ntasks-per-node=2"},
        ),
        (job(), {"sbatch": {"exclusive": True, "exclude": "n7"}}, {"mem=0", "exclude=n7"}),
        (job(), {"sbatch": {"licenses": "mat:1"}}, {"licenses=mat:1", "comment=/runs/exp/trial"}),
        (
            job(),
            {"sbatch": {"nice": 100, "contiguous": True, "hold": False}},
            {"nice=100", "contiguous"},
        ),
        (job(), {}, {"signal=USR2@90", "requeue", "open-mode=append"}),
        (job(), {"sbatch": {"no-requeue": True}}, {"no-requeue"}),
    ],
)
def test_options_become_lines(spec: JobSpec, options: dict[str, Any], lines: set[str]) -> None:
    found = script(spec, **options)
    assert {f"#SBATCH --{line}" for line in lines} <= set(found)
    assert not [line for line in found if "wckey" in line]
    assert ("#SBATCH --requeue" in found) is ("no-requeue" not in options.get("sbatch", {}))


def test_srun_is_told_of_the_processors_and_python_is_quoted_after_the_set_up() -> None:
    setup = ["module load cuda"]
    lines = script(job(), sbatch={"cpus-per-task": 3}, srun={"cpu-bind": "cores"}, setup=setup)
    assert " --cpus-per-task=3 --cpu-bind=cores '/env/train python' -u -m submitit" in lines[-1]
    assert "module load cuda" in lines[:-1]


def test_tasks_lie_beside_their_gpus_unless_the_site_places_them() -> None:
    ranks = job(tasks=4, gpus=1)
    assert " --distribution=block:block " in script(ranks, gpus_per_node=4)[-1]
    placed = script(ranks, gpus_per_node=4, srun={"distribution": "cyclic"})[-1]
    assert placed.count("--distribution=") == 1
    assert "--distribution" not in script(job(gpus=4), gpus_per_node=4)[-1]
    assert "--distribution" not in script(job(tasks=4))[-1]


def test_flags_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="pattern"):
        SlurmConfig.model_validate({"sbatch": {"-N": 4}})


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("array", "submitted by itself"),
        ("clusters", "on one cluster"),
        ("cluster-constraint", "federations are not supported"),
        ("comment", "found by their comments"),
        ("het-group", "each job of a run is one of its own"),
    ],
)
def test_flags_that_would_break_a_run_are_refused_by_name(flag: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"--{flag} is refused: .*{said}"):
        SlurmConfig.model_validate({"jobs": {"cell": {"sbatch": {flag: "1"}}}})


@pytest.mark.parametrize("value", [True, 0, "many"])
def test_numbers_of_tasks_and_processors_are_checked(value: object) -> None:
    with pytest.raises(ValueError, match=r"at least 1|invalid literal"):
        SlurmConfig.model_validate({"sbatch": {"ntasks-per-node": value}})


def test_options_of_sbatch_are_merged_by_name_and_false_takes_one_out() -> None:
    slurm = SlurmConfig.model_validate(
        {
            "sbatch": {"reservation": "rl-week", "nice": 100},
            "jobs": {"cell": {"sbatch": {"nodelist": "n01", "nice": False}}},
        }
    )
    assert slurm.get_options_of_job("cell-0").sbatch == {
        "reservation": "rl-week",
        "nodelist": "n01",
    }
    assert slurm.get_options_of_job("trainer").sbatch == {"reservation": "rl-week", "nice": 100}


AT = "2026-11-29T08:21:13"


@pytest.mark.parametrize(
    "line",
    [
        f"slurmstepd: error: *** JOB 7 ON n02 CANCELLED AT {AT} DUE TO TIME LIMIT ***",
        f"slurmstepd-n05: error: *** STEP 7.0 ON n02 CANCELLED AT {AT} ***",
        f"[{AT}.243] error: *** STEP 31.0 ON n02 CANCELLED AT {AT} DUE to SIGNAL Terminated ***",
        f"[{AT}.243] error: Detected 1 oom_kill event in StepId=31.0.",
    ],
)
def test_an_error_of_slurmstepd_is_found_with_its_time_on_every_release(line: str) -> None:
    assert is_slurm_error_line(line)
    told = datetime.fromisoformat(AT).timestamp() if AT in line else None
    assert find_error_time(line) == told


def test_an_error_of_srun_has_no_time() -> None:
    line = "srun: error: n02: task 0: Exited with exit code 137"
    assert is_slurm_error_line(line)
    assert find_error_time(line) is None


@pytest.mark.parametrize(
    "line", ["2026-11-29 08:21:13,000 ERROR it broke", "[2026-11-29 08:21:13 TP0] Decode batch"]
)
def test_what_programs_log_is_no_error_of_slurm(line: str) -> None:
    assert not is_slurm_error_line(line)


@pytest.mark.parametrize(
    ("printed", "status"),
    [("256", (1, 0)), ("9", (0, 9)), ("1:0", (1, 0)), ("0:9", (0, 9)), ("0", (0, 0)), ("", (0, 0))],
)
def test_exit_statuses_are_those_of_each_release(printed: str, status: tuple[int, int]) -> None:
    assert parse_exit_status(printed) == status


@pytest.mark.parametrize(
    ("version", "release", "is_near", "said"),
    [
        ("22.05.8", "22.05", True, "the tests run on it"),
        ("slurm-wlm 26.05.5", "26.05", True, "the tests run on it"),
        ("25.05.0-rc1", "25.05", True, "not tested itself, but 22.05, 24.11, 26.05 are"),
        ("21.08.5", "21.08", False, "outside of what is tested: 22.05, 24.11, 26.05"),
        ("26.11.0", "26.11", False, "outside of what is tested: 22.05, 24.11, 26.05"),
        ("?", "", False, "outside of what is tested: 22.05, 24.11, 26.05"),
    ],
)
def test_versions_say_what_is_proven(version: str, release: str, is_near: bool, said: str) -> None:
    assert parse_release(version) == release
    assert is_release_covered(version) == is_near
    assert said in describe_proof(version)
