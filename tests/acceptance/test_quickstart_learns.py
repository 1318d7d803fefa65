"""Learning of the shipped recipes, also from old tokens, on the real stack with three seeds.

Every run is judged on 1,024 held-out tasks. Runs that compare ages of tokens start from the same
SFT model, one a seed, and get their rewards late, so that all a bound allows is in use. Writes
`benchmarks/results/quickstart.json`, which `docs/learning.md` shows, and `sft_alone.json`.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.evaluation.set_names import EVALUATION_METRIC_PREFIX, INTERVAL_BOUND_SUFFIXES
from areal_hpc.rundir.jsonl import read_readable_records
from areal_hpc.rundir.paths import RunPaths, format_step_dir
from areal_hpc.view.evaluation_report import read_report
from tests.support.commands import areal_hpc, said_by
from tests.support.results import add_results, read_results, write_results
from tests.support.run_files import events_of
from tests.support.small_run import started_from

SEEDS = (1, 2, 3)
HELD_OUT_TASKS = 1024
LOGPROB_GAP = "logprob/engine_trainer_max_abs_diff"

pytestmark = pytest.mark.timeout(1800)


BOUND, FAR_BOUND = 4, 8
HALF_WAY = 10
"""The steps of the middle column."""
MOST_DIFFERENCE = 0.03
SMALL_BATCHES = (
    "trainer.batch_size=8",
    f"rollout.max_concurrent_rollouts={(FAR_BOUND + 1) * 8 * 8}",
    f"evaluation.every_steps={HALF_WAY}",
)
"""Settings that put all that the bound admits in flight."""
LATE = (
    "rollout.workflow=tests.support.agents.LateAgent",
    "rollout.workflow_kwargs.judged_after_s=10",
)
"""Ten seconds from reply to reward; with bound 0 nothing runs ahead, so waiting changes nothing."""
NAIVE = ("trainer.objective.proximal=none", "trainer.objective.off_policy_correction=none")
"""PPO whose ratios are to the policy that sampled, however old."""
AGES: dict[str, tuple[int, tuple[str, ...]]] = {
    "small batches, bound 0": (0, ()),
    f"small batches, bound {BOUND}, late": (BOUND, LATE),
    f"small batches, bound {FAR_BOUND}, late, decoupled": (FAR_BOUND, LATE),
    f"small batches, bound {FAR_BOUND}, late, naive": (FAR_BOUND, (*LATE, *NAIVE)),
}
"""Kinds of run that are compared: bound and settings."""


@pytest.fixture(scope="module")
def half_way(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], RunPaths]:
    fileroot = tmp_path_factory.mktemp("half_way")

    def run(seed: int) -> RunPaths:
        if not (fileroot / str(seed)).exists():
            run_recipe("quickstart", seed, fileroot / str(seed), f"trainer.total_steps={HALF_WAY}")
        return RunPaths(fileroot / str(seed) / "quickstart" / "demo")

    return run


def run_recipe(recipe: str, seed: int, fileroot: Path, *overrides: str) -> None:
    model = [f"sft.dataset.kwargs.seed={seed}"] if "sft=null" not in overrides else []
    seeded = (f"seed={seed}", f"train_dataset.kwargs.seed={seed}", *model)
    command = ("run", f"recipes/{recipe}.yaml", f"cluster.fileroot={fileroot}")
    said_by(areal_hpc(*command, *seeded, *overrides, timeout_s=1700))


def train(name: str, recipe: str, seed: int, fileroot: Path, *overrides: str) -> dict[str, Any]:
    """Run a recipe to its end, judged on many tasks, and keep its results by this name."""
    began = time.monotonic()
    judged = (f"valid_dataset.kwargs.size={HELD_OUT_TASKS}", f"evaluation.tasks={HELD_OUT_TASKS}")
    run_recipe(recipe, seed, fileroot, *judged, *overrides)
    wall_s = time.monotonic() - began
    (metrics,) = fileroot.glob("quickstart/*/metrics.jsonl")
    said_by(areal_hpc("status", metrics.parent))  # exits with 1 for an alert that is a failure
    failures = [event for event in events_of(RunPaths(metrics.parent), "alert")
                if event["level"] == "failure"]  # fmt: skip
    assert failures == []
    rows = read_readable_records(metrics)
    evaluated = {row["step"]: row["eval/reward"] for row in rows if "eval/reward" in row}
    trained = [row for row in rows if "reward/mean" in row]
    run = {
        "wall_s": round(wall_s, 1),
        "eval_reward": {str(step): reward for step, reward in evaluated.items()},
        "start": evaluated[0],
        "end": evaluated[rows[-1]["step"]],
        "sets": {name: [rows[0][name], rows[-1][name]] for name in list_set_metrics(rows[0])},
        "engine_trainer_max_abs_diff": max(row[LOGPROB_GAP] for row in trained),
        "compared_tokens": sum(row["logprob/compared_tokens"] for row in trained),
        "sampled_tokens": sum(row["tokens/sampled"] for row in trained),
        "staleness_max": max(row["staleness/max"] for row in trained),
        "stale_tickets": sum(row["tickets/stale_trained"] for row in trained),
        "replies_over_two_versions": sum(row["staleness/mixed_version_rows"] for row in trained),
        "step_s": round(sum(row["time/step_s"] for row in trained) / len(trained), 2),
    }
    add_results("quickstart", **{f"{name} seed {seed}": run})
    return run


def list_set_metrics(row: dict[str, Any]) -> list[str]:
    """Metrics of the evaluation sets of a row, without their intervals."""
    return [
        name
        for name in row
        if name.startswith(EVALUATION_METRIC_PREFIX) and not name.endswith(INTERVAL_BOUND_SUFFIXES)
    ]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_quick_start_learns(seed: int, tmp_path: Path) -> None:
    run = train("synchronous", "quickstart", seed, tmp_path)
    assert run["start"] <= 0.45
    assert run["end"] >= 0.80
    assert run["engine_trainer_max_abs_diff"] <= 1e-4
    assert run["compared_tokens"] == run["sampled_tokens"]
    sets = {name.removeprefix(EVALUATION_METRIC_PREFIX): ends for name, ends in run["sets"].items()}
    assert sets.keys() == {"valid/avg@1", "longer/avg@1", "sampled/avg@8", "sampled/pass@8"}
    for name in ("valid/avg@1", "sampled/avg@8"):
        assert sets[name][0] < 0.6 < 0.8 < sets[name][1], name
    before, after = sets["sampled/pass@8"]
    assert 0.6 < before <= after, "the skill is there before: docs of the quick start say so"


def test_the_asynchronous_quick_start_learns_from_replies_of_mixed_versions(
    tmp_path: Path,
) -> None:
    run = train("asynchronous", "variants/async", 1, tmp_path)
    assert run["end"] >= 0.80
    assert run["engine_trainer_max_abs_diff"] <= 1e-4
    assert run["replies_over_two_versions"] > 0


@pytest.mark.parametrize("seed", SEEDS)
def test_the_quick_start_learns_with_a_critic(seed: int, tmp_path: Path) -> None:
    run = train("ppo", "variants/ppo", seed, tmp_path)
    assert run["start"] <= 0.45
    assert run["end"] >= 0.95
    assert run["compared_tokens"] == run["sampled_tokens"]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_quick_start_learns_from_a_teacher_alone(
    seed: int, half_way: Callable[[int], RunPaths], tmp_path: Path
) -> None:
    """No advantage comes from a reward: `trainer.objective.min_reward_std` of the recipe."""
    paths = half_way(seed)
    teacher = paths.export_dir(format_step_dir(HALF_WAY))
    models = f"model.path={paths.sft_export}", f"trainer.objective.teacher.path={teacher}"
    run = train("opd", "variants/opd", seed, tmp_path, "sft=null", *models)
    assert run["start"] <= 0.45
    assert run["end"] >= 0.95


def test_supervised_fine_tuning_alone_learns_in_a_run_that_is_judged_by_rewards(
    tmp_path: Path,
) -> None:
    said_by(areal_hpc("run", "recipes/cpu_sft.yaml", f"cluster.fileroot={tmp_path}", timeout_s=900))
    run = tmp_path / "quickstart" / "sft"
    judged = (f"valid_dataset.kwargs.size={HELD_OUT_TASKS}", f"evaluation.tasks={HELD_OUT_TASKS}")
    said_by(areal_hpc("eval", run, *judged, timeout_s=900))
    (report,) = RunPaths(run).eval_command_runs_dir.glob("*/*/evaluation_report.json")
    reward = read_report(report).sets["valid"].metrics["avg@1"].value
    rows = read_readable_records(RunPaths(run).sft_metrics)
    losses = [row["eval/loss"] for row in rows if "eval/loss" in row]
    write_results("sft_alone", {"held_out_reward": reward, "held_out_losses": losses})
    assert reward >= 0.90
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", AGES)
def test_old_tokens_are_learnt_from(
    name: str, half_way: Callable[[int], RunPaths], tmp_path: Path
) -> None:
    bound, settings = AGES[name]
    for seed in SEEDS:
        model = started_from(half_way(seed).sft_export)
        bounded = (f"rollout.max_head_offpolicyness={bound}", *SMALL_BATCHES)
        words = (*model, *bounded, *settings)
        run = train(name, "quickstart", seed, tmp_path / str(seed), *words)
        assert run["staleness_max"] >= bound, "all that the bound allows was in use"
        assert bound == run["staleness_max"] or run["stale_tickets"] > 0, "and no more, uncounted"
        assert bound > 0 or run["staleness_max"] == 0
        assert run["end"] > run["start"]
    measured = read_results("quickstart", {})
    fresh, old = (
        statistics.mean(measured[f"{kind} seed {seed}"]["end"] for seed in SEEDS)
        for kind in (next(iter(AGES)), name)
    )
    assert abs(old - fresh) <= MOST_DIFFERENCE
