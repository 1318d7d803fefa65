"""Training while agents wait for their tools: asynchronous against synchronous, whole runs.

Both sides are `areal-hpc run benchmarks/async.yaml` on the same machine with the same slots, tasks
and model; they differ in `rollout.max_head_offpolicyness` alone. A side's rate is that of trained
tokens between two publications, after the start and before the end, over whole blocks of tasks.

The workload's own limit is what its slots can do: slots x tokens an episode / seconds an episode
takes, of the side whose episodes are quicker (synchronous ones all want the CPU at once). Batches
end amid episodes, so a side without an idle slot is within a few hundredths of it. Without tools
both sides are bound by the CPU, and the limit is that of overlapping what one side does in turn.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from areal_hpc.errors import ClusterError
from areal_hpc.rundir.jsonl import read_readable_records
from areal_hpc.rundir.paths import RunPaths
from benchmarks._pairs import RESULTS, add_out, report

matplotlib.use("Agg")

RECIPE = Path(__file__).with_suffix(".yaml")
SLOTS = 64
BOUND = 4
RUN_IN_STEPS = BOUND + 1
"""The first batches of an asynchronous run are those of the shortest episodes."""


@dataclass(frozen=True)
class Side:
    """One run, measured from outside."""

    name: str
    first: int
    """Measured from the publication of this step..."""
    last: int
    """...to that of this one."""
    published_at: dict[int, float]
    """Times of publication by step."""
    steps: dict[int, dict[str, Any]]
    """Metrics by step."""
    episodes: list[dict[str, float]]
    """`began`, `ended`, `tool_s`."""

    @property
    def span(self) -> tuple[float, float]:
        """Beginning and end of the measured time."""
        return self.published_at[self.first], self.published_at[self.last]

    @property
    def tokens(self) -> float:
        """Tokens trained during the measured time."""
        return float(sum(row["tokens/trained"] for row in self._measured))

    @property
    def tokens_per_s(self) -> float:
        began, ended = self.span
        return self.tokens / (ended - began)

    @property
    def _measured(self) -> list[dict[str, Any]]:
        return [self.steps[step] for step in range(self.first + 1, self.last + 1)]

    def mean(self, metric: str) -> float:
        """Average a metric over the measured steps."""
        return float(statistics.mean(row.get(metric, 0.0) for row in self._measured))

    @property
    def episode_s(self) -> float:
        """Mean length of the episodes that ended in the measured time."""
        began, ended = self.span
        lengths = [
            row["ended"] - row["began"] for row in self.episodes if began <= row["ended"] <= ended
        ]
        return statistics.mean(lengths)

    @property
    def tokens_an_episode(self) -> float:
        """Mean trained tokens of an episode."""
        return float(self.tokens / sum(row["episodes"] for row in self._measured))

    @property
    def tool_share(self) -> float:
        """Share of tools in the time of all episodes."""
        whole = sum(episode["ended"] - episode["began"] for episode in self.episodes)
        return sum(episode["tool_s"] for episode in self.episodes) / whole

    @property
    def busy_share(self) -> float:
        """Share of slots in use over the measured time."""
        began, ended = self.span
        busy_s = sum(
            max(0.0, min(ended, row["ended"]) - max(began, row["began"])) for row in self.episodes
        )
        return busy_s / (SLOTS * (ended - began))


def play(name: str, folder: Path, bound: int, first: int, last: int, tool_s: float) -> Side:
    """Run the workload until `RUN_IN_STEPS` steps after `last`."""
    log = folder / f"{name}.episodes.jsonl"
    overrides = {
        "cluster.fileroot": folder,
        "trial_name": name,
        "rollout.max_head_offpolicyness": bound,
        "rollout.workflow_kwargs.log": log,
        "train_dataset.kwargs.median_tool_s": tool_s,
        "trainer.total_steps": last + (RUN_IN_STEPS if bound else 0),
    }
    command = [sys.executable, "-m", "areal_hpc", "run", str(RECIPE)]
    command += [f"{key}={value}" for key, value in overrides.items()]
    print(f"{name}: {overrides['trainer.total_steps']} steps...", flush=True)
    answer = subprocess.run(command, capture_output=True, text=True, cwd=RECIPE.parents[1])
    if answer.returncode:
        raise ClusterError(f"{name} failed: {answer.stdout[-2000:]}\n{answer.stderr[-2000:]}")
    paths = RunPaths(folder / "async" / name)
    published = [
        row for row in read_readable_records(paths.events) if row["event"] == "weights_published"
    ]
    return Side(
        name,
        first,
        last,
        {int(row["version"].split(".")[1]): row["time"] for row in reversed(published)},
        {row["step"]: row for row in read_readable_records(paths.metrics)},
        read_readable_records(log),
    )


def draw(sides: Sequence[Side], out: Path) -> None:
    """Draw slots in use and the trainer at work over time, a panel a side."""
    figure = Figure(figsize=(9.0, 2.6 * len(sides)), dpi=130, layout="constrained")
    for axes, side in zip(figure.subplots(len(sides), 1, squeeze=False)[:, 0], sides, strict=True):
        _draw_side(axes, side)
    figure.savefig(out)


def _draw_side(axes: Axes, side: Side) -> None:
    start, end = side.span
    changes = sorted(
        [(row["began"], 1) for row in side.episodes] + [(row["ended"], -1) for row in side.episodes]
    )
    times, busy, count = [start], [0], 0
    for at, change in changes:
        count += change
        if start <= at <= end:
            times.append(at)
            busy.append(count)
    busy[0] = busy[1]
    axes.fill_between(
        [at - start for at in times], busy, step="post", color="#8aa4c8", label="slots in use"
    )
    for step in range(side.first + 1, side.last + 1):
        row = side.steps[step]
        ended = side.published_at[step] - row.get("time/publish_s", 0.0) - start
        work = [(ended - row["time/train_s"], row["time/train_s"])]
        axes.broken_barh(
            work, (-7, 5), color="#c0392b", label="trainer" if step == side.last else None
        )
    axes.set_ylim(-9, SLOTS + 2)
    axes.set_xlim(0, end - start)
    axes.set_ylabel("slots")
    axes.set_title(
        f"{side.name}: {side.tokens_per_s:.0f} trained tokens/s, slots {side.busy_share:.0%} busy",
        loc="left",
    )
    axes.legend(loc="upper right", frameon=False, ncols=2)
    axes.set_xlabel("seconds")


def print_sides(sides: Sequence[Side]) -> None:
    """Print the measurements of each side."""
    print(
        f"\n{'':<24}{'tokens/s':>10}{'steps':>7}{'s/step':>8}{'slots busy':>12}{'tools':>7}"
        f"{'episode s':>11}{'train s':>9}{'publish s':>11}{'staleness':>11}"
    )
    for side in sides:
        began, ended = side.span
        steps = side.last - side.first
        print(
            f"{side.name:<24}{side.tokens_per_s:>10.1f}{steps:>7}{(ended - began) / steps:>8.1f}"
            f"{side.busy_share:>12.0%}{side.tool_share:>7.0%}{side.episode_s:>11.2f}"
            f"{side.mean('time/train_s'):>9.2f}{side.mean('time/publish_s'):>11.2f}"
            f"{side.mean('staleness/mean'):>11.2f}"
        )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="areal-hpc bench async", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--blocks", type=int, default=1, help="of 4 batches, measured synchronously"
    )
    parser.add_argument("--median-tool-s", type=float, default=4.0, help="of an episode's tools")
    add_out(parser, "async")
    arguments = parser.parse_args(argv)
    steps, tool_s = 4 * arguments.blocks, arguments.median_tool_s
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        folder = Path(name)
        sync = play("synchronous", folder, 0, 1, 1 + steps, tool_s)
        later = RUN_IN_STEPS + 3 * steps
        asyn = play("asynchronous", folder, BOUND, RUN_IN_STEPS, later, tool_s)
        bare_sync = play("synchronous-no-tools", folder, 0, 1, 1 + 4 * steps, 0.0)
        bare = play("asynchronous-no-tools", folder, BOUND, RUN_IN_STEPS, later + steps, 0.0)
    sides = (sync, asyn, bare_sync, bare)
    print_sides(sides)
    picture = RESULTS.parent / "results" / f"{arguments.out.stem}.png"
    draw((sync, asyn), picture)
    quicker = min(sync, asyn, key=lambda side: side.episode_s)
    limit_tokens_per_s = SLOTS * quicker.tokens_an_episode / quicker.episode_s
    alone_s = bare_sync.mean("time/batch_wait_s"), bare_sync.mean("time/train_s")
    figures = {
        "async_over_sync": asyn.tokens_per_s / sync.tokens_per_s,
        "async_over_limit": asyn.tokens_per_s / limit_tokens_per_s,
        "limit_over_sync": limit_tokens_per_s / sync.tokens_per_s,
        "tool_share": sync.tool_share,
        "sync_tokens_per_s": sync.tokens_per_s,
        "async_tokens_per_s": asyn.tokens_per_s,
        "no_tools_async_over_sync": bare.tokens_per_s / bare_sync.tokens_per_s,
        "no_tools_limit_over_sync": sum(alone_s) / max(alone_s),
    }
    settings = {
        "recipe": json.dumps(str(RECIPE.relative_to(RECIPE.parents[1]))),
        "median_tool_s": tool_s,
        "slots": SLOTS,
        "bound": BOUND,
        "measured_steps": {side.name: side.last - side.first for side in sides},
    }
    report(figures, settings, arguments.out)


if __name__ == "__main__":
    main()
