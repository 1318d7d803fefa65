"""The quick start, cut down, as jobs of a devcluster: watched through its files and commands."""

import re
import time
from collections.abc import Callable, Container
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from areal_hpc.rundir.files import read_newest_number
from areal_hpc.rundir.jobs import get_latest_submissions, read_submissions
from areal_hpc.rundir.jsonl import read_readable_records
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.wire.fault_points import FAULTS_VARIABLE
from areal_hpc.wire.weight_version import WeightVersion
from tests.support.commands import areal_hpc
from tests.support.devclusters import Devcluster
from tests.support.killed_run import Gate
from tests.support.run_files import events_of, published_weights
from tests.support.small_run import SIZES, processes_of
from tests.support.waiting import wait_for

T = TypeVar("T")
PATIENCE_S = 600.0
"""Time limit of any wait: other work may take most of the machine."""
COMMAND_TIMEOUT_S = 300.0
CELLS = 2
STEPS_AT_FIRST = 5000
"""Number that no test waits for: a run ends when it is resumed with few steps to go."""
STOP_GRACE_S = 20.0
CUT_DOWN = (
    *SIZES,
    "sft.total_steps=20",
    "evaluation.every_steps=0",
    "rollout.max_head_offpolicyness=1",
    "rollout.workflow=tests.support.agents.HungryAgent",
    "rollout.workflow_kwargs.mean_pause_s=2",
    f"trainer.total_steps={STEPS_AT_FIRST}",
    "trainer.checkpoint_every_steps=5",
    "alerts.off=[no_signal]",
    f"cluster.stop_grace_s={STOP_GRACE_S}",
)
"""Few steps of SFT leave a policy that earns nothing, which `status` would call a failure."""
HELD = ("optimizer.before_step", "checkpoint.before_rename")
"""Fault points at which a rank of the trainer can be kept."""


@dataclass(frozen=True)
class Sighting:
    """Output of the operators' commands about a job at one moment."""

    state: str
    """Slurm's word for it, as `status` shows it."""
    why: str
    """The first line of `why`."""


