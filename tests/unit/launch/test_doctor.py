"""Doctor: checks of this machine and of a GPU node, and verdicts on facts and measurements."""

import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.errors import RecipeError
from areal_hpc.launch.doctor import gpu_facts, machine_checks
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
from areal_hpc.launch.doctor.machine_checks import (
    check_storage,
    check_storage_by_job,
    has_memory_limit,
    has_seccomp,
    has_user_namespaces,
)
from areal_hpc.launch.doctor.registry import CHECKS, DoctorCheck, check_interpreters, run_checks
from areal_hpc.launch.doctor.results import (
    CheckResult,
    CheckStatus,
    DoctorSubject,
    fail,
    format_checks,
    ok,
    warn,
)
from areal_hpc.launch.doctor.slurm_checks import (
    judge_commands_in_container,
    judge_gpus_by_task,
    judge_job_limit,
    judge_preemption,
    judge_submission_from_jobs,
    parse_slurm_time,
)
from areal_hpc.recipe.loading import load_recipe
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.recipe.sections.cluster import JobOptions, SlurmConfig
from areal_hpc.trainer.config import CollectiveRates
from tests.support.commands import exit_code_of, write_program
from tests.support.environments import CHECKOUT


def test_a_directory_is_judged_by_its_promises_and_left_as_it_was(tmp_path: Path) -> None:
    found = {check.name: check.verdict for check in check_storage(DoctorSubject(fileroot=tmp_path))}
    kept = dict.fromkeys(("file root", "rename, fsync", "locks", "clock"), CheckStatus.OK)
    assert found | kept == found
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    (check,) = check_storage(DoctorSubject(fileroot=tmp_path / "file" / "below"))
    assert check.verdict is CheckStatus.FAIL
    assert "cluster.fileroot" in check.hint


def test_ctrl_c_leaves_no_job_or_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[tuple[str, ...]] = []

    def run_slurm(*words: str) -> str:
        called.append(words)
        return "17;cluster\n"

    def interrupt(*arguments: object) -> CheckResult:
        raise KeyboardInterrupt

    monkeypatch.setattr(machine_checks, "run_slurm_command", run_slurm)
    monkeypatch.setattr(machine_checks, "await_answer", interrupt)
    with pytest.raises(KeyboardInterrupt):
        check_storage_by_job(tmp_path, JobOptions(), print)
    assert called[-1] == ("scancel", "--quiet", "17")
    assert list(tmp_path.iterdir()) == []


def test_interpreters_tell_their_versions_or_what_they_lack(tmp_path: Path) -> None:
    broken = write_program(tmp_path / "python", "echo no such library >&2\nexit 127")
    pythons = {"train": sys.executable, "serve": sys.executable, "agents": str(broken)}
    recipe = load_recipe(CHECKOUT / "recipes" / "quickstart.yaml")
    train, serve, agents = check_interpreters(recipe, pythons)
    assert train.verdict is CheckStatus.OK
    assert "megatron-core 0.16.1" in train.finding
    assert serve.verdict is CheckStatus.FAIL
    assert "lacks sglang" in serve.finding
    assert agents.finding.endswith("does not run: no such library")
    (missing,) = check_interpreters(recipe, {"train": "/no/such/python"})
    assert missing.finding == "no Python interpreter for role train at /no/such/python"
    assert missing.hint == (
        "make setup, or set cluster.train.python to the interpreter of the role"
    )


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1-00:00:00", 86400), ("02:30:00", 9000), ("UNLIMITED", None), ("", None)],
)
def test_time_limits_are_read_as_slurm_writes_them(text: str, seconds: int | None) -> None:
    assert parse_slurm_time(text) == seconds


def test_every_finding_that_is_not_well_says_what_to_try() -> None:
    lines = format_checks(
        [ok("a", "good"), warn("longer", "so so\nand more", "this"), fail("c", "bad", "that")]
    )
    assert lines == [
        "ok    a       good",
        "warn  longer  so so",
        "              and more",
        "              try: this",
        "fail  c       bad",
        "              try: that",
        "1 ok, 1 warnings, 1 failed",
    ]


