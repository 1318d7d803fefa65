"""One rank of a trainer of two is killed with SIGKILL, and what passes until the next step.

`tests.support.generated_tables` renews the table that is made of it.
"""

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from areal_hpc.rundir.paths import RunPaths
from areal_hpc.wire.weight_version import WeightVersion
from tests.support.environments import CHECKOUT
from tests.support.killed_run import PARTIES
from tests.support.process_commands import alive, command_of
from tests.support.results import read_results, write_results
from tests.support.run_files import events_of, logs_of
from tests.support.tables import markdown, write_table
from tests.support.waiting import wait_for

RESULTS = "rank_kill"
DOCUMENT = CHECKOUT / "docs" / "operating.md"
RECOVERY_TIMEOUT_S = 120.0

PARTS = {
    "noticed": "death noticed",
    "ended": "ranks ended",
    "begun": "ranks begun",
    "joined": "process groups joined",
    "loaded": "checkpoint loaded",
    "published": "weights published",
    "stepped": "next step",
}
"""In this order; each lasts from the end of the one before."""

Seconds = dict[str, float]


class RankKiller:
    """Kills ranks of a run, wherever it runs on this machine."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths

    def ranks(self) -> dict[int, psutil.Process]:
        """Its live ranks, by number."""
        found = {}
        for process in psutil.process_iter():
            words = command_of(process)
            if PARTIES["trainer"] in words:
                config = Path(words[words.index(PARTIES["trainer"]) + 1])
                if config.is_relative_to(self._paths.root):
                    found[int(config.stem.rpartition("-")[2])] = process
        return found

    def version(self) -> WeightVersion:
        """The newest that a replica was given."""
        return self._published(0.0)[-1][1]

    def await_steps(self, count: int) -> None:
        """Wait until so many more steps were taken."""
        last = self.version().step + count
        wait_for(lambda: self.version().step >= last, RECOVERY_TIMEOUT_S)

    def kill(self, rank: int) -> Seconds:
        """Kill one, and wait for the next step; when what had happened, in seconds from then."""
        old, before = self.ranks(), self.version()
        struck_at = time.time()
        old[rank].kill()
        at: Seconds = {}

        def has_stepped() -> bool:
            if "ended" not in at and not alive(old.values()):
                at["ended"] = time.time() - struck_at
            if "ended" in at and "begun" not in at and self.ranks().keys() == old.keys():
                at["begun"] = time.time() - struck_at
            at.update(self._read_milestones(struck_at, before))
            return "stepped" in at

        wait_for(has_stepped, RECOVERY_TIMEOUT_S, lambda: (at, logs_of(self._paths)))
        return at

    def _read_milestones(self, since: float, before: WeightVersion) -> Seconds:
        events = {"noticed": "process_exited", "joined": "ranks_joined", "loaded": "state_loaded"}
        first = {name: events_of(self._paths, event, since)[:1] for name, event in events.items()}
        found = {name: row["time"] - since for name, rows in first.items() for row in rows}
        published = self._published(since)
        new = [
            (at - since, one.step) for at, one in published if one.generation > before.generation
        ]
        if new:
            found["published"] = new[0][0]
        later = [at for at, step in new if step > new[0][1]]
        if later:
            found["stepped"] = later[0]
        return found

    def _published(self, since: float) -> list[tuple[float, WeightVersion]]:
        return [
            (row["time"], WeightVersion.parse(row["version"]))
            for row in events_of(self._paths, "weights_published", since)
            if row["replicas"]
        ]


def durations(at: Seconds) -> Seconds:
    """How long each part lasted."""
    ends = [at[part] for part in PARTS]
    begins = [0.0, *ends[:-1]]
    return {
        part: round(max(0.0, end - begin), 2)
        for part, begin, end in zip(PARTS, begins, ends, strict=True)
    }


def summarize(kills: Sequence[Seconds]) -> dict[str, Any]:
    """The median of every part over several kills, and all times until the next step."""
    lasted = [durations(at) for at in kills]
    totals = sorted(round(at["stepped"], 1) for at in kills)
    parts = {part: round(statistics.median(one[part] for one in lasted), 2) for part in PARTS}
    return {"parts": parts, "totals": totals}


def record(name: str, kills: Sequence[Seconds]) -> dict[str, Any]:
    """Put figures in the place of older ones of that name, and renew the document."""
    figures = summarize(kills)
    write_results(RESULTS, read_results(RESULTS, {}) | {name: figures})
    write_table(DOCUMENT, "rank kill", table())
    return figures


def table() -> str:
    """Both, side by side."""
    measured = read_results(RESULTS, {})
    rows = [
        (
            name,
            *(f"{figures['parts'][part]:g}" for part in PARTS),
            f"{statistics.median(figures['totals']):g} ({figures['totals'][0]:g} to "
            f"{figures['totals'][-1]:g})",
        )
        for name, figures in measured.items()
    ]
    return markdown(("seconds", *PARTS.values(), "together"), rows)
