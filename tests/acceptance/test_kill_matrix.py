"""kill -9 of every party at every point: the run completes, and every ticket is trained once.

One run a party, killed at each of the five points in turn; the trainer's run may need the same
command again. Writes `benchmarks/results/kill_matrix.json` and `docs/kill-matrix.md`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.environments import CHECKOUT
from tests.support.killed_run import PARTIES, POINTS, Kill, KilledRun, warmed_up_model
from tests.support.results import markdown, write_results
from tests.support.small_run import await_none_left

pytestmark = pytest.mark.timeout(3600)

DOCUMENT = CHECKOUT / "docs" / "kill-matrix.md"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return warmed_up_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def record() -> Iterator[dict[str, Any]]:
    """Filled by the tests; written once every party has been killed everywhere."""
    parties: dict[str, Any] = {}
    yield parties
    if parties.keys() == PARTIES.keys():
        ordered = {party: parties[party] for party in PARTIES}
        write_results("kill_matrix", {"parties": ordered})
        DOCUMENT.write_text(page(ordered))


@pytest.mark.parametrize("party", PARTIES)
def test_a_run_whose_party_is_killed_at_every_point_completes(
    party: str, model: Path, tmp_path: Path, record: dict[str, Any]
) -> None:
    kills = [Kill(party, point) for point in POINTS]
    run = KilledRun(tmp_path, model, kills)
    launches = run.run_to_the_end(most_launches=1 + len(kills) if party == "trainer" else 1)
    struck = run.struck()
    assert struck.keys() == {kill.name for kill in kills}, run.said()
    verdict = run.assert_complete()
    await_none_left(run, 20.0)
    record[party] = {
        "launches": launches,
        "steps": run.steps,
        "audit": verdict,
        "seconds_to_next_version": {
            kill.point: run.seconds_to_next_version(struck[kill.name]) for kill in kills
        },
    }


PAGE = """# What kill -9 does

Written by `tests/acceptance/test_kill_matrix.py`. Each party is killed once at each
point of one run of the cut-down quick start (steps of 4 tickets, a checkpoint every 2
steps, one cell). Every run completed, and `areal-hpc audit` found every ticket trained
exactly once.

{points}

Seconds from the kill to the next weights that a replica was given, which includes the
start of new processes:

{seconds}

`server` is SGLang. The trainer's ranks start again within their job while restarts get the
run further; otherwise the same command continues it.
"""


def page(parties: dict[str, Any]) -> str:
    """The results for people."""
    points = [(name, f"{one.means} (`{one.fault_point}`)") for name, one in POINTS.items()]
    rows = []
    for party, facts in parties.items():
        seconds, again = facts["seconds_to_next_version"], facts["launches"] - 1
        how = "by itself" if not again else f"by itself, {again} times by the same command"
        times = [f"{seconds[point]:g}" for point in POINTS]
        rows.append((party, *times, how, f"`{facts['audit']}`"))
    return PAGE.format(
        points=markdown(("point", "when exactly"), points),
        seconds=markdown(("killed", *POINTS, "went on", "audit"), rows),
    )
