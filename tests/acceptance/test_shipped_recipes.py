"""Shipped recipes that learn on two CPU cores: each learns, and no alert calls it a failure.

The quick start and its asynchronous form are in test_quickstart_learns.py, with three seeds.
"""

from pathlib import Path

import pytest

from areal_hpc.rundir.jsonl import read_readable_records
from areal_hpc.rundir.paths import RunPaths
from examples.harbor.sums import write_tasks
from tests.support.commands import areal_hpc, said_by
from tests.support.run_files import events_of

pytestmark = pytest.mark.timeout(2700)

CHECK_TIMEOUT_S = 600.0
"""For 64 tasks, twice each, in sandboxes."""
RUN_TIMEOUT_S = 1900.0
LEAST_GAIN = 0.3
"""Of the held-out reward; each recipe's head says how much it was."""


@pytest.mark.parametrize("recipe", ["disk_transport", "off_policy", "partial_groups"])
def test_a_recipe_learns_and_raises_no_failure(recipe: str, tmp_path: Path) -> None:
    command = ("run", f"recipes/variants/{recipe}.yaml", f"cluster.fileroot={tmp_path}")
    said_by(areal_hpc(*command, timeout_s=RUN_TIMEOUT_S))
    paths = RunPaths(tmp_path / "quickstart" / recipe)
    said_by(areal_hpc("status", paths.root))  # exits with 1 for an alert that is a failure
    levels = [event["level"] for event in events_of(paths, "alert")]
    assert "failure" not in levels
    rewards = read_held_out_rewards(paths)
    assert rewards[-1] - rewards[0] >= LEAST_GAIN, rewards


def test_commands_in_sandboxes_are_learned_on_harbors_tasks(tmp_path: Path) -> None:
    for name, count, seed in (("sums", 512, 1), ("sums-held-out", 64, 2)):
        write_tasks(tmp_path / name, count, seed)
    checked = said_by(
        areal_hpc("check-tasks", tmp_path / "sums-held-out", timeout_s=CHECK_TIMEOUT_S)
    )
    assert "64 tasks, 0 whose tests" in checked
    said_by(
        areal_hpc(
            *("run", "recipes/cpu_harbor.yaml", f"cluster.fileroot={tmp_path}"),
            f"train_dataset.path={tmp_path / 'sums'}",
            f"valid_dataset.path={tmp_path / 'sums-held-out'}",
            timeout_s=RUN_TIMEOUT_S,
        )
    )
    paths = RunPaths(tmp_path / "quickstart" / "harbor")
    said_by(areal_hpc("status", paths.root))
    rewards = read_held_out_rewards(paths)
    assert rewards[-1] - rewards[0] >= LEAST_GAIN, rewards


def read_held_out_rewards(paths: RunPaths) -> list[float]:
    """The reward of each evaluation, in order."""
    return [
        row["eval/reward"] for row in read_readable_records(paths.metrics) if "eval/reward" in row
    ]
