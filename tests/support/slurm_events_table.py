"""The tables of docs/operating.md; `tests.support.generated_tables` renews them.

The figures come from `tests/acceptance/test_slurm_events.py`.
"""

from typing import Any

from tests.support import results
from tests.support.devclusters import TESTED_RELEASE
from tests.support.environments import CHECKOUT
from tests.support.tables import markdown, write_table

NAME = f"slurm_events_{TESTED_RELEASE}" if TESTED_RELEASE else "slurm_events"
"""Of the results: those of the machine's own Slurm are the document's."""
DOCUMENT = CHECKOUT / "docs" / "operating.md"

EVENTS = {
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
"""What is done to runs, in the order of the table."""

Row = dict[str, Any]


def read_results() -> dict[str, Any]:
    """All that was measured so far."""
    found: dict[str, Any] = results.read_results(NAME, {})
    return {"learning": {}, "preempted": {}, "start": {}, "events": {}} | found


def record(part: str, figures: dict[str, Any]) -> None:
    """Put figures in the place of what was measured before, and renew the document."""
    measured = read_results()
    measured[part] |= figures
    events = measured["events"]
    measured["events"] = {name: events[name] for name in EVENTS if name in events}
    results.write_results(NAME, measured)
    if not TESTED_RELEASE:
        write_table(DOCUMENT, "events", tables())


def tables() -> str:
    """What happened at each event, and what the first step waits for."""
    measured = read_results()
    rows = [(title, measured["events"].get(name)) for name, title in EVENTS.items()]
    cells = [(title, happened(row), recovery(row)) for title, row in rows]
    lines = [markdown(("event", "what happened", "recovery"), cells)]
    start = measured["start"]
    if start:
        parts = [name for name in start if name != "total"]
        lines += ["", f"From `areal-hpc submit` to the first trained step: {start['total']:.0f} s."]
        lines += ["", markdown(parts, [[f"{start[name]:g} s" for name in parts]])]
    if learning := measured["learning"]:
        lines += [
            "",
            "`recipes/quickstart_slurm.yaml` as it is shipped, undisturbed: held-out reward "
            f"{learning['start']:.3f} before, {learning['end']:.3f} after",
            f"25 steps, {learning['wall_s'] / 60:.0f} minutes; audit {learning['audit']}.",
        ]
    return "\n".join(lines)


def happened(row: Row | None) -> str:
    """What was seen of an event."""
    if row is None:
        return "not measured"
    said = [f"`status`: {row['status']}"] if "status" in row else []
    said += [f"`why`: {row['why']}"] if "why" in row else []
    if "restarts" in row:
        said.append(f"same job number, restart {row['restarts']}")
    for key, unit in (("steps_lost", "lost"), ("steps_meanwhile", "trained meanwhile")):
        if key in row:
            said.append(f"{row[key]} step{'s' * (row[key] != 1)} {unit}")
    return "; ".join([*said, f"audit {row['audit']}"]).replace("|", "\\|")


def recovery(row: Row | None) -> str:
    """How long it took until all was as before."""
    if row is None:
        return ""
    if row["recovery_s"] is None:
        return "goes on without it"
    parts = [f"{row['recovery_s']:.0f} s"]
    if "first_step_s" in row:
        parts.append(f"first new step {row['first_step_s']:.0f} s after the start of the process")
    return "; ".join(parts)
