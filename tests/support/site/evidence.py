"""Tables of what tests measured, from benchmarks/results."""

import itertools
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tests.support.results import markdown, matrix, read_results

Row = Mapping[str, Any]
NOT_THERE = "not there, or refused"
SLURM_EVENTS = {
    "preempted in a collective": "the trainer is preempted while a rank is inside a collective",
    "preempted in a save": "the trainer is preempted while it saves a checkpoint",
    "requeued": "`scontrol requeue` of the trainer",
    "time limit": "the trainer meets its time limit",
    "cell preempted": "a cell is preempted",
    "slurmd killed": "`kill -9` of the slurmd below a cell",
    "node down": "a cell's node is set down",
    "out of memory": "an agent takes all memory of its cell",
    "node lost": "a cell's node is lost, with the journal on it",
    "cell cancelled": "`scancel` of a cell's job",
    "evaluation preempted": "the evaluation job is preempted in an evaluation",
    "cancelled": "`areal-hpc cancel`",
    "resumed": "`areal-hpc resume`, after that",
}


def render_kills() -> str:
    return matrix("killed", read_results("kill_matrix", {}))


def render_soak() -> str:
    parts = read_results("soak", {})["parts"]
    lost_s: dict[str, list[float]] = defaultdict(list)
    for part in parts:
        for role, seconds in part["seconds_lost"].items():
            lost_s[f"`{role}`"] += seconds
    lost_s = dict(sorted(lost_s.items())) | {"all": list(itertools.chain(*lost_s.values()))}
    rows = {
        role: {
            "times": len(seconds),
            "median seconds lost": f"{statistics.median(seconds):.1f}",
            "most seconds lost": f"{max(seconds):.1f}",
        }
        for role, seconds in lost_s.items()
    }
    trained, lost, twice = (
        sum(int(re.findall(rf"{name}=(\d+)", part["audit"])[0]) for part in parts)
        for name in ("trained_once", "lost", "duplicates")
    )
    steps, launches = (sum(part[name] for part in parts) for name in ("steps", "launches"))
    return (
        f"{len(lost_s['all'])} kills in {len(parts)} parts, {steps} steps; the command was "
        f"given {launches} times: {trained} tickets trained once, {lost} lost, {twice} trained "
        f"twice.\n\n{matrix('killed', rows)}"
    )


def render_rank_kills() -> str:
    rows = [
        (point, f"{statistics.median(seconds):g}", f"{min(seconds):g} to {max(seconds):g}")
        for point, seconds in read_results("rank_kill", {}).items()
        if not point.startswith("before")
    ]
    header = ("ranks start again", "median seconds to the next step", "from the least to the most")
    return markdown(header, rows)


def render_slurm_events() -> str:
    measured = read_results("slurm_events", {})
    events, start, learning = (measured[part] for part in ("events", "start", "learning"))
    rows = [
        (text, *describe_slurm_event(events[name]))
        for name, text in SLURM_EVENTS.items()
        if name in events
    ]
    lines = [markdown(("event", "`status`", "what happened", "`open`", "recovery"), rows)]
    if start:
        lines += ["", f"From `areal-hpc submit` to the first trained step: {start['total']:.0f} s."]
    if learning:
        lines += [
            "",
            f"The quick start on Slurm: held-out reward {learning['start']:.3f} before, "
            f"{learning['end']:.3f} after 25 steps, {learning['wall_s'] / 60:.0f} minutes; "
            f"audit {learning['audit']}.",
        ]
    return "\n".join(lines)


def describe_slurm_event(event: Row) -> tuple[str, ...]:
    """Describe the output of commands at an event, and the time until all was as before."""
    (still_open,) = re.findall(r"duplicates=0 lost=0 open=(\d+)", event["audit"])
    parts = [f"restart {event['restarts']}"] if "restarts" in event else []
    for key, unit in (("steps_lost", "lost"), ("steps_meanwhile", "trained meanwhile")):
        if key in event:
            parts.append(f"{event[key]} step{'s' * (event[key] != 1)} {unit}")
    recovery = "goes on without it"
    if event["recovery_s"] is not None:
        recovery = f"{event['recovery_s']:.0f} s"
    if "first_step_s" in event:
        recovery += f"; first step {event['first_step_s']:.0f} s after the process began"
    return event.get("status", ""), "; ".join(parts), still_open, recovery


