"""Who is killed where: the points of a run, and a run that is killed at them."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from areal_hpc.json_lines import read_lines
from areal_hpc.layout import RunLayout
from tests.support.environments import CHECKOUT
from tests.support.small_run import SmallRun

FAULTS = CHECKOUT / "tests" / "faults"
REST_S = 2.0
"""Between a kill and the next one: a process that is just starting has nothing to lose."""

LAUNCH_TIMEOUT_S = 900.0

PARTIES = {
    "trainer": "areal_hpc.trainer.job:run",
    "ledger": "areal_hpc.ledger.job:run",
    "proxy": "areal_hpc.proxy.job:run",
    "server": "server",
    "driver": "areal_hpc.rollout.job:run",
}
"""Who is killed, and how to find it. `server` is SGLang."""


@dataclass(frozen=True)
class Point:
    """A moment of a run."""

    function: str
    moment: str
    means: str


POINTS = {
    "episode": Point(
        "areal_hpc.proxy.upstream:Upstream._guarded", "during", "while SGLang generates a reply"
    ),
    "journal": Point(
        "areal_hpc.shards.journal:JournalWriter.append",
        "torn",
        "half of a journal record is written",
    ),
    "seal": Point(
        "areal_hpc.shards.writer:append_to_index", "before", "a shard is whole but not indexed"
    ),
    "step": Point(
        "areal_hpc.trainer.learner:Learner._advance", "before", "the optimizer has stepped"
    ),
    "commit": Point(
        "areal_hpc.trainer.commits.store:CommitStore._put_in_place",
        "before",
        "a commit is written but not visible",
    ),
}
"""The kill matrix strikes every party at each of these."""
UPDATE = Point(
    "areal_hpc.weights.swap:GroupSwap.end", "before", "replicas hold new weights half loaded"
)
HELD = {
    "collective": Point(
        "areal_hpc.trainer.step:optimizer_step",
        "held",
        "one rank is kept from the optimizer's collectives, the others wait in them",
    ),
    "save": Point(
        "areal_hpc.trainer.commits.store:CommitStore._put_in_place",
        "held",
        "a commit is written but not visible",
    ),
}
"""Where a trainer is kept, to be preempted just there."""


@dataclass(frozen=True)
class Kill:
    """One case: `party` dies at `point`."""

    party: str
    point: str
    """One of `POINTS`, or `update`."""

    @property
    def where(self) -> Point:
        """The moment itself."""
        return UPDATE if self.point == "update" else POINTS[self.point]

    @property
    def name(self) -> str:
        return f"{self.party}-{self.point}"


class KilledRun(SmallRun):
    """A small run, without warm-up, whose processes are killed one after another."""

    def __init__(
        self, root: Path, model: Path, kills: list[Kill], steps: int = 24, *overrides: str
    ) -> None:
        super().__init__(
            root / "runs",
            "warmup=null",
            "model.tiny=null",
            f"model.path={model}",
            f"trainer.total_steps={steps}",
            "trainer.commit_every_steps=2",
            "evaluation.every_steps=4",
            *overrides,
        )
        self.steps = steps
        self.kills = kills
        self.marks = root / "faults"
        self.marks.mkdir(parents=True)
        plan = {
            "run_dir": str(self.layout.root),
            "rest_s": REST_S,
            "faults": [
                {
                    "name": kill.name,
                    "point": kill.where.function,
                    "moment": kill.where.moment,
                    "victim": PARTIES[kill.party],
                }
                for kill in kills
            ],
        }
        path = self.marks / "plan.json"
        path.write_text(json.dumps(plan))
        self.environ = {
            "AREAL_HPC_FAULTS": str(path),
            "PYTHONPATH": os.pathsep.join(
                part for part in (str(FAULTS), os.environ.get("PYTHONPATH", "")) if part
            ),
        }

    def run_to_the_end(self, most_launches: int) -> int:
        """Give the same command until it exits with 0; how often that took."""
        for launch in range(1, most_launches + 1):
            self.start()
            if self.wait(LAUNCH_TIMEOUT_S) == 0:
                return launch
        raise AssertionError(self.said())

    def struck(self) -> dict[str, float]:
        """When each kill happened, by name."""
        marks = {kill.name: self.marks / kill.name for kill in self.kills}
        return {
            name: json.loads(mark.read_text())["time"]
            for name, mark in marks.items()
            if mark.exists()
        }

    def assert_complete(self) -> str:
        """Every step was taken and told once, every ticket trained once; the audit's verdict."""
        rows = read_lines(self.layout.metrics)
        assert [row["step"] for row in rows] == list(range(self.steps + 1)), self.said()
        assert self.layout.finished.exists()
        verdict = self.audited()
        assert verdict == f"trained_once={4 * self.steps} duplicates=0 lost=0 open=0"
        return verdict

    def seconds_to_next_version(self, struck_at: float) -> float:
        """From a kill to the next weights that replicas were given."""
        events = read_lines(self.layout.events)
        later: list[float] = [
            event["time"]
            for event in events
            if event["event"] == "published" and event["replicas"] and event["time"] > struck_at
        ]
        assert later, f"no weights were given after the kill: {self.said()}"
        return round(min(later) - struck_at, 1)


def warmed_up_model(root: Path) -> Path:
    """The quick start's model after a short warm-up, for many runs to start from."""
    run = SmallRun(root / "warm")
    export = RunLayout(run.layout.root).export("warmup")
    run.interrupt_when(
        lambda: (export / "config.json").exists() and any(export.glob("*.safetensors"))
    )
    return export
