"""A run over storage with a network file system's faults: nothing is lost, nothing trained twice.

The real stack. Its trainer, its cell and its launcher each have a client of their own, with caches
of 3 to 60 s, which now and then answers EIO or ESTALE and which hangs once. Like a user, the test
repeats the command when a job fails for good. Writes `benchmarks/results/network_storage.json`.
"""

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from areal_hpc.metrics.step_metrics import EpisodeFailureCounter
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.telemetry.events import EventFollower, EventLog
from tests.support.commands import areal_hpc, said_by, write_program
from tests.support.deadlines import scaled
from tests.support.environments import CHECKOUT, python_of
from tests.support.killed_run import LAUNCH_TIMEOUT_S, SLOW, KilledRun, random_model
from tests.support.results import write_results
from tests.support.run_files import trained_steps
from tests.support.small_run import await_none_left, interrupted_at_end
from tests.support.waiting import wait_for

pytestmark = pytest.mark.timeout(3600)

NODES = ("trainer", "cell", "launcher")
NODE_BY_ROLE = {"train": "trainer", "agents": "cell"}
"""Node of the processes of each of the recipe's Pythons."""
FAILURE_RATE = 1 / 250
HANG_S = 40.0
STEPS = 16
STEPS_BETWEEN = 2
MAX_LAUNCHES = 20
MIN_FAULTS = 10
"""Minimum of faults of the trainer's client and of the cell's: fewer prove little."""
FAILED_EPISODES = 5
MAX_DELAY_S = scaled(2.0)
RECORD_FAILURE = """
import pathlib, sys, time
from areal_hpc.rundir.telemetry.events import EventLog
EventLog(pathlib.Path(sys.argv[1]), "driver").record("episode_failed")
print(time.time())
"""


APART = ("unshare", "--mount", "--propagation", "private", "--")
STOP_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class StorageNode:
    """A node's client of the storage."""

    process: subprocess.Popen[str]

    def order(self, **order: float) -> None:
        """Have it fail or hang: see `network_storage.obey`."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def counts(self) -> Counter[str]:
        self.order(report=True)
        assert self.process.stdout is not None
        return Counter(json.loads(self.process.stdout.readline()))

    def write_python(self, path: Path, interpreter: Path) -> Path:
        enter = f"nsenter --mount=/proc/{self.process.pid}/ns/mnt"
        there = 'sh -c \'cd "$1" && shift && exec "$@"\' sh "$PWD"'
        return write_program(path, f'exec {enter} {there} {interpreter} "$@"')

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(scaled(STOP_TIMEOUT_S))
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextmanager
def storage_nodes(
    folder: Path, mountpoint: Path, names: tuple[str, ...]
) -> Iterator[dict[str, StorageNode]]:
    """Clients by name; the last is this machine's own, the others are in namespaces apart."""
    folder.mkdir(parents=True)
    mountpoint.mkdir(parents=True)
    with ExitStack() as stack:
        nodes = {}
        for seed, name in enumerate(names):
            nodes[name] = _mount(folder, mountpoint, seed, apart=name != names[-1])
            stack.callback(nodes[name].close)
        yield nodes


def _mount(folder: Path, mountpoint: Path, seed: int, *, apart: bool) -> StorageNode:
    process = subprocess.Popen(
        [
            *(APART if apart else ()),
            *(sys.executable, "-m", "tests.support.network_storage"),
            *map(str, (folder, mountpoint, seed)),
        ],
        cwd=CHECKOUT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "mounted\n"
    return StorageNode(process)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[dict[str, StorageNode]]:
    with storage_nodes(tmp_path / "server", tmp_path / "runs", NODES) as nodes:
        yield nodes


def test_a_failed_episode_is_seen_on_other_nodes_within_seconds(
    nodes: dict[str, StorageNode], tmp_path: Path
) -> None:
    """Look on nodes that cache a file's attributes for up to a minute: a `stat` sees nothing."""
    path = tmp_path / "runs/events.jsonl"
    python = nodes["cell"].write_python(tmp_path / "python-cell", Path(sys.executable))
    EventLog(path, "launcher").record("job_submitted")  # as every launch begins
    follower, counter = EventFollower(path), EpisodeFailureCounter(path)
    delays_s = []
    for _ in range(FAILED_EPISODES):
        assert path.stat().st_size > 0  # this node caches that, too
        recorded = subprocess.run(
            [python, "-c", RECORD_FAILURE, path], cwd=CHECKOUT, stdout=subprocess.PIPE, check=True
        )
        wait_for(lambda: counter.count_new_failed_tries().failed_tries, LAUNCH_TIMEOUT_S)
        wait_for(follower.read_new_events, LAUNCH_TIMEOUT_S)
        delays_s.append(time.time() - float(recorded.stdout))
    assert max(delays_s) <= MAX_DELAY_S, delays_s


def test_faults_of_the_storage_cost_time_and_nothing_else(
    nodes: dict[str, StorageNode], tmp_path: Path
) -> None:
    pythons = {
        role: nodes[node].write_python(tmp_path / f"python-{role}", python_of("main"))
        for role, node in NODE_BY_ROLE.items()
    }
    overrides = (f"cluster.{role}.python={program}" for role, program in pythons.items())
    run = KilledRun(tmp_path, random_model(tmp_path / "model"), [], STEPS, *SLOW, *overrides)
    run.log = tmp_path / "launcher.log"  # a person's terminal is not on the storage
    # What the storage holds, without the faults on the way to it.
    seen = RunPaths(tmp_path / "server" / run.paths.root.relative_to(run.fileroot))

    def keep_going_to_step(step: int) -> None:
        run.keep_going(lambda: trained_steps(seen) >= step)

    began = time.monotonic()
    with interrupted_at_end(run):
        keep_going_to_step(1)
        for node in nodes.values():
            node.order(failure_rate=FAILURE_RATE)
        for number, name in enumerate(("cell", "trainer"), start=1):
            nodes[name].order(hang_s=HANG_S)
            keep_going_to_step(1 + number * STEPS_BETWEEN)
        run.keep_going(lambda: run.process is not None and run.process.poll() == 0)
        assert run.launches <= MAX_LAUNCHES, run.said()
        for node in nodes.values():
            node.order(failure_rate=0.0)
    verdict = run.audited()
    said_by(areal_hpc("shards", "verify", run.paths.root, timeout_s=None))
    await_none_left(run, 20.0)
    faults = {name: dict(sorted(node.counts().items())) for name, node in nodes.items()}
    figures = {
        "seconds": round(time.monotonic() - began),
        "steps": STEPS,
        "launches": run.launches,
        "audit": verdict,
        "faults": faults,
    }
    write_results("network_storage", figures)
    assert verdict == f"trained_once={4 * STEPS} duplicates=0 lost=0 open=0"
    for counts in (faults["cell"], faults["trainer"]):
        assert counts["hung"] == 1
        assert sum(counts.values()) > MIN_FAULTS, faults
