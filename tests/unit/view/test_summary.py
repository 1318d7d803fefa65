"""What `status` says of isolation."""

from pathlib import Path
from typing import Any

import pytest

from areal_hpc.rundir.paths import RunPaths
from areal_hpc.view.state.run_state import RunSnapshot
from areal_hpc.view.state.summary import RunProgress, format_run_progress


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({}, []),
        ({"rollout": {"agent": {"isolation": None}}}, []),
        ({"rollout": {"agent": {"isolation": "bwrap"}}}, ["  agent's sandbox   bwrap"]),
        (
            {"rollout": {"agent": {"isolation": "none"}}, "reward": {"isolation": "none"}},
            [
                "  isolation         none: programs of the model can do all that you can",
                "  agent's sandbox   none: its commands can do all that you can",
            ],
        ),
    ],
)
def test_status_says_how_commands_and_programs_are_isolated(
    sections: dict[str, Any], told: list[str], tmp_path: Path
) -> None:
    recipe = {"trainer": {"total_steps": 4}, **sections}
    advance = RunProgress(recipe, RunSnapshot((), (), None), None, 0.0, 0.0)
    lines = format_run_progress(advance, RunPaths(tmp_path))
    assert [line for line in lines if "isolation" in line or "sandbox" in line] == told
