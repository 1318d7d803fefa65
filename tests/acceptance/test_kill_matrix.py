"""kill -9 of every party at every point: the run completes, and every ticket is trained once.

One run a party, killed at each of the five points in turn; the trainer's run may need the same
command again. Writes `benchmarks/results/kill_matrix.json` and the table of `docs/kill-matrix.md`.
"""

from pathlib import Path

import pytest

from tests.support.killed_run import PARTIES, POINTS, Kill, KilledRun
from tests.support.results import add_results, matrix, write_table
from tests.support.small_run import await_none_left

pytestmark = pytest.mark.timeout(3600)


@pytest.mark.parametrize("party", PARTIES)
def test_a_run_whose_party_is_killed_at_every_point_completes(
    party: str, model: Path, tmp_path: Path
) -> None:
    kills = [Kill(party, point) for point in POINTS]
    run = KilledRun(tmp_path, model, kills)
    launches = run.run_to_the_end(most_launches=1 + len(kills) if party == "trainer" else 1)
    struck = run.struck()
    assert struck.keys() == {kill.name for kill in kills}, run.said()
    verdict = run.assert_complete()
    await_none_left(run, 20.0)
    again = f", {launches - 1} times by the same command" if launches > 1 else ""
    row = {
        **{kill.point: run.seconds_to_next_version(struck[kill.name]) for kill in kills},
        "went on": f"by itself{again}",
        "audit": f"`{verdict}`",
    }
    rows = add_results("kill_matrix", **{party: row})
    write_table("kill-matrix.md", "seconds", matrix("killed", rows))
