"""Runs on a devcluster with one fault each: `why --slow` names what limits them, and the node.

`benchmarks/results/slow_runs.json` keeps its answers.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from areal_hpc.launch.tiny_model import make_tiny_model
from areal_hpc.rundir.jobs import get_latest_submissions
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.view.answers.slow_run import explain_slow_run
from areal_hpc.view.formatting import Answer
from tests.support.commands import run_program, said_by
from tests.support.devclusters import SLURM_POLL_S, Devcluster, Submitting, devcluster
from tests.support.freezing import FreezableDisk, freezable_disk
from tests.support.process_commands import find_processes, is_scheduler
from tests.support.results import add_results
from tests.support.run_files import events_of

pytestmark = pytest.mark.timeout(1200)
QUESTIONS = ["State the final answer to the following arithmetic problem: 1 + 2 = Answer: 3"]
BASE = (
    *("sft=null", "model.tiny=null", "valid_dataset=null", "trainer.parallel.dp=1"),
    # Enough calls at once for two replicas.
    *("trainer.batch_size=8", "rollout.max_concurrent_rollouts=64", "rollout.n_samples=8"),
    *("trainer.total_steps=6", "trainer.checkpoint_every_steps=6", "alerts.off=[no_signal]"),
)
RUN_TIMEOUT_S = 900.0
LINK_RATE = "500kbit"
"""Rate of the network to the slow receiver: the weights are 0.4 MB."""


@dataclass(frozen=True)
class Places:
    """A cluster, and storage that all of its nodes see and that can be slow."""

    cluster: Devcluster
    disk: FreezableDisk
    model: Path


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Places]:
    folder = tmp_path_factory.mktemp("places")
    model = folder / "model"
    make_tiny_model(
        model, QUESTIONS, hidden=64, heads=2, kv_heads=2, head_dim=32, ffn=128, vocab=320
    )
    # The disk comes first: mounts of nodes are those of the host when they start.
    with freezable_disk(folder) as disk, devcluster(folder / "state", "--nodes=3") as cluster:
        yield Places(cluster, disk, model)


class FaultyRun:
    """A submitted run, and the answer of `why --slow` after its end."""

    def __init__(self, places: Places, fileroot: Path) -> None:
        self.cluster, self._model = places.cluster, places.model
        self._submitting = Submitting(places.cluster, fileroot)
        self.paths = self._submitting.paths

    def explain(
        self, name: str, *overrides: str, fault: AbstractContextManager[None] | None = None
    ) -> Answer:
        """Run it to its end, with a fault at work meanwhile, and ask."""
        words = ("--wait", *BASE, f"model.path={self._model}", *overrides)
        started = self._submitting.start(*words)
        try:
            with fault or nullcontext():
                output, _ = started.communicate(timeout=RUN_TIMEOUT_S)
        finally:
            started.kill()
            self.cluster.cancel_all()
        assert started.returncode == 0, output
        answer = explain_slow_run(self.paths)
        print(answer)
        add_results("slow_runs", **{name: answer.headline})
        return answer

    def get_node(self, job: str) -> str:
        number = get_latest_submissions(self._submitting.submissions)[job].job_id
        shown = ("sacct", "-X", "-n", "-P", "-j", number, "-o", "NodeList")
        return self.cluster.slurm(*shown)

    def await_node(self, job: str, is_over: threading.Event) -> str:
        while not is_over.wait(SLURM_POLL_S):
            known = get_latest_submissions(self._submitting.submissions)
            if job in known:
                shown = ("squeue", "-h", "-t", "RUNNING", "-j", known[job].job_id, "-o", "%N")
                if node := self.cluster.slurm(*shown):
                    return node
        return ""


@pytest.fixture
def run(places: Places, tmp_path: Path) -> FaultyRun:
    return FaultyRun(places, tmp_path / "runs")


@contextmanager
def meanwhile(act: Callable[[threading.Event], None]) -> Iterator[None]:
    """Something goes on in a thread, until its event is set at the end of the block."""
    is_over = threading.Event()
    thread = threading.Thread(target=act, args=(is_over,))
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def hold_servers_up(run: FaultyRun, cell: str, is_over: threading.Event) -> None:
    """Stop servers of a cell for nine tenths of the time, as if their node were slow."""
    config = f"jobs/{cell}/inference.json"
    while not any(event["role"] == cell for event in events_of(run.paths, "replica_ready")):
        if is_over.wait(0.2):
            return
    processes = find_processes(run.paths.root, config)
    while not is_over.wait(0.03):
        with suppress(psutil.NoSuchProcess):
            servers = {child for process in processes for child in process.children(recursive=True)}
            stop_for(0.3, [server for server in servers if is_scheduler(server)])


def stop_for(seconds: float, processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.suspend()
    time.sleep(seconds)
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.resume()


def limit_network(run: FaultyRun, job: str, is_over: threading.Event) -> None:
    """Slow down all that is sent to the node of a job."""
    if not (node := run.await_node(job, is_over)):
        return
    network = json.loads((run.cluster.state_dir / "cluster.json").read_text())["facts"]["network"]
    queue = ("dev", f"adc{network}-{node}", "root")
    said_by(run_program("tc", "qdisc", "add", *queue, "tbf", "rate", LINK_RATE, "burst", "16kb",
                        "latency", "2s"))  # fmt: skip
    is_over.wait()
    said_by(run_program("tc", "qdisc", "del", *queue))


def slow_down(disk: FreezableDisk, paths: RunPaths, is_over: threading.Event) -> None:
    """The disk takes nothing for seven eighths of the time, once the trainer is at work."""
    while not events_of(paths, "state_loaded"):
        if is_over.wait(0.2):
            return
    while not is_over.wait(0.2):
        disk.freeze(1.4)


def texts_of(answer: Answer) -> str:
    return "\n".join(finding.text for finding in answer.findings)


def test_a_slow_cell_is_named_with_its_node(run: FaultyRun) -> None:
    fault = meanwhile(lambda is_over: hold_servers_up(run, "cell-1", is_over))
    answer = run.explain("slow_cell", "trainer.total_steps=12", fault=fault)
    assert answer.headline.startswith("the run is limited by generation: ")
    blamed = f"replica 0 of cell-1 (node {run.get_node('cell-1')})"
    assert answer.headline.endswith(f"; {blamed} is slow")
    assert f"{blamed} generates" in texts_of(answer)


def test_a_slow_receiver_of_weights_is_named_with_its_node(run: FaultyRun) -> None:
    fault = meanwhile(lambda is_over: limit_network(run, "cell-1", is_over))
    answer = run.explain("slow_receiver", fault=fault)
    assert answer.headline.startswith("the run is limited by weight updates: ")
    blamed = f"replica 0 of cell-1 (node {run.get_node('cell-1')})"
    assert f"; {blamed} takes " in answer.headline
    assert answer.hints[0] == f"look at the network of {blamed}"


def test_slow_storage_is_named(places: Places) -> None:
    run = FaultyRun(places, places.disk.root / "runs")
    fault = meanwhile(lambda is_over: slow_down(places.disk, run.paths, is_over))
    answer = run.explain("slow_storage", "trainer.checkpoint_every_steps=1", fault=fault)
    # Metrics and journals wait as well: whether one part is the largest is chance.
    texts = texts_of(answer)
    assert "storage is slow" in answer.headline or "wait for the run directory's storage" in texts


def test_a_run_without_a_fault_blames_nobody(run: FaultyRun) -> None:
    limited, _, blamed = run.explain("no_fault").headline.partition("; ")
    assert limited.startswith(("the run is limited by generation", "the run is limited by train"))
    assert not blamed
