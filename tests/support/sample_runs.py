"""The sample runs of examples/sample_runs, made up: one is slow, one drops, one collapses.

`python -m tests.support.sample_runs FOLDER` makes them anew below a folder, and
`python -m tests.support.sample_runs` the archive of the checkout.
"""

import random
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.environments import CHECKOUT
from tests.support.made_run import SAMPLES, MadeEpisode, MadeRun

ARCHIVE = CHECKOUT / "examples" / "sample_runs.tar.xz"
GROUPS = 4
STEPS = 40
SWITCH_STEP, COLLAPSE_STEP = 30, 22
WORDS = ("so", "first", "add", "the", "tens", "then", "ones", "carry", "check", "sum")


def make_sample_runs(root: Path) -> list[MadeRun]:
    """All three below a file root."""
    return [make_slow_run(root), make_dropping_run(root), make_collapsing_run(root)]


def make_slow_run(root: Path) -> MadeRun:
    """Cell 1's replica generates at a third of the other's speed."""
    rng = random.Random(1)
    run = _start(root, "slow")
    for step in range(1, STEPS + 1):
        episodes = list(_play(rng, _draw(rng, 200), 0.35 + step / 100))
        slow = [
            replace(one, call_s=3.2 * one.call_s) if one.cell == "cell-1" else one
            for one in episodes
        ]
        _add_step(run, rng, slow, entropy=0.6 - step / 200, idle_s=4.0)
    run.finish()
    return run


def make_dropping_run(root: Path) -> MadeRun:
    """A curriculum goes on to harder tasks at step 30."""
    rng = random.Random(2)
    run = _start(root, "drop")
    run.paths.data_dir.mkdir()
    run.paths.train_source_sizes.write_text("[200, 200]")
    for step in range(1, STEPS + 1):
        is_hard = step >= SWITCH_STEP
        tasks = _draw(rng, 200, first=200 if is_hard else 0)
        skill = 0.12 + (step - SWITCH_STEP) / 100 if is_hard else 0.4 + step / 100
        episodes = list(_play(rng, tasks, skill, size=70 if is_hard else 40))
        _add_step(run, rng, episodes, entropy=0.75 if is_hard else 0.55)
    run.finish()
    return run


def make_collapsing_run(root: Path) -> MadeRun:
    """From step 22 on replies become one loop, whatever the task."""
    rng = random.Random(3)
    run = _start(root, "collapse")
    for step in range(1, STEPS + 1):
        lost = min(1.0, max(0.0, (step - COLLAPSE_STEP) / 8))
        episodes = list(_play(rng, _draw(rng, 200), (0.4 + step / 100) * (1 - lost)))
        looping = [
            replace(one, reply=(7,) * 24, text="the sum the sum " * 20, finish="length")
            if rng.random() < lost
            else one
            for one in episodes
        ]
        entropy = 0.6 * (1 - lost) + 0.03
        _add_step(run, rng, looping, entropy=entropy, repeated=0.03 + 0.8 * lost)
    run.finish()
    return run


def _start(root: Path, name: str) -> MadeRun:
    rollout = {"max_head_offpolicyness": 0, "max_concurrent_rollouts": 16, "n_samples": SAMPLES}
    trainer = {"total_steps": STEPS, "batch_size": GROUPS, "checkpoint_every_steps": 10}
    return MadeRun(root, name, rollout=rollout, trainer=trainer)


def _draw(rng: random.Random, count: int, first: int = 0) -> list[int]:
    """Tasks of a batch, from so many lines of the set."""
    return [first + rng.randrange(count) for _ in range(GROUPS)]


def _play(
    rng: random.Random, tasks: list[int], skill: float, size: int = 40
) -> Iterator[MadeEpisode]:
    """Episodes of a batch: a calculator is asked, then the sum is said."""
    for number, task in enumerate(tasks):
        left, right = 11 + task, 7 * task % 89 + 10
        for _ in range(SAMPLES):
            is_right = rng.random() < skill
            said = left + right + (0 if is_right else rng.randrange(1, 9))
            yield MadeEpisode(
                cell=f"cell-{number % 2}",
                call_s=rng.uniform(0.8, 1.2) * size / 40,
                call_tokens=round(size * rng.uniform(0.8, 1.2)),
                tool="calculator",
                tool_s=rng.uniform(0.1, 0.2),
                reward=float(is_right),
                task=task,
                reply=tuple(rng.randrange(10, 300) for _ in range(24)),
                question=f"What is {left} + {right}?",
                text=f"{' '.join(rng.choices(WORDS, k=8))}. Answer: {said}",
            )


def _add_step(
    run: MadeRun,
    rng: random.Random,
    episodes: list[MadeEpisode],
    *,
    entropy: float,
    repeated: float = 0.03,
    idle_s: float = 1.0,
) -> None:
    groups = [episodes[first : first + SAMPLES] for first in range(0, len(episodes), SAMPLES)]
    rewards = [{one.reward for one in group} for group in groups]
    sampled = [one.call_tokens for one in episodes]
    metrics: dict[str, Any] = {
        "entropy__mean": entropy * rng.uniform(0.97, 1.03),
        "reply__repeated_fraction": repeated,
        "reply__tokens_mean": sum(sampled) / len(sampled),
        "reply__cut_fraction": sum(one.finish == "length" for one in episodes) / len(episodes),
        "groups__zero_variance": sum(len(one) == 1 for one in rewards) / len(groups),
        "groups__all_best": sum(one == {1.0} for one in rewards) / len(groups),
        "groups__all_worst": sum(one == {0.0} for one in rewards) / len(groups),
        "staleness__mean": 0.0,
        "staleness__max": 0,
        "tokens__sampled": 2 * sum(sampled),
        "tokens__trained": 3 * sum(sampled),
        "logprob__engine_trainer_mean_abs_diff": 0.004 * rng.uniform(0.8, 1.2),
        "logprob__engine_trainer_max_abs_diff": 0.03,
        "logprob__compared_tokens": 2 * sum(sampled),
        "grad_norm": rng.uniform(0.2, 0.4),
        "cells__idle_s": idle_s,
    }
    run.add_step(episodes, {"train": 1.2, "publish": rng.uniform(0.2, 0.3)}, **metrics)
    for cell in ("cell-0", "cell-1"):
        pause_s = rng.uniform(0.2, 0.25)
        run.add_event(cell, "replica_resumed", replica=0, pause_s=round(pause_s, 3))


def write_archive() -> None:
    """Make the archive of the checkout anew."""
    with tempfile.TemporaryDirectory() as folder:
        make_sample_runs(Path(folder))
        with tarfile.open(ARCHIVE, "w:xz") as archive:
            archive.add(Path(folder) / "made", "sample_runs")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        make_sample_runs(Path(sys.argv[1]))
    else:
        write_archive()