REQUEUED = SlurmConfig()
ENDED_EARLY = SlurmConfig(sbatch={"no-requeue": True})
JUDGED = [
    # fact of the site, verdict, part of the finding
    (judge_preemption("p", "OFF", 0), CheckStatus.OK, "not preempted"),
    (judge_preemption("p", "REQUEUE", 30), CheckStatus.OK, "Slurm starts it again"),
    (judge_preemption("p", "CANCEL", 30), CheckStatus.OK, "asks for another start"),
    (judge_preemption("p", "CANCEL", 0), CheckStatus.WARN, "cancelled at once"),
    (judge_preemption("p", "GANG,SUSPEND", 0), CheckStatus.WARN, "suspended"),
    (judge_submission_from_jobs("p", "ALL", ENDED_EARLY), CheckStatus.OK, ""),
    (judge_submission_from_jobs("p", "login1", REQUEUED), CheckStatus.WARN, "cannot requeue"),
    (judge_submission_from_jobs("p", "login1", ENDED_EARLY), CheckStatus.WARN, "that ends early"),
    (judge_job_limit("QOS normal", 5, 4, 0), CheckStatus.OK, "QOS normal allows 5 jobs"),
    (judge_job_limit("QOS normal", 3, 4, 0), CheckStatus.FAIL, "QOS normal allows 3 jobs"),
    (judge_job_limit("QOS normal", 4, 4, 1), CheckStatus.WARN, "QOS normal allows 4 jobs"),
    (judge_job_limit("QOS normal", 4, 4, 0), CheckStatus.WARN, "QOS normal allows 4 jobs"),
]


@pytest.mark.parametrize(("found", "status", "text"), JUDGED)
def test_what_a_site_does_is_foretold(found: CheckResult, status: CheckStatus, text: str) -> None:
    assert found.verdict is status
    assert text in found.finding


def test_where_a_job_cannot_submit_or_reach_munge_a_caretaker_outside_does() -> None:
    for slurm in (REQUEUED, ENDED_EARLY):
        check = judge_submission_from_jobs("p", "login1", slurm)
        assert "areal-hpc caretaker RUN" in check.hint
    mounted = SlurmConfig.model_validate({"container": {"mounts": ["/run/munge"]}})
    assert judge_commands_in_container(SlurmConfig()).verdict is CheckStatus.WARN
    assert judge_commands_in_container(mounted).verdict is CheckStatus.OK


@pytest.mark.parametrize(("kind", "warnings"), [("pyxis", 1), ("apptainer", 0)])
def test_gpus_by_task_are_warned_of_in_containers_of_pyxis(kind: str, warnings: int) -> None:
    container = {"kind": kind, "train": "/a.sqsh", "serve": "/b.sqsh"}
    jobs = {"cell": {"sbatch": {"gpus-per-task": 1}}}
    site = SlurmConfig.model_validate({"container": container, "jobs": jobs})
    assert len([*judge_gpus_by_task(site)]) == warnings


def test_a_check_that_raises_has_failed_and_hides_no_other() -> None:
    def refuse(subject: DoctorSubject) -> list[CheckResult]:
        raise RecipeError("the shoe does not fit", hint="another foot")

    def stumble(subject: DoctorSubject) -> Iterator[CheckResult]:
        yield ok("first", "good")
        raise ValueError("oh")

    checks = (
        DoctorCheck("refusing", refuse),
        DoctorCheck("stumbling", stumble),
        DoctorCheck("left out", refuse, ("recipe",)),
        DoctorCheck("last", lambda subject: [ok("last", "good")]),
    )
    results = run_checks(DoctorSubject(), checks=checks)
    assert [(check.name, check.verdict) for check in results] == [
        ("refusing", CheckStatus.FAIL),
        ("first", CheckStatus.OK),
        ("stumbling", CheckStatus.FAIL),
        ("last", CheckStatus.OK),
    ]
    assert (results[0].finding, results[0].hint) == ("the shoe does not fit", "another foot")
    assert "ValueError: oh" in results[2].finding
    assert len({check.name for check in CHECKS}) == len(CHECKS)


