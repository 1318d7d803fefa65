"""Repeated kill -9 of random processes: no ticket is lost or trained twice, and little time.

`make soak KILLS=300` runs it in parts, each a run of its own that ends with an audit. What a part
measured is added to `benchmarks/results/soak.json`, from which the next call goes on; the table in
`docs/survival.md` is made of all parts. `make acceptance` runs one part.
"""

import itertools
import os
import random
import statistics
import time
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.commands import areal_hpc, said_by
from tests.support.killed_run import LAUNCH_TIMEOUT_S, SLOW, KilledRun, random_model
from tests.support.process_commands import command_of, find_processes
from tests.support.results import read_results, write_results
from tests.support.run_files import events_of, trained_steps
from tests.support.small_run import await_none_left, interrupted_at_end

pytestmark = pytest.mark.timeout(24 * 3600)

KILLS = int(os.environ.get("SOAK_KILLS", "0"))
"""Number of kills, earlier parts included; 0: one part more."""
PART_KILLS = int(os.environ.get("SOAK_PART_KILLS", "25"))
SEED = 20261121
STEPS_MEASURED = 3
"""Steps after a kill. Their time over the usual one is the cost of the kill."""
MAX_REST_S = 5.0
"""Longest pause before a kill."""
MOST_IN_A_ROW = 3
"""Kills before the run is left to get over them: some strike it while it recovers."""
RECOVERY_TIMEOUT_S = 600.0
BATCH_TICKETS = 4
SETTLED_S = 60.0
"""A process younger than this still grows by itself."""
ENOUGH_LOOKS = 20
WEIGH_EVERY_S = 3.0
"""Period of measurements: reading all processes of the machine takes a processor for a while."""
MAX_GROWTH = 1.15

ROLES = {
    "jobs.processes.fork_server": "fork server",
    **{f"{name}.job": name for name in ("trainer", "ledger", "proxy", "rollout", "inference")},
    "sglang::scheduler": "scheduler",
    "sglang::detokenizer": "detokenizer",
    "sglang_cpu": "server",
    "jobs.supervisor": "supervisor",
    "submitit": "supervisor",
    "areal_hpc run": "launcher",
}
"""Roles by parts of a command; the first that occurs counts."""


