"""Points at which a run's processes are killed, and a run that is killed at them."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from areal_hpc.launch.tiny_model import make_tiny_model
from areal_hpc.rundir.jsonl import read_readable_records
from areal_hpc.shards.journal import encode_record_header
from areal_hpc.wire.fault_points import FAULT_POINTS, FAULTS_VARIABLE
from tests.support.process_commands import find_processes
from tests.support.run_files import published_weights
from tests.support.small_run import SmallRun, started_from
from tests.support.waiting import wait_for

REST_S = 2.0
"""Time between a kill and the next one: a process that is just starting has nothing to lose."""
GENERATING_S = 0.03
"""Time from the moment before SGLang is asked to one at which it generates."""
POLL_S = 0.01
LAUNCH_TIMEOUT_S = 900.0

SLOW = (
    "evaluation.every_steps=0",
    "rollout.workflow=tests.support.agents.SlowAgent",
    "rollout.workflow_kwargs.mean_pause_s=1.0",
)
"""Settings of a run that lasts as long as a test must."""

PARTIES = {
    "trainer": "areal_hpc.trainer.job:run",
    "ledger": "areal_hpc.ledger.job:run",
    "proxy": "areal_hpc.proxy.job:run",
    "server": "areal_hpc.inference.job:run",
    "driver": "areal_hpc.rollout.job:run",
}
"""Parties to kill, with their entry points. `server` is SGLang, the child of that one."""


@dataclass(frozen=True)
class Point:
    """A moment of a run."""

    fault_point: str
    means: str


def _at(fault_point: str) -> Point:
    return Point(fault_point, FAULT_POINTS[fault_point])


POINTS = {
    "episode": Point("proxy.generate", "while SGLang generates a reply"),
    "journal": Point("journal.before_append", "half of a journal record is written"),
    "seal": _at("shard.before_index"),
    "step": _at("optimizer.after_step"),
    "checkpoint": _at("checkpoint.before_rename"),
}
"""The kill matrix strikes every party at each of these."""
UPDATE = _at("weights.before_end")


@dataclass(frozen=True)
class Kill:
    party: str
    point: str
    """One of `POINTS`, or `update`."""

    @property
    def where(self) -> Point:
        return UPDATE if self.point == "update" else POINTS[self.point]

    @property
    def name(self) -> str:
        return f"{self.party}-{self.point}"


class Gate:
    """Gate at a fault point; it holds the first process that comes while it is shut."""

    def __init__(self, folder: Path, fault_point: str) -> None:
        self._path = folder / fault_point
        self._held = folder / f"{fault_point}.held"
        self.setting = f"{fault_point}=hold:{self._path}"
        """Value for the variable of faults."""

    def shut(self) -> None:
        self._path.touch()

    def open(self) -> None:
        self._path.unlink(missing_ok=True)
        self._held.unlink(missing_ok=True)

    def held(self) -> int | None:
        try:
            return int(self._held.read_text() or 0) or None
        except FileNotFoundError:
            return None


class KilledRun(SmallRun):
    """A small run, without SFT, whose processes are killed one after another."""

    def __init__(
        self, root: Path, model: Path, kills: list[Kill], steps: int = 24, *overrides: str
    ) -> None:
        super().__init__(
            root / "runs",
            *started_from(model),
            f"trainer.total_steps={steps}",
            "trainer.checkpoint_every_steps=2",
            "evaluation.every_steps=4",
            *overrides,
        )
        self.steps = steps
        self.kills = kills
        self.launches = 0
        folder = root / "faults"
        folder.mkdir(parents=True)
        self._gates = {point: Gate(folder, point) for point in {k.where.fault_point for k in kills}}
        self.environ = {FAULTS_VARIABLE: " ".join(gate.setting for gate in self._gates.values())}
        self._struck: dict[str, float] = {}
        self._killer = threading.Thread(target=self._kill_all, daemon=True)

    def start(self) -> None:
        super().start()
        self.launches += 1
        if self.kills and self._killer.ident is None:
            self._killer.start()

    def run_to_the_end(self, most_launches: int) -> int:
        """Give the same command until it exits with 0; how often that took."""
        while self.launches < most_launches:
            self.start()
            if self.wait(LAUNCH_TIMEOUT_S) == 0:
                return self.launches
        raise AssertionError(self.said())

    def keep_going(
        self, condition: Callable[[], bool], timeout_s: float = LAUNCH_TIMEOUT_S
    ) -> None:
        """Wait for a condition; give the command again whenever it has given up."""

        def holds() -> bool:
            if condition():
                return True
            if self.process is None or self.process.poll() is not None:
                self.start()
            return False

        wait_for(holds, timeout_s, self.said, every_s=0.5)

    def struck(self) -> dict[str, float]:
        return dict(self._struck)

    def _kill_all(self) -> None:
        """Kill each party once, in order, when a process of the run comes to its point."""
        for kill in self.kills:
            gate = self._gates[kill.where.fault_point]
            while kill.name not in self._struck:
                gate.shut()
                while (held := gate.held()) is None:
                    time.sleep(POLL_S)
                if victims := self._victims(kill.party):
                    self._strike(kill, gate, held, victims)
                gate.open()
                time.sleep(REST_S if victims else POLL_S)

    def _strike(self, kill: Kill, gate: Gate, held: int, victims: list[psutil.Process]) -> None:
        self._struck[kill.name] = time.time()
        if kill.point == "episode":
            gate.open()
            time.sleep(GENERATING_S)
        survives = held not in [victim.pid for victim in victims]
        with torn_record(held, survives) if kill.point == "journal" else nullcontext():
            for victim in victims:
                with suppress(psutil.NoSuchProcess):
                    victim.kill()

    def _victims(self, party: str) -> list[psutil.Process]:
        processes = find_processes(PARTIES[party], self.paths.root)
        if party != "server":
            return processes
        with suppress(psutil.NoSuchProcess):
            return [child for process in processes for child in process.children()]
        return []

    def assert_complete(self) -> str:
        """Check that steps and tickets count once, and return the audit's verdict."""
        rows = read_readable_records(self.paths.metrics)
        assert [row["step"] for row in rows] == list(range(self.steps + 1)), self.said()
        assert self.paths.finished_marker.exists()
        verdict = self.audited()
        assert verdict == f"trained_once={4 * self.steps} duplicates=0 lost=0 open=0"
        return verdict

    def seconds_to_next_version(self, struck_at: float) -> float:
        """Time from a kill to the next weights that replicas were given."""
        later = [at for at, _, _ in published_weights(self.paths, struck_at)]
        assert later, f"no weights were given after the kill: {self.said()}"
        return round(min(later) - struck_at, 1)


@contextmanager
def torn_record(writer: int, survives: bool) -> Iterator[None]:
    """Half of a record in the journal of a process that is held; gone again if it survives."""
    links = Path(f"/proc/{writer}/fd").iterdir()
    journal = next(link for link in links if link.readlink().name == "journal").readlink()
    size_bytes = journal.stat().st_size
    payload = b"x" * 200
    record = encode_record_header(1, payload) + payload
    with journal.open("ab") as stream:
        stream.write(record[: len(record) // 2])
    yield
    if survives:
        os.truncate(journal, size_bytes)


def random_model(folder: Path) -> Path:
    """Make a model of random weights, for runs whose learning does not matter."""
    make_tiny_model(folder, ["State the final answer to the following: 1 + 2 ="])
    return folder
