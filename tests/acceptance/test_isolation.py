"""Hostile programs as the tool of an agent, in real runs: none succeeds on any runtime here.

Runs on this machine, and runs whose cells are jobs of a devcluster, with the memory limits of
control groups and without. The wall that stopped each attack goes to
`benchmarks/results/isolation.json`, which docs/attacks.md shows.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.rundir.paths import RunPaths
from areal_hpc.sandbox.runtimes import find_installed_runtimes
from tests.support.attacks import tool
from tests.support.attacks.agent import SANDBOX, SECRET_WORDS
from tests.support.commands import audit_of, said_by
from tests.support.devclusters import Submitting, devcluster
from tests.support.results import add_results
from tests.support.run_files import events_of
from tests.support.small_run import SmallRun, await_none_left, interrupted_at_end, processes_of
from tests.support.waiting import wait_for

pytestmark = pytest.mark.timeout(1500)

EPISODES, GROUPS = 2, 4
RUN_TIMEOUT_S = 1200.0
LEFT_TIMEOUT_S = 20.0
IN_JOB = " in a job"
"""Behind a runtime's name, of runs whose cells are jobs of Slurm."""
RUNTIMES = [name for name in find_installed_runtimes() if name != "none"]
JOBS = [(name, True) for name in RUNTIMES] + [("bwrap", False)]
"""Runtimes in jobs, and whether control groups limit the jobs' memory."""
FIRST_PID = 1000
"""Lowest process id of jobs: a node's own numbers are as low as those of a sandbox."""


def list_overrides(isolation: str, run_dir: Path, fileroot: Path) -> Iterator[str]:
    home = fileroot / "home"
    home.mkdir(parents=True)
    steps = math.ceil(len(tool.ATTACKS) / GROUPS)
    sandbox = {**SANDBOX, "network": "session-only"}
    kwargs = {"note": str(note_of(fileroot)), "run_dir": str(run_dir), "home": str(home)}
    yield "sft.total_steps=2"
    yield f"trainer.total_steps={steps}"
    yield f"evaluation.every_steps={steps}"
    yield "valid_dataset.generator=tests.support.sums:tasks"
    yield "train_dataset.generator=tests.support.attacks.agent:tasks"
    yield f"train_dataset.kwargs.size={len(tool.ATTACKS)}"
    yield "rollout.workflow=tests.support.attacks.agent.Hostile"
    yield f"rollout.workflow_kwargs={json.dumps(kwargs)}"
    yield f"rollout.n_samples={EPISODES}"
    yield "rollout.max_concurrent_rollouts=4"
    yield f"rollout.agent.isolation={isolation}"
    yield from (f"rollout.agent.sandbox.{name}={value}" for name, value in sandbox.items())


def note_of(fileroot: Path) -> Path:
    return fileroot / "note.jsonl"


@pytest.mark.parametrize("isolation", RUNTIMES)
def test_no_attack_succeeds_and_each_costs_its_own_episode(isolation: str, tmp_path: Path) -> None:
    run = SmallRun(tmp_path / "runs")
    run.override(*list_overrides(isolation, run.paths.root, tmp_path))
    run.environ = {**SECRET_WORDS, "SLURM_JWT": "token"}
    with interrupted_at_end(run):
        run.start()
        assert run.wait(RUN_TIMEOUT_S) == 0, run.said()
    assert "duplicates=0 lost=0 " in run.audited()
    await_none_left(run, LEFT_TIMEOUT_S)
    record_attacks(isolation, note_of(tmp_path), run.paths)


@pytest.mark.parametrize(("isolation", "has_control_groups"), JOBS)
def test_no_attack_succeeds_inside_a_job(
    isolation: str, has_control_groups: bool, tmp_path: Path
) -> None:
    options = () if has_control_groups else ("--loopback",)
    variables = [f"export {name}={value}" for name, value in SECRET_WORDS.items()]
    setup = ["export OMP_NUM_THREADS=1", *variables]
    if has_control_groups:
        setup.append(f"echo {FIRST_PID} >/proc/sys/kernel/ns_last_pid")
    with devcluster(tmp_path / "state", "--nodes=2", *options) as cluster:
        tracked = cluster.slurm("scontrol", "show", "config")
        assert ("proctrack/cgroup" in tracked) == has_control_groups
        run = Submitting(cluster, tmp_path / "runs")
        submitted = run.submit(
            *list_overrides(isolation, run.paths.root, tmp_path),
            "inference.cells=1",
            "trainer.parallel.dp=1",
            f"cluster.slurm.setup={json.dumps(setup)}",
            "--wait",
            timeout_s=RUN_TIMEOUT_S,
        )
        said_by(submitted)
        assert "duplicates=0 lost=0 " in audit_of(run.paths.root, cluster.environ)
        wait_for(lambda: processes_of(run.paths.root) == [], LEFT_TIMEOUT_S)
        assert cluster.slurm("squeue", "-h") == ""
    limits = "" if has_control_groups else " without control groups"
    record_attacks(f"{isolation}{IN_JOB}{limits}", note_of(tmp_path), run.paths)


def record_attacks(setting: str, note: Path, paths: RunPaths) -> None:
    """Check that no attack of a run succeeded or cost anything, and keep each wall's answer."""
    attacks = [json.loads(line) for line in note.read_text().splitlines()]
    broke = {attack["attack"]: attack["broke"] for attack in attacks if attack["broke"]}
    assert broke == {}
    times_played = Counter(attack["attack"] for attack in attacks)
    assert times_played.keys() >= {*tool.ATTACKS}
    assert all(times_played[name] >= EPISODES for name in tool.ATTACKS)
    assert sum(name.endswith(": later") for name in times_played) > len(tool.ATTACKS) // 2
    assert events_of(paths, "episode_failed") == []
    add_results("isolation", **{setting: summarize(attacks)})


def summarize(attacks: list[dict[str, Any]]) -> dict[str, str]:
    means: dict[str, str] = dict.fromkeys(tool.ATTACKS, "")
    for attack in attacks:
        if attack["attack"] in means and attack["held"]:
            means[attack["attack"]] = attack["held"][-1]
    return means
