"""The shipped recipes learn: three seeds synchronously, one asynchronously, on the real stack.

Every run is judged on 1,024 held-out tasks, four times those of the recipe. What was measured goes
to benchmarks/results/quickstart.json and, as a table, to docs/learning.md; a run of some tests
leaves the figures of the others alone.
"""

from __future__ import annotations

import json
import math
import statistics
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
TABLE = REPOSITORY / "docs" / "learning.md"
SEEDS = (1, 2, 3)
HELD_OUT_TASKS = 1024
NORMAL_975 = 1.960
STUDENT_975_OF_2 = 4.303
"""Two degrees of freedom: three seeds."""

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def results() -> Iterator[dict[str, Any]]:
    """What was measured, by name of the run; written out at the end."""
    measured: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    yield measured
    seeds = [measured.get(f"synchronous seed {seed}") for seed in SEEDS]
    if all(seeds):
        measured["synchronous mean"] = mean_of([seed["end"] for seed in seeds if seed])
    RESULTS.write_text(json.dumps(dict(sorted(measured.items())), indent=2) + "\n")
    TABLE.write_text(table_of(measured))


def interval_of(share: float, count: int) -> list[float]:
    """Wilson's 95 % interval of a share of `count` trials."""
    z = NORMAL_975**2 / count
    middle = (share + z / 2) / (1 + z)
    half = math.sqrt(z * share * (1 - share) + z**2 / 4) / (1 + z)
    return [round(middle - half, 4), round(middle + half, 4)]


def mean_of(ends: list[float]) -> dict[str, Any]:
    """Mean over three seeds with its 95 % interval (Student's t)."""
    mean = statistics.mean(ends)
    half = STUDENT_975_OF_2 * statistics.stdev(ends) / math.sqrt(len(ends))
    low, high = max(0.0, mean - half), min(1.0, mean + half)
    return {"mean": round(mean, 4), "interval": [round(low, 4), round(high, 4)]}


def table_of(measured: dict[str, Any]) -> str:
    """docs/learning.md."""
    lines = [
        "# Does the quick start learn?",
        "",
        f"Held-out reward (greedy, {HELD_OUT_TASKS:,} tasks that no training saw) before and after "
        "25 steps of",
        "reinforcement learning, on two CPU cores. `make acceptance` measures it and writes this "
        "page.",
        "Brackets: 95 % intervals, Wilson's for a run, Student's for the mean of the seeds.",
        "",
        "| run | before | after | engine-trainer difference | tokens |",
        "|---|---|---|---|---|",
    ]
    for name, run in sorted(measured.items()):
        if "end" not in run:
            continue
        low, high = run["end_interval"]
        lines.append(
            f"| {name} | {run['start']:.3f} | {run['end']:.3f} [{low:.3f}, {high:.3f}] "
            f"| {run['engine_trainer_max_abs_diff']:.1e} | {run['sampled_tokens']:,} |"
        )
    if mean := measured.get("synchronous mean"):
        low, high = mean["interval"]
        lines += ["", f"Mean of the synchronous seeds: {mean['mean']:.3f} [{low:.3f}, {high:.3f}]."]
    return "\n".join(lines) + "\n"


def train(recipe: str, seed: int, fileroot: Path) -> dict[str, Any]:
    """Run a recipe to its end; what it came to."""
    began = time.monotonic()
    subprocess.run(
        [
            *(sys.executable, "-m", "areal_hpc", "run", f"recipes/{recipe}.yaml"),
            *(f"cluster.fileroot={fileroot}", f"seed={seed}"),
            *(f"train_dataset.kwargs.seed={seed}", f"warmup.dataset.kwargs.seed={seed}"),
            f"valid_dataset.kwargs.size={HELD_OUT_TASKS}",
            f"evaluation.tasks={HELD_OUT_TASKS}",
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
        "end_interval": interval_of(evaluated[rows[-1]["step"]], HELD_OUT_TASKS),
        "engine_trainer_max_abs_diff": max(
            row["logprob/engine_trainer_max_abs_diff"] for row in trained
        ),
        "metered_tokens": sum(row["logprob/metered_tokens"] for row in trained),
        "sampled_tokens": sum(row["tokens/sampled"] for row in trained),
        "staleness_max": max(row["staleness/max"] for row in trained),
        "replies_over_two_versions": sum(row["versions/multi"] for row in trained),
        "step_s": round(sum(row["time/step_s"] for row in trained) / len(trained), 2),
    }


@pytest.mark.parametrize("seed", SEEDS)
def test_the_quick_start_learns(seed: int, results: dict[str, Any], tmp_path: Path) -> None:
    run = results[f"synchronous seed {seed}"] = train("quickstart", seed, tmp_path)
    assert run["start"] <= 0.45
    assert run["end"] >= 0.80
    assert run["engine_trainer_max_abs_diff"] <= 1e-4
    assert run["metered_tokens"] == run["sampled_tokens"]


def test_the_asynchronous_quick_start_learns_from_replies_of_mixed_versions(
    results: dict[str, Any], tmp_path: Path
) -> None:
    run = results["asynchronous seed 1"] = train("quickstart_async", 1, tmp_path)
    assert run["end"] >= 0.80
    assert run["engine_trainer_max_abs_diff"] <= 1e-4
    assert run["replies_over_two_versions"] > 0
