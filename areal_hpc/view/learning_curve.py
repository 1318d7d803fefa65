"""Plot of the learning curve."""

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from areal_hpc.metrics.step_line import get_mean_reply_tokens
from areal_hpc.view.state.run_state import RunSnapshot

matplotlib.use("Agg")


def plot_learning_curve(snapshot: RunSnapshot, title: str, out: Path) -> None:
    draw_learning_curve(snapshot, title).savefig(out)


def draw_learning_curve(snapshot: RunSnapshot, title: str) -> Figure:
    """A figure of training and held-out reward over steps, with the reply length below."""
    trained = [row for row in snapshot.steps if row.get("reward/mean") is not None]
    figure = Figure(figsize=(7.0, 4.6), dpi=150, layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [3, 1]})
    upper.plot(
        [row["step"] - 1 for row in trained],
        [row["reward/mean"] for row in trained],
        color="#8aa4c8",
        linewidth=1.5,
        label="training batch (sampled)",
    )
    upper.plot(
        [step for step, _ in snapshot.evaluations],
        [reward for _, reward in snapshot.evaluations],
        color="#c0392b",
        marker="o",
        linewidth=2,
        label="held-out tasks",
    )
    for step, reward in snapshot.evaluations:
        upper.annotate(
            f"{reward:.2f}", (step, reward), textcoords="offset points", xytext=(0, 7), ha="center"
        )
    rewards = [0.0, 1.0, *(row["reward/mean"] for row in trained)]
    rewards += [reward for _, reward in snapshot.evaluations]
    upper.set_ylim(min(rewards) * 1.12, max(rewards) * 1.12)
    upper.set_ylabel("mean reward")
    upper.set_title(title)
    upper.grid(alpha=0.25)
    upper.legend(loc="lower right", frameon=False)
    lengths = [
        (row["step"] - 1, length)
        for row in trained
        if (length := get_mean_reply_tokens(row)) is not None
    ]
    lower.plot([step for step, _ in lengths], [length for _, length in lengths], color="#4a7a5c")
    knows_replies = any("reply/tokens_mean" in row for row in trained)
    lower.set_ylabel(f"tokens\nper {'reply' if knows_replies else 'episode'}")
    lower.set_xlabel("optimizer steps taken")
    lower.grid(alpha=0.25)
    lower.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure
