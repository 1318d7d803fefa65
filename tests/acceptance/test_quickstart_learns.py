"""The shipped recipes learn, and old tokens do no harm, on the real stack with three seeds.

Every run is judged on 1,024 held-out tasks. Runs that compare ages of tokens start from the same
SFT model, one a seed, and get their rewards late, so that all a bound allows is in use. Writes
`benchmarks/results/quickstart.json` and the tables of `docs/learning.md`.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.evaluation.set_names import EVALUATION_METRIC_PREFIX, INTERVAL_BOUND_SUFFIXES
from areal_hpc.rundir.jsonl import read_readable_records
from areal_hpc.rundir.paths import RunPaths, format_step_dir
from tests.support.commands import areal_hpc, said_by
from tests.support.environments import CHECKOUT
from tests.support.results import markdown, read_results, write_results
from tests.support.run_files import events_of
from tests.support.small_run import started_from

TABLE = CHECKOUT / "docs" / "learning.md"
SEEDS = (1, 2, 3)
HELD_OUT_TASKS = 1024
LOGPROB_GAP = "logprob/engine_trainer_max_abs_diff"
NORMAL_975 = 1.960
STUDENT_975_OF_2 = 4.303
"""Two degrees of freedom: three seeds."""

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
"""With all that the bound admits in flight."""
LATE = (
    "rollout.workflow=tests.support.slow_agent.LateAgent",
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
FRESH, OLD, DECOUPLED, NAIVE_RUN = AGES
LEARNS = f"""# Does the quick start learn?

Held-out reward (greedy, {HELD_OUT_TASKS:,} tasks that no training saw) before and after 25 steps of
reinforcement learning, on two CPU cores. `ppo` is `recipes/variants/ppo.yaml`, with a critic;
`opd` is `recipes/variants/opd.yaml`, {HALF_WAY} steps with a teacher and without a reward.
`make acceptance` measures it and writes this page.
Brackets: 95 % intervals, Wilson's for a run, Student's for means over the three seeds.

{{runs}}

{{mean}}
"""
AGES_MATTER = """
## And from old tokens?

The same warmed-up models and seeds, and batches of 8 tasks. `late`: rewards come 10 s after the
reply, and by then the weights are as many steps on as the bound allows. `naive` is PPO with ratios
to the policy that sampled (`proximal=none off_policy_correction=none`), all others have the default
objective ([objectives](objectives.md)).

{runs}

{old}
{naive}
"""
"""The two parts of the page."""


@pytest.fixture(scope="module")
def results() -> Iterator[dict[str, Any]]:
    """What was measured, by name of the run; written out at the end."""
    measured: dict[str, Any] = read_results("quickstart", {})
    yield measured
    found = {
        "synchronous mean": ends_of(measured, "synchronous"),
        "old minus fresh": differences_of(measured, OLD, FRESH),
        "decoupled minus naive": differences_of(measured, DECOUPLED, NAIVE_RUN),
    }
    measured |= {name: mean_of(values) for name, values in found.items() if values}
    write_results("quickstart", dict(sorted(measured.items())))
    TABLE.write_text(page_of(measured))


@pytest.fixture(scope="module")
def half_way(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], RunPaths]:
    """A seed's quick start of ten steps, made on first use."""
    fileroot = tmp_path_factory.mktemp("half_way")

    def run(seed: int) -> RunPaths:
        if not (fileroot / str(seed)).exists():
            run_recipe("quickstart", seed, fileroot / str(seed), f"trainer.total_steps={HALF_WAY}")
        return RunPaths(fileroot / str(seed) / "quickstart" / "demo")

    return run


@pytest.fixture(scope="module")
def warmed_up(half_way: Callable[[int], RunPaths]) -> Callable[[int], Path]:
    """The model that a seed's reinforcement learning begins with."""
    return lambda seed: half_way(seed).sft_export


def ends_of(measured: dict[str, Any], name: str) -> list[float]:
    """Held-out rewards at the end of a kind of run, seed by seed; empty if one is missing."""
    runs = [measured.get(f"{name} seed {seed}") for seed in SEEDS]
    return [run["end"] for run in runs if run] if all(runs) else []


def differences_of(measured: dict[str, Any], name: str, other: str) -> list[float]:
    """Of two kinds of run, seed by seed; empty if one is missing."""
    pairs = zip(ends_of(measured, name), ends_of(measured, other), strict=False)
    return [one - another for one, another in pairs]


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
    return {"mean": round(mean, 4), "interval": [round(mean - half, 4), round(mean + half, 4)]}


def page_of(measured: dict[str, Any]) -> str:
    """docs/learning.md."""
    page = LEARNS.format(
        runs=rows_of(measured, ("synchronous seed", "asynchronous seed", "ppo seed", "opd seed")),
        mean=said_of(measured, "synchronous mean", "Mean of the synchronous seeds"),
    )
    if not ends_of(measured, FRESH):
        return page
    bound = f"Bound {BOUND} minus bound 0, seed by seed"
    return page + AGES_MATTER.format(
        runs=rows_of(measured, ("small batches",)),
        old=said_of(measured, "old minus fresh", bound),
        naive=said_of(measured, "decoupled minus naive", "Decoupled minus naive, seed by seed"),
    )