class Soak(KilledRun):
    """A run without an end in sight, and the process that is killed next."""

    def __init__(self, root: Path, chance: random.Random) -> None:
        super().__init__(
            root,
            random_model(root / "model"),
            [],
            100_000,
            *SLOW,
            "rollout.max_head_offpolicyness=2",
            "inference.cells=2",
            "inference.max_restarts=1000",
        )
        self._chance = chance
        self._next_weighing_at = 0.0
        self.killed: list[tuple[str, float]] = []
        """Role and time of each kill."""
        self.resident_mb: dict[tuple[str, int], list[float]] = defaultdict(list)
        """Measurements by role and process, in order of time."""

    def members(self) -> dict[psutil.Process, str]:
        roles = {}
        for process in find_processes(self.fileroot, in_environment=True):
            if role := role_of(command_of(process)):
                roles[process] = role
        return roles

    def kill_one(self) -> bool:
        """A role first, so that roles of many processes are not killed more often.

        Returns:
            False if there was nothing to kill: the run, or the victim, has just ended by itself.
        """
        members = self.members()
        if not members:
            return False
        role = self._chance.choice(sorted(set(members.values())))
        victim = self._chance.choice([process for process, its in members.items() if its == role])
        at = time.time()
        with suppress(psutil.NoSuchProcess):
            victim.kill()
            self.killed.append((role, at))
        return self.killed[-1:] == [(role, at)]

    def take_steps(self, steps: int) -> None:
        goal = trained_steps(self.paths) + steps

        def is_there() -> bool:
            self.weigh_now_and_then()
            return trained_steps(self.paths) >= goal

        self.keep_going(is_there, RECOVERY_TIMEOUT_S)

    def soak(self, kills: int) -> None:
        """Kill so often, up to three times before the run has got over the last kill."""
        self.take_steps(2 * STEPS_MEASURED)
        while (left := kills - len(self.killed)) > 0:
            for _ in range(min(left, self._chance.randint(1, MOST_IN_A_ROW))):
                time.sleep(self._chance.uniform(0.0, MAX_REST_S))
                if not self.kill_one():
                    break
            self.take_steps(STEPS_MEASURED + 1)

    def weigh_now_and_then(self) -> None:
        """Note how much memory settled processes hold."""
        if time.monotonic() < self._next_weighing_at:
            return
        self._next_weighing_at = time.monotonic() + WEIGH_EVERY_S
        for process, role in self.members().items():
            with suppress(psutil.NoSuchProcess):
                if time.time() - process.create_time() > SETTLED_S:
                    held_mb = process.memory_info().rss / 1e6
                    self.resident_mb[role, process.pid].append(held_mb)

    def wind_up(self) -> None:
        assert self.process is not None
        if self.process.poll() is None:
            self.press_ctrl_c()
        self.steps = trained_steps(self.paths) + STEPS_MEASURED
        self.override(f"trainer.total_steps={self.steps}")
        self.start()
        assert self.wait(LAUNCH_TIMEOUT_S) == 0, self.said()

    def seconds_lost(self) -> dict[str, list[float]]:
        """Compute the cost of each kill, by role: time of steps over their usual time.

        Those of a kill that others followed before the run was well include theirs.
        """
        published = [row["time"] for row in events_of(self.paths, "weights_published")]
        usual_s = statistics.median(
            after - before for before, after in itertools.pairwise(published)
        )
        lost = defaultdict(list)
        for role, at in self.killed:
            took_s = [time_s for time_s in published if time_s > at][STEPS_MEASURED - 1] - at
            lost[role].append(round(max(0.0, took_s - STEPS_MEASURED * usual_s), 1))
        return dict(sorted(lost.items()))

    def growth(self) -> dict[str, float]:
        """Compute by role the memory of a process's second half of time over the first's."""
        most: dict[str, float] = {}
        for (role, _), seen in self.resident_mb.items():
            if len(seen) >= ENOUGH_LOOKS:
                middle = len(seen) // 2
                grown = statistics.median(seen[middle:]) / statistics.median(seen[:middle])
                most[role] = round(max(grown, most.get(role, 0.0)), 3)
        return dict(sorted(most.items()))


def role_of(command: list[str]) -> str:
    text = " ".join(command)
    return next((role for part, role in ROLES.items() if part in text), "")


def soak_a_part(root: Path, kills: int, seed: int) -> dict[str, Any]:
    """Run once with so many kills, and return the results."""
    began, run = time.monotonic(), Soak(root, random.Random(seed))
    with interrupted_at_end(run):
        run.soak(kills)
        run.wind_up()
    verdict = run.audited()
    assert verdict == f"trained_once={BATCH_TICKETS * run.steps} duplicates=0 lost=0 open=0"
    said_by(areal_hpc("shards", "verify", run.paths.root, timeout_s=None))
    await_none_left(run, 20.0)
    growth = run.growth()
    assert max(growth.values(), default=1.0) <= MAX_GROWTH, growth
    return {
        "kills": dict(sorted(Counter(role for role, _ in run.killed).items())),
        "steps": run.steps,
        "launches": run.launches,
        "audit": verdict,
        "seconds": round(time.monotonic() - began),
        "seconds_lost": run.seconds_lost(),
        "growth": growth,
    }


def test_a_run_survives_whatever_is_killed(tmp_path: Path) -> None:
    parts: list[dict[str, Any]] = read_results("soak", {}).get("parts", [])
    done = sum(sum(part["kills"].values()) for part in parts)
    goal = KILLS or done + PART_KILLS
    while done < goal:
        kills = min(PART_KILLS, goal - done)
        parts.append(soak_a_part(tmp_path / str(len(parts)), kills, SEED + len(parts)))
        done += kills
        write_results("soak", {"parts": parts})