class SlurmRun:
    """One run directory and the commands that work in it."""

    def __init__(self, cluster: Devcluster, root: Path) -> None:
        self.cluster = cluster
        self.paths = RunPaths(root / "runs" / "quickstart" / "slurm")
        self.scratch = root / "scratch"
        """Folder for each node's own files: nodes here share all others."""
        self._food = root / "food"
        faults = root / "faults"
        faults.mkdir(parents=True)
        self._gates = {point: Gate(faults, point) for point in HELD}

    # Commands --------------------------------------------------------------------------------

    def areal_hpc(
        self, *arguments: str, codes: Container[int] = (0,), timeout_s: float = COMMAND_TIMEOUT_S
    ) -> str:
        """Run `areal-hpc`, which must exit with one of the codes, and return its output."""
        faults = {FAULTS_VARIABLE: " ".join(gate.setting for gate in self._gates.values())}
        environ = {**self.cluster.environ, **faults}
        done = areal_hpc(*arguments, environ=environ, timeout_s=timeout_s)
        assert done.returncode in codes, done.stdout + done.stderr
        return done.stdout

    def submit(self, *overrides: str) -> None:
        """Hand all jobs to Slurm. What a node keeps for itself is in a folder of its name."""
        folder = f"{self.scratch}/$SLURMD_NODENAME"
        setup = f"export OMP_NUM_THREADS=1,export SLURM_TMPDIR={folder},mkdir -p {folder}"
        self.areal_hpc(
            *("submit", "recipes/quickstart_slurm.yaml", *CUT_DOWN),
            f"cluster.fileroot={self.paths.root.parents[1]}",
            f"cluster.slurm.jobs.cell.setup=[{setup}]",
            f"rollout.workflow_kwargs.food={self._food}",
            *overrides,
        )

    def submit_as_shipped(self) -> None:
        fileroot = f"cluster.fileroot={self.paths.root.parents[1]}"
        self.areal_hpc("submit", "recipes/quickstart_slurm.yaml", fileroot)

    def preempt(self, job: str) -> float:
        """Take one of the job's nodes for a moment, with higher priority; return the time."""
        whole = ("--partition=priority", "--exclusive", f"--nodelist={self.nodes(job)[-1]}")
        self.cluster.submit("sleep 1", *whole, "--mem=100")
        return time.time()

    def sighting(self, job: str) -> Sighting:
        status = self.areal_hpc("status", str(self.paths.root))
        row = next(line for line in status.splitlines() if line.startswith(f"{job} "))
        # A job that has just been submitted may have no log yet, and the command says so.
        self.areal_hpc("logs", str(self.paths.root), "-n", "5", job, codes=(0, 78))
        why = self.areal_hpc("why", str(self.paths.root), codes=(0, 1))
        return Sighting(re.split(r"\s{2,}", row)[2], why.splitlines()[0])

    def audited(self) -> str:
        """The last line of `areal-hpc audit`, which must find nothing lost and nothing twice."""
        verdict = self.areal_hpc("audit", str(self.paths.root)).splitlines()[-1]
        assert "duplicates=0 lost=0" in verdict
        return verdict

    def feed(self) -> None:
        self._food.touch()

    # Slurm -----------------------------------------------------------------------------------

    def job_id(self, job: str) -> str:
        return get_latest_submissions(read_submissions(self.paths.submissions))[job].job_id

    def state(self, job: str) -> str:
        return self.cluster.job_state(self.job_id(job))

    def nodes(self, job: str) -> list[str]:
        listed = self.cluster.slurm("squeue", "-h", f"--jobs={self.job_id(job)}", "-o", "%N")
        return self.cluster.slurm("scontrol", "show", "hostnames", listed).split()

    def restarts(self, job: str) -> int:
        return self.cluster.restarts(self.job_id(job))

    # Files -----------------------------------------------------------------------------------

    def starts(self, job: str) -> int:
        return read_newest_number(self._starts_dir(job))

    def started_at(self, job: str) -> float:
        return (self._starts_dir(job) / f"{self.starts(job):04d}").stat().st_mtime

    def is_told_to_stop(self, job: str) -> bool:
        return (self._starts_dir(job) / f"{self.starts(job):04d}.stop").exists()

    def _starts_dir(self, job: str) -> Path:
        return self.paths.jobs_dir / job / "starts"

    def events(self, name: str, since: float = 0.0) -> list[dict[str, Any]]:
        return events_of(self.paths, name, since)

    def judged(self) -> list[tuple[int, float]]:
        rows = read_readable_records(self.paths.metrics)
        return [(row["step"], row["eval/reward"]) for row in rows if "eval/reward" in row]

    def published(self, since: float = 0.0) -> list[tuple[float, WeightVersion, int]]:
        return published_weights(self.paths, since)

    @property
    def version(self) -> WeightVersion:
        return max((version for _, version, _ in self.published()), default=WeightVersion(0, -1))

    def shards_of(self, cell: str) -> int:
        return len(read_readable_records(self.paths.shard_index_dir / f"{cell}.jsonl"))

    def proxies_of(self, cell: str) -> list[str]:
        config = str(self.paths.jobs_dir / cell / "proxy.json")
        return [line for line in processes_of(self.paths.root) if config in line]

    # Waiting ---------------------------------------------------------------------------------

    def await_true(self, condition: Callable[[], bool], within_s: float = PATIENCE_S) -> None:
        wait_for(condition, within_s, self.explained, every_s=0.2)

    def await_steps(self, count: int) -> None:
        goal = self.version.step + count
        self.await_true(lambda: self.version.step >= goal)

    def await_first(self, find: Callable[[], list[T]]) -> T:
        seen: list[T] = []

        def is_there() -> bool:
            seen[:] = find()
            return bool(seen)

        self.await_true(is_there)
        return seen[0]

    def await_whole(self, since: float = 0.0) -> float:
        """Wait until all cells have weights of a new step after the time `since`; return when."""
        return self.await_first(
            lambda: [at for at, _, replicas in self.published(since) if replicas == CELLS]
        )

    def await_ready(self, cell: str, since: float) -> float:
        """Wait until a server of the cell answers after the time `since`; return when."""

        def find() -> list[float]:
            ready = self.events("replica_ready", since)
            return [event["time"] for event in ready if event["role"] == cell]

        return self.await_first(find)

    def await_generation_after(self, before: WeightVersion) -> tuple[int, float]:
        """The step that the trainer's next start resumed from, and when it took its first step."""

        def find() -> list[tuple[int, float]]:
            published = [(at, version) for at, version, _ in self.published()]
            later = [(at, new.step) for at, new in published if new.generation > before.generation]
            return [(later[0][1], at) for at, step in later if step > later[0][1]]

        return self.await_first(find)

    def await_none_left(self) -> None:
        assert self.cluster.slurm("squeue", "-h") == ""
        self.await_true(lambda: processes_of(self.paths.root) == [], 30.0)

    def explained(self) -> str:
        commands = [("status",), ("why",), ("logs", "-n", "60")]
        root = str(self.paths.root)
        outputs = [self.areal_hpc(name, root, *more, codes=range(256)) for name, *more in commands]
        return "\n".join(outputs)

    # Holding ---------------------------------------------------------------------------------

    def hold(self, point: str) -> None:
        self._gates[point].shut()
        self.await_true(lambda: self._gates[point].held() is not None)

    def release(self, point: str) -> None:
        self._gates[point].open()
