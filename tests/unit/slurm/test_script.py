"""Jobs become nodes, scripts and prices on each release; an allocation runs those that fit."""

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
from areal_hpc.slurm.scontrol import (
    Allocation,
    NodeShare,
    parse_node_shares,
    read_allocation,
    strip_job_variables,
)
from areal_hpc.slurm.states import (
    describe_proof,
    find_error_time,
    is_release_covered,
    is_slurm_error_line,
    parse_exit_status,
    parse_release,
)
from areal_hpc.slurm.steps import StepPlacement, build_step_command, place_steps
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
    rendered = script(spec, **options)
    assert {f"#SBATCH --{line}" for line in lines} <= set(rendered)
    assert not [line for line in rendered if "wckey" in line]
    assert ("#SBATCH --requeue" in rendered) is ("no-requeue" not in options.get("sbatch", {}))


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
    ("flag", "reason"),
    [
        ("array", "submitted by itself"),
        ("clusters", "on one cluster"),
        ("cluster-constraint", "federations are not supported"),
        ("comment", "found by their comments"),
        ("het-group", "each job of a run is submitted separately"),
    ],
)
def test_flags_that_would_break_a_run_are_refused_by_name(flag: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"--{flag} is refused: .*{reason}"):
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
    expected = datetime.fromisoformat(AT).timestamp() if AT in line else None
    assert find_error_time(line) == expected


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
    ("version", "release", "is_near", "text"),
    [
        ("22.05.8", "22.05", True, "the tests run on it"),
        ("slurm-wlm 26.05.5", "26.05", True, "the tests run on it"),
        ("25.05.0-rc1", "25.05", True, "not tested itself, but 22.05, 24.11, 26.05 are"),
        ("21.08.5", "21.08", False, "outside of what is tested: 22.05, 24.11, 26.05"),
        ("26.11.0", "26.11", False, "outside of what is tested: 22.05, 24.11, 26.05"),
        ("?", "", False, "outside of what is tested: 22.05, 24.11, 26.05"),
    ],
)
def test_versions_say_what_is_proven(version: str, release: str, is_near: bool, text: str) -> None:
    assert parse_release(version) == release
    assert is_release_covered(version) == is_near
    assert text in describe_proof(version)


SHOWN = (
    "JobId=12 JobState=RUNNING NodeList=n[1-3] NumNodes=3 ReqNodeList=(null) JOB_GRES=gpu:h100:10 "
    "  Nodes=n[1-2] CPU_IDs=0-3,8 Mem=4000 GRES=gpu:h100:4(IDX:0-3),shard:2   "
    "Nodes=n3 CPU_IDs=0 Mem=0 GRES=gpu:2(IDX:0,3) MinCPUsNode=1"
)


def trainer(ranks: int, gpus: int = 1) -> JobSpec:
    return JobSpec("trainer", "train", [], tasks=ranks, gpus_per_task=gpus)


def cells(count: int, gpus: int = 1, nodes: int = 1) -> list[JobSpec]:
    return [
        JobSpec(f"cell-{index}", "agents", [], tasks=nodes, is_task_a_node=True, gpus_per_task=gpus)
        for index in range(count)
    ]


def allocation(nodes: int, gpus: int, cpus: int = 16) -> Allocation:
    shares = tuple(NodeShare(f"n{number + 1}", cpus, 8000, gpus) for number in range(nodes))
    return Allocation("12", shares, None)


def nodes_of(jobs: list[JobSpec], of: Allocation) -> dict[str, tuple[str, ...]]:
    return {name: step.nodes for name, step in place_steps(jobs, of).items()}


def test_what_slurm_tells_of_each_node_is_read() -> None:
    assert parse_node_shares(SHOWN) == (
        NodeShare("n1", 5, 4000, 4),
        NodeShare("n2", 5, 4000, 4),
        NodeShare("n3", 1, 0, 2),
    )


def test_outside_of_an_allocation_the_error_names_the_way_out() -> None:
    with pytest.raises(RecipeError, match="in no allocation of Slurm") as refusal:
        read_allocation({})
    assert "salloc --nodes=2" in str(refusal.value)


