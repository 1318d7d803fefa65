"""The sample runs that docs/diagnosing.md walks through: each shows its fault, and says so."""

import tarfile
from pathlib import Path

import pytest

from areal_hpc.rundir.paths import RunPaths, list_runs
from areal_hpc.shards.verify import verify_run
from areal_hpc.view.answers.collapse import diagnose_collapse
from areal_hpc.view.answers.slow_run import explain_slow_run
from areal_hpc.view.answers.step_change import explain_step_difference
from areal_hpc.view.audit import audit_run
from tests.support.environments import CHECKOUT

ARCHIVE, SWITCH_STEP = CHECKOUT / "examples" / "sample_runs.tar.xz", 30
WALK = (CHECKOUT / "docs" / "diagnosing.md").read_text()


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("samples")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder / "sample_runs"


def test_the_headlines_are_those_of_the_walk(samples: Path) -> None:
    answers = (
        explain_slow_run(RunPaths(samples / "slow")),
        explain_step_difference(RunPaths(samples / "drop"), SWITCH_STEP),
        diagnose_collapse(RunPaths(samples / "collapse")),
    )
    words = " ".join(WALK.split())
    assert [one.headline for one in answers if one.headline not in words] == []


def test_no_run_shows_the_fault_of_another(samples: Path) -> None:
    for name in ("slow", "drop"):
        assert diagnose_collapse(RunPaths(samples / name)).is_well
    for name in ("drop", "collapse"):
        assert "is slow" not in explain_slow_run(RunPaths(samples / name)).headline


def test_samples_are_small_whole_runs(samples: Path) -> None:
    assert ARCHIVE.stat().st_size < 3 << 20
    runs = list_runs(samples)
    assert [paths.run_name for paths in runs] == [
        *("sample_runs/collapse", "sample_runs/drop", "sample_runs/slow")
    ]
    for paths in runs:
        assert audit_run(paths).summary_line == "trained_once=160 duplicates=0 lost=0 open=0"
        assert not verify_run(paths).problems
