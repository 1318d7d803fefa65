"""A run's own folder is made by its launcher alone."""

from pathlib import Path

import pytest

from areal_hpc.rundir import files
from areal_hpc.rundir.files import RunDirWatch, forbid_making, make_folder, write_atomic


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(files, "_mark_by_run_dir", {})
    made = tmp_path / "experiment" / "trial"
    make_folder(made)
    (made / "recipe.yaml").touch()
    forbid_making(made)
    return made


def test_what_is_written_below_a_run_that_was_moved_is_refused(run_dir: Path) -> None:
    write_atomic(run_dir / "jobs" / "trainer" / "exit.json", b"{}")
    run_dir.rename(run_dir.with_name("elsewhere"))
    for name in ("events.json", "jobs/trainer/exit.json"):
        with pytest.raises(FileNotFoundError, match="trial"):
            write_atomic(run_dir / name, b"{}")
    assert not run_dir.exists()
    run_dir.mkdir()  # half of it is there, as while it is moved to another file system
    with pytest.raises(FileNotFoundError, match="trial"):
        write_atomic(run_dir / "jobs" / "trainer" / "exit.json", b"{}")
    write_atomic(run_dir.with_name("another") / "recipe.yaml", b"")


def test_a_folder_is_gone_when_it_is_missing_three_times_while_its_parent_answers(
    run_dir: Path,
) -> None:
    watch, elsewhere = RunDirWatch(run_dir), run_dir.with_name("elsewhere")
    assert not watch.is_gone()
    run_dir.rename(elsewhere)
    assert [watch.is_gone(), watch.is_gone()] == [False, False]
    elsewhere.rename(run_dir)
    assert not watch.is_gone()
    run_dir.rename(elsewhere)
    assert [watch.is_gone() for _ in range(3)] == [False, False, True]
    assert RunDirWatch(run_dir).is_gone(looks=1)
    run_dir.parent.rename(run_dir.parent.with_name("unmounted"))
    with pytest.raises(FileNotFoundError):
        watch.is_gone()
