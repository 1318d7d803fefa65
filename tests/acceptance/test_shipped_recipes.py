"""Shipped recipes that learn on two CPU cores: each learns, and no alert calls it a failure.

The quick start and its asynchronous form are in test_quickstart_learns.py, with three seeds.
"""

from pathlib import Path

import pytest

from areal_hpc.rundir.jsonl import read_readable_records
from areal_hpc.rundir.paths import RunPaths
from examples.harbor.sums import write_tasks
from tests.acceptance.test_gyms import python_of
from tests.support.commands import areal_hpc, said_by
from tests.support.run_files import events_of

pytestmark = pytest.mark.timeout(4000)

CHECK_TIMEOUT_S = 600.0
"""For 64 tasks, twice each, in sandboxes."""
RUN_TIMEOUT_S = 3600.0
LEAST_GAIN = 0.3
"""Of the held-out reward; each recipe's head says how much it was."""
LOGPROB_GAP = "logprob/engine_trainer_max_abs_diff"


def learn(recipe: str, folder: Path, *overrides: str) -> list[dict[str, float]]:
    """Run a recipe, which must learn; its metrics."""
    command = ("run", f"recipes/{recipe}.yaml", f"cluster.fileroot={folder / 'runs'}", *overrides)
    said_by(areal_hpc(*command, timeout_s=RUN_TIMEOUT_S))
    (recipe_file,) = (folder / "runs").glob("*/*/recipe.yaml")
    paths = RunPaths(recipe_file.parent)
    said_by(areal_hpc("status", paths.root))  # exits with 1 for an alert that is a failure
    assert "failure" not in [event["level"] for event in events_of(paths, "alert")]
    rows = read_readable_records(paths.metrics)
    rewards = [row["eval/reward"] for row in rows if "eval/reward" in row]
    assert rewards[-1] - rewards[0] >= LEAST_GAIN, rewards
    return rows


@pytest.mark.parametrize("recipe", ["disk_transport", "off_policy", "partial_groups"])
def test_a_recipe_learns_and_raises_no_failure(recipe: str, tmp_path: Path) -> None:
    learn(f"variants/{recipe}", tmp_path)


def test_commands_in_sandboxes_are_learned_on_harbors_tasks(tmp_path: Path) -> None:
    for name, count, seed in (("sums", 512, 1), ("sums-held-out", 64, 2)):
        write_tasks(tmp_path / name, count, seed)
    command = ("check-tasks", tmp_path / "sums-held-out")
    assert "64 tasks, 0 whose tests" in said_by(areal_hpc(*command, timeout_s=CHECK_TIMEOUT_S))
    tasks = {"train": tmp_path / "sums", "valid": tmp_path / "sums-held-out"}
    learn("cpu_harbor", tmp_path, *(f"{name}_dataset.path={path}" for name, path in tasks.items()))


def test_a_tiny_model_learns_to_play_blackjack(tmp_path: Path) -> None:
    learn("cpu_blackjack", tmp_path, f"rollout.workflow_kwargs.python={python_of('gymnasium')}")


def test_a_tiny_model_learns_with_a_coding_harness_to_look_before_it_writes(
    tmp_path: Path,
) -> None:
    gaps = [row[LOGPROB_GAP] for row in learn("cpu_harness", tmp_path) if LOGPROB_GAP in row]
    assert max(gaps) <= 1e-4