def rows_of(measured: dict[str, Any], kinds: tuple[str, ...]) -> str:
    """A table of the runs whose names begin so."""
    header = "run, before, half-way, after, staleness, engine-trainer difference, tokens"
    rows = []
    for name, run in sorted(measured.items()):
        if not name.startswith(kinds):
            continue
        low, high = run["end_interval"]
        rewards = {int(step): reward for step, reward in run["eval_reward"].items()}
        after = f"{run['end']:.3f} [{low:.3f}, {high:.3f}]"
        figures = f"{run['engine_trainer_max_abs_diff']:.1e}", f"{run['sampled_tokens']:,}"
        before = f"{run['start']:.3f}", f"{rewards[HALF_WAY]:.3f}"
        rows.append((name, *before, after, f"{run['staleness_max']} at most", *figures))
    return markdown(header.split(", "), rows)


def said_of(measured: dict[str, Any], name: str, title: str) -> str:
    """A mean over the seeds as a sentence."""
    if name not in measured:
        return f"{title}: not measured."
    low, high = measured[name]["interval"]
    return f"{title}: {measured[name]['mean']:.3f} [{low:.3f}, {high:.3f}]."


def run_recipe(recipe: str, seed: int, fileroot: Path, *overrides: str) -> None:
    """Run a recipe to its end, its tasks and its demonstrations drawn with `seed`."""
    model = [f"sft.dataset.kwargs.seed={seed}"] if "sft=null" not in overrides else []
    seeded = (f"seed={seed}", f"train_dataset.kwargs.seed={seed}", *model)
    command = ("run", f"recipes/{recipe}.yaml", f"cluster.fileroot={fileroot}")
    said_by(areal_hpc(*command, *seeded, *overrides, timeout_s=1700))


def train(recipe: str, seed: int, fileroot: Path, *overrides: str) -> dict[str, Any]:
    """Run a recipe to its end, judged on many tasks; what it came to."""
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
    return {
        "wall_s": round(wall_s, 1),
        "eval_reward": evaluated,
        "start": evaluated[0],
        "end": evaluated[rows[-1]["step"]],
        "sets": {name: [rows[0][name], rows[-1][name]] for name in list_set_metrics(rows[0])},
        "end_interval": interval_of(evaluated[rows[-1]["step"]], HELD_OUT_TASKS),
        "engine_trainer_max_abs_diff": max(row[LOGPROB_GAP] for row in trained),
        "compared_tokens": sum(row["logprob/compared_tokens"] for row in trained),
        "sampled_tokens": sum(row["tokens/sampled"] for row in trained),
        "staleness_max": max(row["staleness/max"] for row in trained),
        "stale_tickets": sum(row["tickets/stale_trained"] for row in trained),
        "replies_over_two_versions": sum(row["staleness/mixed_version_rows"] for row in trained),
        "step_s": round(sum(row["time/step_s"] for row in trained) / len(trained), 2),
    }


def list_set_metrics(row: dict[str, Any]) -> list[str]:
    """Metrics of the evaluation sets of a row, without their intervals."""
    return [
        one
        for one in row
        if one.startswith(EVALUATION_METRIC_PREFIX) and not one.endswith(INTERVAL_BOUND_SUFFIXES)
    ]


def train_from(model: Path, seed: int, fileroot: Path, bound: int, *overrides: str) -> Any:
    """The quick start with small batches and a bound, from a model that is warmed up."""
    bounded = (f"rollout.max_head_offpolicyness={bound}", *SMALL_BATCHES)
    return train("quickstart", seed, fileroot, *started_from(model), *bounded, *overrides)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_quick_start_learns(seed: int, results: dict[str, Any], tmp_path: Path) -> None:
    run = results[f"synchronous seed {seed}"] = train("quickstart", seed, tmp_path)
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
    results: dict[str, Any], tmp_path: Path
) -> None:
    run = results["asynchronous seed 1"] = train("variants/async", 1, tmp_path)
    assert run["end"] >= 0.80
    assert run["engine_trainer_max_abs_diff"] <= 1e-4
    assert run["replies_over_two_versions"] > 0


@pytest.mark.parametrize("seed", SEEDS)
def test_the_quick_start_learns_with_a_critic(
    seed: int, results: dict[str, Any], tmp_path: Path
) -> None:
    run = results[f"ppo seed {seed}"] = train("variants/ppo", seed, tmp_path)
    assert run["start"] <= 0.45
    assert run["end"] >= 0.95
    assert run["compared_tokens"] == run["sampled_tokens"]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_quick_start_learns_from_a_teacher_alone(
    seed: int, results: dict[str, Any], half_way: Callable[[int], RunPaths], tmp_path: Path
) -> None:
    """No advantage comes from a reward: `trainer.objective.min_reward_std` of the recipe."""
    paths = half_way(seed)
    teacher = paths.export_dir(format_step_dir(HALF_WAY))
    models = f"model.path={paths.sft_export}", f"trainer.objective.teacher.path={teacher}"
    run = results[f"opd seed {seed}"] = train("variants/opd", seed, tmp_path, "sft=null", *models)
    assert run["start"] <= 0.45
    assert run["end"] >= 0.95


@pytest.mark.parametrize("name", AGES)
def test_old_tokens_are_learnt_from(
    name: str, results: dict[str, Any], warmed_up: Callable[[int], Path], tmp_path: Path
) -> None:
    bound, settings = AGES[name]
    for seed in SEEDS:
        run = train_from(warmed_up(seed), seed, tmp_path / str(seed), bound, *settings)
        results[f"{name} seed {seed}"] = run
        assert run["staleness_max"] >= bound, "all that the bound allows was in use"
        assert bound == run["staleness_max"] or run["stale_tickets"] > 0, "and no more, uncounted"
        assert bound > 0 or run["staleness_max"] == 0
        assert run["end"] > run["start"]
    if differences := differences_of(results, OLD, FRESH):
        assert abs(mean_of(differences)["mean"]) <= MOST_DIFFERENCE