def render_submissions() -> str:
    rows = read_results("submissions", [])
    kinds: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        did = (
            "found a job that was accepted too late"
            if row["adopted"]
            else "waited, or noticed nothing"
        )
        kinds["gave up before the first job, exit code 75" if row["repeated"] else did].append(row)
    lines = []
    for kind, own in {**kinds, "all": rows}.items():
        took_s = [row["seconds"] for row in own]
        unknown = sum(row["orphans"] for row in own)
        lines.append((kind, len(own), f"{statistics.median(took_s):.1f}", max(took_s), unknown))
    header = ("what `submit` did", "times", "median seconds", "most seconds", "unknown jobs")
    return markdown(header, lines)


def render_attacks() -> str:
    """Render each attack: its wall in every sandbox, and its result without that wall."""
    walls = read_results("walls", {})
    stops_by_place = read_results("isolation", {})
    rows = []
    for attack in sorted(walls, key=lambda name: (int(name.split()[0]), name)):
        places: dict[str, list[str]] = defaultdict(list)
        for place, stops in stops_by_place.items():
            if attack in stops:
                places[_shorten_stop(stops[attack] or NOT_THERE)].append(place)
        if len(places) == 1:
            stopped = next(iter(places))
        else:
            stopped = "; ".join(f"{', '.join(names)}: {stop}" for stop, names in places.items())
        rows.append((attack, stopped, walls[attack]["wall"], walls[attack]["without"]))
    header = ("attack", "in a sandbox", "a wall that was removed", "its result without that wall")
    return markdown(header, rows)


def _shorten_stop(stop: str) -> str:
    """Leave out counts, which differ from run to run."""
    stop = re.sub(r"\d+ (?=forks|threads|MiB|files|folders)", "so many ", stop)
    return stop.replace("the sandbox is gone ", "")


def render_bias() -> str:
    cosines = {
        scenario: {
            name: f"{statistics.median(cosines):.2f}/{min(cosines):.2f}"
            for name, seeds in row.items()
            for cosines in [[cosine for cosine, _ in seeds]]
        }
        for scenario, row in read_results("bias", {}).items()
    }
    return matrix("", cosines)


def render_agreements() -> str:
    """Render the largest gaps of any layout, by family."""
    header = ("family", "layouts", "log-probs", "gradients", "norm")
    return _render_largest(read_results("parity", {})["agreements"], header)


def render_resumes() -> str:
    """Render the largest gaps of any family, by pair of layouts."""
    rows = [
        {**row, "layouts": f"{row['saved under']} to {row['resumed under']}"}
        for row in read_results("parity", {})["resumes"]
    ]
    return _render_largest(rows, ("layouts", "family", "loss", "weights"))


def _render_largest(rows: Iterable[Row], header: tuple[str, ...]) -> str:
    """Join rows with the same first column: their second columns, then the maxima."""
    largest: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        largest[row[header[0]]].append(row)
    lines = [
        (
            first,
            ", ".join(row[header[1].removesuffix("s")] for row in alike),
            *(f"{max(row[name] for row in alike):.1e}" for name in header[2:]),
        )
        for first, alike in largest.items()
    ]
    return markdown(header, lines)


def render_learning() -> str:
    return _render_runs(lambda name: not name.startswith("small batches"))


def render_old_tokens() -> str:
    return _render_runs(lambda name: name.startswith("small batches"))


def _render_runs(is_shown: Callable[[str], bool]) -> str:
    rows = {
        name: {
            "before": f"{run['start']:.3f}",
            "at step 10": f"{run['eval_reward']['10']:.3f}",
            "after": f"{run['end']:.3f}",
            "staleness at most": run["staleness_max"],
            "engine-trainer difference": f"{run['engine_trainer_max_abs_diff']:.1e}",
            "tokens": f"{run['sampled_tokens']:,}",
        }
        for name, run in sorted(read_results("quickstart", {}).items())
        if is_shown(name)
    }
    return matrix("run", rows)


def render_oracles() -> str:
    parts = read_results("oracles", {}).values()
    rows = [(name, call, f"{off:.0e}", note) for part in parts for name, call, off, note in part]
    return markdown(("quantity", "asked of", "apart by", "difference"), rows)


def render_templates() -> str:
    rows = read_results("chat_templates", [])
    names_by_outcomes = [(", ".join(f"`{name}`" for name in row["templates"]), row) for row in rows]
    return matrix("templates", {names: row["scenes"] for names, row in names_by_outcomes})