def test_slurm_is_missed_only_if_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm's commands exist without a cluster; without a configuration they search for 15 s."""
    (tmp_path / "slurm.conf").touch()
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    slurm_check, isolation, means = run_checks(DoctorSubject())
    assert (isolation.name, means.name) == ("isolation", "means of isolation")
    assert slurm_check.verdict is CheckStatus.OK
    assert "`areal-hpc run` works without it" in slurm_check.finding
    assert len(slurm_check.finding.splitlines()) == 1
    meant = run_checks(DoctorSubject(has_site=True))
    verdicts = [check.verdict for check in meant]
    assert verdicts == [CheckStatus.FAIL, isolation.verdict, CheckStatus.OK]
    assert len(meant[0].finding.splitlines()) == 1


@pytest.mark.parametrize(
    ("membership", "limits", "is_held"),
    [
        ("4:memory:/job/step\n0::/\n", {"memory/job/memory.limit_in_bytes": "1073741824"}, True),
        ("4:memory:/job\n", {"memory/job/memory.limit_in_bytes": "9223372036854771712"}, False),
        ("0::/slurm/job_1/step_0\n", {"slurm/job_1/memory.max": "1073741824"}, True),
        ("0::/slurm/job_1/step_0\n", {"slurm/job_1/memory.max": "max"}, False),
        ("1:cpu:/job\n", {"cpu/job/memory.max": "1"}, False),
    ],
)
def test_a_control_group_or_one_above_it_limits_memory(
    membership: str, limits: dict[str, str], is_held: bool, tmp_path: Path
) -> None:
    (tmp_path / "membership").write_text(membership)
    for name, limit in limits.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(f"{limit}\n")
    assert has_memory_limit(tmp_path / "membership", tmp_path) is is_held


def test_means_of_isolation_are_what_the_kernel_says(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "status").write_text("Name:\tx\nSeccomp:\t0\n")
    assert [has_seccomp(tmp_path, machine) for machine in ("x86_64", "riscv64")] == [True, False]
    (tmp_path / "self" / "status").write_text("Name:\tx\n")
    assert not has_seccomp(tmp_path, "x86_64")
    assert not has_user_namespaces(tmp_path)
    (tmp_path / "sys" / "user").mkdir(parents=True)
    for number, allowed in (("0", False), ("95000", True)):
        (tmp_path / "sys" / "user" / "max_user_namespaces").write_text(f"{number}\n")
        assert has_user_namespaces(tmp_path) is allowed


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
    config = build_single_replica_config(plan, gpus=8)
    assert (config.tp, config.nodes_per_replica, config.cells) == (4, 1, 1)
    Recipe.model_validate(build_tiny_recipe(plan, config, ("0", "GPU-1"), Path("/x/model")))
    assert config.extra_args == ("--log-level=info",)
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
    assert [(check.name, check.verdict) for check in results[8:]] == steps
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
    facts = read_gpu_facts("serve", str(sound), {})
    assert (facts.role, facts.nccl, facts.gpus) == ("serve", "2.30.7", 2)


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
"""Facts of a node without a fault."""


def test_a_sound_node_passes_every_check() -> None:
    checks = list(judge_facts(SOUND, "mlx5_0"))
    assert {check.verdict for check in checks} == {CheckStatus.OK}
    names = ["GPUs", "driver", "torch train", "torch serve", "NCCL", "RDMA", "memlock", "nvcc"]
    assert [check.name for check in checks] == names
    assert checks[0].finding == f"8 visible: {H100} with 80 GiB, joined by NVLink"


NO_ADAPTER = {"adapters": 0, "has_ibverbs": False}


@pytest.mark.parametrize(
    ("changes", "check", "verdict", "text"),
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
        ({"pythons": (python_of("serve", gpus=7),)}, *("torch serve", "fail", "sees 7 GPUs of 8")),
        (
            {"pythons": (python_of("train", nccl="2.29.7"), python_of("serve"))},
            *("NCCL", "fail", "train 2.29.7, serve 2.30.7: they refuse one another"),
        ),
        ({"pythons": (python_of("train", nccl=""),)}, "NCCL", "fail", "train none"),
    ],
)
def test_a_fault_of_a_node_is_told_with_a_way_out(
    changes: dict[str, Any], check: str, verdict: str, text: str
) -> None:
    results = judge_facts(replace(SOUND, **changes), "mlx5_0")
    (result,) = (result for result in results if result.name == check)
    assert result.verdict == verdict
    assert text in result.finding
    assert bool(result.hint) == (verdict != "ok")


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
