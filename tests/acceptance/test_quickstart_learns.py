"""The shipped recipes learn: three seeds synchronously, one asynchronously, on the real stack."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.layout import RunLayout
from areal_hpc.telemetry import read_json_lines

REPOSITORY = Path(__file__).parents[2]
RESULTS = REPOSITORY / "benchmarks" / "results" / "quickstart.json"
LONGEST_DEMO_S = 720.0

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def results() -> Iterator[dict[str, Any]]:
    """What the tests of this module measured, written out at the end."""
    measured: dict[str, Any] = {}
    yield measured
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(dict(sorted(measured.items())), indent=2) + "\n")


def train(recipe: str, seed: int, fileroot: Path) -> dict[str, Any]:
    """Run a recipe to its end; what it came to."""
    began = time.monotonic()
    subprocess.run(
        [
            *(sys.executable, "-m", "areal_hpc", "run", f"recipes/{recipe}.yaml"),
            *(f"cluster.fileroot={fileroot}", f"seed={seed}"),
            *(f"train_dataset.kwargs.seed={seed}", f"warmup.dataset.kwargs.seed={seed}"),
        ],
        cwd=REPOSITORY,
        check=True,
        timeout=850,
    )
    wall_s = time.monotonic() - began
    (metrics,) = fileroot.glob("quickstart/*/metrics.jsonl")
    rows = read_json_lines(RunLayout(metrics.parent).metrics)
    evaluated = {row["step"]: row["eval/reward"] for row in rows if "eval/reward" in row}
    trained = [row for row in rows if "reward/mean" in row]
    return {
        "wall_s": round(wall_s, 1),
        "eval_reward": evaluated,
        "start": evaluated[0],
        "end": evaluated[rows[-1]["step"]],
        "engine_trainer_max_abs_diff": max(
            row["logprob/engine_trainer_max_abs_diff"] for row in trained
        ),
        "metered_tokens": sum(row["logprob/metered_tokens"] for row in trained),
        "sampled_tokens": sum(row["tokens/sampled"] for row in trained),
        "staleness_max": max(row["staleness/max"] for row in trained),
        "replies_over_two_versions": sum(row["versions/multi"] for row in trained),
        "step_s": round(sum(row["time/step_s"] for row in trained) / len(trained), 2),
    }


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_quick_start_learns(seed: int, results: dict[str, Any], tmp_path: Path) -> None:
    run = results[f"synchronous seed {seed}"] = train("quickstart", seed, tmp_path)
    assert run["start"] <= 0.45
    assert run["end"] >= 0.80
    assert run["wall_s"] <= LONGEST_DEMO_S
    assert run["engine_trainer_max_abs_diff"] <= 1e-4
    assert run["metered_tokens"] == run["sampled_tokens"]


def test_the_asynchronous_quick_start_learns_from_replies_of_mixed_versions(
    results: dict[str, Any], tmp_path: Path
) -> None:
    run = results["asynchronous seed 1"] = train("quickstart_async", 1, tmp_path)
    assert run["end"] >= 0.80
    assert run["engine_trainer_max_abs_diff"] <= 1e-4
    assert run["replies_over_two_versions"] > 0
