"""Fifteen minutes of kill -9: a random process every 45 to 60 seconds, and three named points.

Writes `benchmarks/results/soak.json`.
"""

import random
import statistics
import time
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from areal_hpc.rundir.jsonl import read_lines
from tests.support.commands import areal_hpc, said_by
from tests.support.killed_run import LAUNCH_TIMEOUT_S, Kill, KilledRun, warmed_up_model
from tests.support.results import write_results
from tests.support.small_run import await_none_left

pytestmark = pytest.mark.timeout(3600)

SOAK_S = 900.0
PAUSE_S = (45.0, 60.0)
POINTS = (Kill("trainer", "checkpoint"), Kill("proxy", "seal"), Kill("trainer", "update"))
MORE_STEPS = 4
"""Taken after the last kill."""
SETTLED_S = 60.0
"""A process younger than this still grows by itself."""
LOOK_EVERY_S = 2.0
ENOUGH_LOOKS = 60
MOST_GROWTH = 1.15


class Soak(KilledRun):
    """A run without an end in sight, and the process that is killed next."""

    def __init__(self, root: Path, model: Path) -> None:
        super().__init__(
            root,
            model,
            [*POINTS],
            10_000,
            "rollout.workflow=tests.support.slow_agent.SlowAgent",
            "rollout.workflow_kwargs.mean_pause_s=4.0",
            "rollout.max_head_offpolicyness=2",
            "inference.cells=2",
            "evaluation.every_steps=0",
            "inference.max_restarts=100",
        )
        self.killed: Counter[str] = Counter()
        self.launches = 0
        self.resident_mb: dict[tuple[str, int], list[float]] = defaultdict(list)
        """By role and process, as time went by."""

    def launch(self) -> None:
        """Give the command."""
        self.start()
        self.launches += 1

    def members(self) -> dict[psutil.Process, str]:
        """Live processes of the run and their roles."""
        found = {}
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                command = process.cmdline()
                text = " ".join([*command, *process.environ().values()])
                is_ours = str(self.paths.root) in text or str(self.fileroot) in text
                if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                    found[process] = role_of(command)
        return {process: role for process, role in found.items() if role}

    def kill_one(self, chance: random.Random) -> None:
        """A role first, so that roles of many processes are not killed more often."""
        if members := self.members():
            role = chance.choice(sorted(set(members.values())))
            chance.choice([process for process, its in members.items() if its == role]).kill()
            self.killed[role] += 1

    def weigh(self) -> None:
        """Note how much memory settled processes hold."""
        for process, role in self.members().items():
            with suppress(psutil.NoSuchProcess):
                if time.time() - process.create_time() > SETTLED_S:
                    held_mb = process.memory_info().rss / 1e6
                    self.resident_mb[role, process.pid].append(held_mb)

    def soak(self, seconds: float, chance: random.Random) -> None:
        """Kill for so long; give the command again whenever it gives up."""
        self.launch()
        self.await_true(lambda: bool(read_lines(self.paths.metrics)), timeout_s=300.0)
        ends_at = time.monotonic() + seconds
        strikes_at = time.monotonic() + chance.uniform(*PAUSE_S)
        while time.monotonic() < ends_at:
            assert self.process is not None
            if self.process.poll() is not None:
                assert self.process.returncode != 0, self.said()
                self.launch()
            if time.monotonic() >= strikes_at:
                self.kill_one(chance)
                strikes_at = time.monotonic() + chance.uniform(*PAUSE_S)
            self.weigh()
            time.sleep(LOOK_EVERY_S)

    def wind_up(self) -> int:
        """Ask for a few more steps and let the run complete; how many it has."""
        assert self.process is not None
        if self.process.poll() is None:
            self.press_ctrl_c()
        self.steps = read_lines(self.paths.metrics)[-1]["step"] + MORE_STEPS
        self.override(f"trainer.total_steps={self.steps}")
        self.launch()
        assert self.wait(LAUNCH_TIMEOUT_S) == 0, self.said()
        return self.steps

    def growth(self) -> dict[str, float]:
        """By role, the median memory of the second half of a process's time over the first's."""
        most: dict[str, float] = {}
        for (role, _), seen in self.resident_mb.items():
            if len(seen) >= ENOUGH_LOOKS:
                middle = len(seen) // 2
                grown = statistics.median(seen[middle:]) / statistics.median(seen[:middle])
                most[role] = max(grown, most.get(role, 0.0))
        return most

    def median_mb(self) -> dict[str, int]:
        """By role, of all its processes at all times."""
        held: dict[str, list[float]] = defaultdict(list)
        for (role, _), seen in self.resident_mb.items():
            held[role] += seen
        return {role: round(statistics.median(seen)) for role, seen in sorted(held.items())}


ROLES = {
    "jobs.processes.fork_server": "fork server",
    **{f"{name}.job": name for name in ("trainer", "ledger", "proxy", "rollout", "inference")},
    "sglang::scheduler": "scheduler",
    "sglang::detokenizer": "detokenizer",
    "sglang_cpu": "server",
    "checkpoints.writer_process": "writer",
    "jobs.supervisor": "supervisor",
    "submitit": "supervisor",
    "areal_hpc run": "launcher",
}
"""By what is part of a command; the first that is counts."""


def role_of(command: list[str]) -> str:
    """What a process is; empty if it is none of the run's own kinds."""
    text = " ".join(command)
    return next((role for part, role in ROLES.items() if part in text), "")


def test_a_run_survives_whatever_is_killed(tmp_path: Path) -> None:
    run = Soak(tmp_path, warmed_up_model(tmp_path / "model"))
    chance = random.Random(20261121)
    began = time.monotonic()
    run.soak(SOAK_S, chance)
    steps = run.wind_up()
    verdict = run.audited()
    assert run.struck().keys() == {kill.name for kill in POINTS}, run.said()
    assert verdict == f"trained_once={4 * steps} duplicates=0 lost=0 open=0"
    said_by(areal_hpc("shards", "verify", run.paths.root, timeout_s=None))
    await_none_left(run, 20.0)
    growth = run.growth()
    seen = {
        "seconds": round(time.monotonic() - began),
        "steps": steps,
        "launches": run.launches,
        "killed": dict(sorted(run.killed.items())),
        "killed_at_points": sorted(run.struck()),
        "audit": verdict,
        "resident_mb": run.median_mb(),
        "growth": {role: round(value, 3) for role, value in sorted(growth.items())},
    }
    write_results("soak", seen)
    assert max(growth.values()) <= MOST_GROWTH, growth
