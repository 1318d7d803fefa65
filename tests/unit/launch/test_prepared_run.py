"""`--fresh` moves an earlier run aside; it never deletes one, nor one that is in use."""

import fcntl
from pathlib import Path

import pytest

from areal_hpc.errors import ClusterError
from areal_hpc.launch.prepared_run import archive_run
from areal_hpc.rundir.paths import RunPaths


def test_an_earlier_run_is_kept_under_another_name_once_it_is_not_in_use(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "quickstart" / "demo")
    assert archive_run(paths) is None, "there may be none"
    paths.shards_dir.mkdir(parents=True)
    paths.recipe.touch()
    (paths.shards_dir / "cell-0-000000.h5").write_bytes(b"precious")
    with paths.lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ClusterError, match="another process"):
            archive_run(paths)
    assert paths.root.exists()
    kept = archive_run(paths)
    assert kept is not None
    assert not paths.root.exists()
    assert (kept / "shards" / "cell-0-000000.h5").read_bytes() == b"precious"
    assert kept.parent == paths.root.parent
