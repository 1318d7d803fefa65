"""`--fresh` moves an earlier run aside; it never deletes one, nor one that is in use."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from areal_hpc.errors import ClusterError
from areal_hpc.launch.prepared_run import archive_run
from areal_hpc.rundir.paths import RunPaths


def test_an_earlier_run_is_kept_under_another_name_once_it_is_not_in_use(tmp_path: Path) -> None:
    layout = RunPaths(tmp_path / "quickstart" / "demo")
    assert archive_run(layout) is None, "there may be none"
    layout.shards_dir.mkdir(parents=True)
    layout.recipe.touch()
    (layout.shards_dir / "cell-0-000000.h5").write_bytes(b"precious")
    with layout.lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ClusterError, match="another process"):
            archive_run(layout)
    assert layout.root.exists()
    kept = archive_run(layout)
    assert kept is not None
    assert not layout.root.exists()
    assert (kept / "shards" / "cell-0-000000.h5").read_bytes() == b"precious"
    assert kept.parent == layout.root.parent
