"""Fifty submissions while slurmctld stops at random moments: every job once, none unknown.

Writes `benchmarks/results/submissions.json` and the table of `docs/operating.md`.
"""

import random
import statistics
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import said_by
from tests.support.deadlines import scaled
from tests.support.devclusters import (
    HELD,
    JOBS,
    Devcluster,
    Submitting,
    devcluster,
    light_overrides,
    numbers,
    queued,
    recorded,
    stopped_slurmctld,
)
from tests.support.results import matrix, write_results, write_table
from tests.support.waiting import wait_for

SUBMISSIONS = 50
MAX_DELAY_S, MAX_STOP_S = 6.0, 15.0
"""A submission takes six seconds, most of them before the first job; sbatch waits for an answer for
ten."""


def await_random_moment(
    chance: random.Random, run: Submitting, recorded_before: int, submitting: subprocess.Popen[str]
) -> None:
    """Return some time after the start, or when slurmctld is about to be asked for a job.

    What it is asked for takes a tenth of a second, which a random time alone would seldom meet.
    """
    jobs = chance.randint(0, len(JOBS))  # after the last one they are released
    if jobs == 0:
        time.sleep(chance.uniform(0.0, MAX_DELAY_S))
        return
    wait_for(
        lambda: len(run.submissions) >= recorded_before + jobs or submitting.poll() is not None,
        every_s=0.005,
    )


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Devcluster]:
    with devcluster(tmp_path_factory.mktemp("cluster") / "state", "--nodes=2") as found:
        yield found


@pytest.mark.timeout(5400)
def test_no_submission_leaves_an_orphan(cluster: Devcluster, tmp_path: Path) -> None:
    chance = random.Random(2211)
    run = Submitting(cluster, tmp_path / "runs")
    light = light_overrides(tmp_path)
    rows = []
    for attempt in range(SUBMISSIONS):
        began, before = time.monotonic(), len(run.submissions)
        submitting = run.start(*HELD, *light)
        await_random_moment(chance, run, before, submitting)
        with stopped_slurmctld(cluster):
            time.sleep(chance.uniform(0.0, MAX_STOP_S))
        shown, _ = submitting.communicate(timeout=scaled(300))
        took_s = time.monotonic() - began
        repeated = submitting.returncode == 75
        if repeated:  # slurmctld was silent before anything was submitted
            assert numbers(cluster) == [], shown
            said_by(run.submit(*HELD, *light))
        else:
            assert submitting.returncode == 0, shown
        assert queued(cluster) == JOBS, shown
        orphans = set(numbers(cluster)) - set(recorded(run).values())
        rows.append(
            {
                "attempt": attempt,
                "seconds": round(took_s, 1),
                "adopted": shown.count("was accepted nevertheless"),
                "tried_again": shown.count("looking for the job"),
                "repeated": int(repeated),
                "orphans": len(orphans),
            }
        )
        write_results("submissions", rows)
        write_table("operating.md", "submissions", table(rows))
        said_by(run.call("cancel", str(run.paths.root), "--now"))
        assert numbers(cluster) == []
    assert sum(row["orphans"] for row in rows) == 0
    assert sum(row["tried_again"] for row in rows) > 0


def table(rows: list[dict[str, Any]]) -> str:
    """By what `submit` did."""
    kinds = {
        "waited, or noticed nothing": [r for r in rows if not (r["repeated"] or r["adopted"])],
        "found a job that was accepted too late": [
            r for r in rows if r["adopted"] and not r["repeated"]
        ],
        "gave up before the first job, exit code 75": [r for r in rows if r["repeated"]],
        "all": rows,
    }
    return matrix(
        "what `submit` did",
        {
            kind: {
                "times": len(found),
                "median seconds": f"{statistics.median(row['seconds'] for row in found):.1f}",
                "most seconds": f"{max(row['seconds'] for row in found):.1f}",
                "unknown jobs": sum(row["orphans"] for row in found),
            }
            for kind, found in kinds.items()
            if found
        },
    )
