"""Shipped recipes that learn on two CPU cores: each learns, and no alert calls it a failure.

The quick start and its asynchronous form are in test_quickstart_learns.py, with three seeds.
"""

from pathlib import Path

import pytest

from areal_hpc.rundir.jsonl import read_lines
from areal_hpc.rundir.paths import RunPaths
from tests.support.commands import areal_hpc, said_by
from tests.support.run_files import events_of

pytestmark = pytest.mark.timeout(1800)

LEAST_GAIN = 0.3
"""Of the held-out reward; each recipe's head says how much it was."""


@pytest.mark.parametrize("recipe", ["disk_transport", "off_policy", "partial_groups"])
def test_a_recipe_learns_and_raises_no_failure(recipe: str, tmp_path: Path) -> None:
    command = ("run", f"recipes/{recipe}.yaml", f"cluster.fileroot={tmp_path}")
    said_by(areal_hpc(*command, timeout_s=1700))
    paths = RunPaths(tmp_path / "quickstart" / recipe)
    said_by(areal_hpc("status", paths.root))  # exits with 1 for an alert that is a failure
    levels = [event["level"] for event in events_of(paths, "alert")]
    assert "failure" not in levels
    rewards = [row["eval/reward"] for row in read_lines(paths.metrics) if "eval/reward" in row]
    assert rewards[-1] - rewards[0] >= LEAST_GAIN, rewards
