"""With a coding harness as released a tiny model learns to look before it writes."""

import time
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.rundir.jsonl import read_readable_records
from areal_hpc.rundir.paths import RunPaths
from tests.support.commands import areal_hpc, said_by
from tests.support.run_files import events_of

pytestmark = pytest.mark.timeout(4000)

LEAST_GAIN = 0.3
"""Of the held-out reward."""
LONGEST_RUN_S = 3600.0
LOGPROB_GAP = "logprob/engine_trainer_max_abs_diff"


def test_a_harness_task_is_learnt(tmp_path: Path) -> None:
    command = ("run", "recipes/cpu_harness.yaml", f"cluster.fileroot={tmp_path}")
    began = time.monotonic()
    said_by(areal_hpc(*command, timeout_s=LONGEST_RUN_S))
    print(f"took {time.monotonic() - began:.0f} s")
    paths = RunPaths(tmp_path / "harness" / "lookup")
    said_by(areal_hpc("status", paths.root))  # exits with 1 for an alert that is a failure
    assert "failure" not in [event["level"] for event in events_of(paths, "alert")]
    check_metrics(read_readable_records(paths.metrics))


def check_metrics(rows: list[dict[str, Any]]) -> None:
    """It earns more, by looking; and what was trained is what was sampled."""
    rewards = [row["eval/reward"] for row in rows if "eval/reward" in row]
    assert rewards[-1] - rewards[0] >= LEAST_GAIN, rewards
    trained = [row for row in rows if "reward/mean" in row]
    gaps = [row[LOGPROB_GAP] for row in trained if LOGPROB_GAP in row]
    assert gaps
    assert max(gaps) <= 1e-4