@pytest.mark.parametrize(
    ("jobs", "of", "expected"),
    [
        ([trainer(4), *cells(2, 4)], allocation(3, 4), ["n1", "n2", "n3"]),
        ([trainer(8), *cells(1, 4)], allocation(3, 4), ["n1,n2", "n3"]),
        ([trainer(4), *cells(1, 4, nodes=2)], allocation(3, 4), ["n1", "n2,n3"]),
        ([trainer(2), *cells(3)], allocation(2, 4), ["n1", "n2", "n2", "n2"]),
        # The trainer's node comes last, and only if it has GPUs left.
        ([trainer(2), *cells(3, 2)], allocation(2, 4), ["n1", "n2", "n2", "n1"]),
        ([trainer(2), *cells(2)], allocation(1, 4), ["n1", "n1", "n1"]),
        ([trainer(6), *cells(1, 2)], allocation(3, 4), ["n1,n2", "n3"]),
    ],
)
def test_the_trainer_gets_the_first_nodes_and_cells_the_others(
    jobs: list[JobSpec], of: Allocation, expected: list[str]
) -> None:
    assert [",".join(nodes) for nodes in nodes_of(jobs, of).values()] == expected


@given(
    ranks=st.sampled_from([1, 2, 4, 6, 8]),
    n_cells=st.integers(1, 5),
    of_cell=st.integers(0, 4),
    n_nodes=st.integers(1, 5),
    gpus=st.integers(0, 8),
    cpus=st.integers(1, 12),
)
def test_no_node_gives_more_than_it_has(
    ranks: int, n_cells: int, of_cell: int, n_nodes: int, gpus: int, cpus: int
) -> None:
    jobs, of = [trainer(ranks), *cells(n_cells, of_cell)], allocation(n_nodes, gpus, cpus)
    try:
        placed = place_steps(jobs, of)
    except RecipeError:
        return
    assert [placed[job.name].tasks for job in jobs] == [job.tasks for job in jobs]
    for node in of.nodes:
        steps = [step for step in placed.values() if node.name in step.nodes]
        assert sum(step.gpus_per_node for step in steps) <= node.gpus
        assert sum(step.memory_mib_per_node for step in steps) <= node.memory_mib
        assert sum(step.cpus_per_task * step.tasks_per_node for step in steps) <= node.cpus
        assert all(step.cpus_per_task >= 1 for step in steps)


def test_an_allocation_that_is_too_small_is_compared_with_what_jobs_need() -> None:
    with pytest.raises(RecipeError) as refusal:
        place_steps([trainer(4), *cells(3, 4)], allocation(2, 4))
    message = str(refusal.value)
    assert "trainer 4 ranks x 1 GPU, cell-0 1 node x 4 GPUs" in message
    assert "in all 16 GPUs and at least 7 CPUs; it has n1 4 GPUs, 16 CPUs; n2 4 GPUs" in message


def test_without_gpus_auto_means_the_processors() -> None:
    placed = place_steps([trainer(2), *cells(1, 2)], allocation(1, 0), is_cpu=True)
    assert [step.gpus_per_node for step in placed.values()] == [0, 0]


def test_srun_is_told_all_and_takes_nothing_from_the_environment() -> None:
    step = StepPlacement("trainer", ("n1", "n2"), 4, 4, cpus_per_task=3, memory_mib_per_node=500)
    command = build_step_command(
        step, "12", "trainer.3", "py", Path("/l.json"), Path("/trainer.3-%t.log")
    )
    options = "--exact --nodes=2 --nodelist=n1,n2 --ntasks=8 --ntasks-per-node=4 --cpus-per-task=3"
    assert options in " ".join(command)
    assert {"--jobid=12", "--mem=500M", "--gres=gpu:4"} < set(command)
    assert command[-4:] == ["-u", "-m", "areal_hpc.jobs.supervisor", "/l.json"]
    environ = {"SLURM_NTASKS": "9", "SLURM_CONF": "/c", "CUDA_VISIBLE_DEVICES": "0", "PATH": "/"}
    assert strip_job_variables(environ) == {"SLURM_CONF": "/c", "PATH": "/"}
