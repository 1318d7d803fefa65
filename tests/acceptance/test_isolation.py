"""Hostile programs as the tool of an agent, in real runs: none succeeds on any runtime here.

What stopped each goes to `benchmarks/results/isolation.json` and the table in docs/security.md.
"""

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.sandbox.runtimes.choice import find_installed_runtimes, make_runtime
from tests.support import attacks_table
from tests.support.attacks import tool
from tests.support.attacks.agent import SANDBOX, SECRET_WORDS
from tests.support.environments import CHECKOUT
from tests.support.results import add_results
from tests.support.run_files import events_of
from tests.support.small_run import SmallRun, await_none_left, interrupted_at_end
from tests.support.tables import write_table

pytestmark = pytest.mark.timeout(1500)

EPISODES, GROUPS = 2, 4
RUN_TIMEOUT_S = 1200.0


def run_with_attacks(fileroot: Path, isolation: str) -> tuple[SmallRun, Path]:
    """A run each of whose tasks is one attack, and the file of what came of them."""
    note, home = fileroot / "note.jsonl", fileroot / "home"
    home.mkdir(parents=True)
    steps = math.ceil(len(tool.ATTACKS) / GROUPS)
    holds_session = "session-only" in make_runtime(isolation).networks
    sandbox = {**SANDBOX, "network": "session-only" if holds_session else "none"}
    run = SmallRun(
        fileroot / "runs",
        "sft.total_steps=2",
        f"trainer.total_steps={steps}",
        f"evaluation.every_steps={steps}",
        "valid_dataset.generator=tests.support.sums:tasks",
        "train_dataset.generator=tests.support.attacks.agent:tasks",
        f"train_dataset.kwargs.size={len(tool.ATTACKS)}",
        "rollout.workflow=tests.support.attacks.agent.Hostile",
        f"rollout.n_samples={EPISODES}",
        "rollout.max_concurrent_rollouts=4",
        "rollout.trial_tasks=0",
        f"rollout.agent.isolation={isolation}",
        *(f"rollout.agent.sandbox.{name}={value}" for name, value in sandbox.items()),
    )
    kwargs = {
        "note": str(note),
        "run_dir": str(run.paths.root),
        "home": str(home),
        "isolation": isolation,
    }
    run.override(f"rollout.workflow_kwargs={json.dumps(kwargs)}")
    run.environ = {**SECRET_WORDS, "SLURM_JWT": "token"}
    return run, note


@pytest.mark.parametrize(
    "isolation", [name for name in find_installed_runtimes() if name != "none"]
)
def test_no_attack_succeeds_and_each_costs_its_own_episode(isolation: str, tmp_path: Path) -> None:
    run, note = run_with_attacks(tmp_path, isolation)
    with interrupted_at_end(run):
        run.start()
        assert run.wait(RUN_TIMEOUT_S) == 0, run.said()
    found = [json.loads(line) for line in note.read_text().splitlines()]
    broke = {one["attack"]: one["broke"] for one in found if one["broke"]}
    assert broke == {}
    times_played = Counter(one["attack"] for one in found)
    assert times_played.keys() >= {*tool.ATTACKS}, run.said()
    assert all(times_played[name] >= EPISODES for name in tool.ATTACKS)
    assert sum(name.endswith(": later") for name in times_played) > len(tool.ATTACKS) // 2
    assert "duplicates=0 lost=0 " in run.audited()
    assert events_of(run.paths, "episode_failed") == []
    await_none_left(run, 20.0)
    add_results("isolation", **{isolation: summarize(found)})
    write_table(CHECKOUT / "docs" / "security.md", "attacks", attacks_table.table())


def summarize(found: list[dict[str, Any]]) -> dict[str, str]:
    """What stopped each attack, as it said itself."""
    means: dict[str, str] = dict.fromkeys(tool.ATTACKS, "")
    for one in found:
        if one["attack"] in means and one["held"]:
            means[one["attack"]] = one["held"][-1]
    return means
