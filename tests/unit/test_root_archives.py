"""Root file systems in archives: unpacked once, whole, and nothing that was killed stays."""

import errno
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from areal_hpc.errors import ClusterError, RecipeError
from areal_hpc.sandbox.images import root_archive
from areal_hpc.sandbox.images.image_layers import RootTree
from areal_hpc.sandbox.images.root_archive import (
    ROOT_KEPT_S,
    get_or_unpack_cached_root,
    make_cache_folder,
)
from tests.support.oci_images import make_layer, write_image
from tests.support.waiting import wait_for


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def write_tar(path: Path, files: Mapping[str, str], top: str = "./") -> Path:
    with tarfile.open(path, "w") as archive:
        for name in files:
            member = tarfile.TarInfo(f"{top}{name}")
            archive.addfile(member)
    return path


@pytest.mark.parametrize("top", ["", "./", "/"])
def test_a_tar_loses_its_own_devices_and_no_folder_below_that_is_called_so(
    top: str, tmp_path: Path
) -> None:
    names = ("usr/include/sys/types.h", "home/app/dev/x.py", "var/proc/a", "dev/null", "sys/b/c")
    root = get_or_unpack_cached_root(
        write_tar(tmp_path / "root.tar", dict.fromkeys(names, ""), top)
    )
    found = sorted(str(one.relative_to(root)) for one in root.rglob("*") if one.is_file())
    assert found == sorted(names[:3])


def test_what_a_killed_process_unpacked_goes_when_the_next_one_unpacks(tmp_path: Path) -> None:
    archive = write_tar(tmp_path / "root.tar", {"etc/os": ""})
    cache, root = make_cache_folder(), get_or_unpack_cached_root(archive)
    (root / "closed").mkdir(mode=0o500)
    killed = [root.rename(root.with_suffix(".partial")), cache / f"{'0' * 32}.partial"]
    killed[1].mkdir()
    held, other = cache / f"{'1' * 32}.partial", cache / ("2" * 32)
    held.mkdir()
    other.mkdir()
    with root_archive._hold_file_lock(held):  # by one that is at work
        assert get_or_unpack_cached_root(archive) == root
    assert (root / "etc/os").is_file()
    assert not any(one.exists() for one in killed)
    assert held.exists()
    assert other.exists()


def test_a_root_that_nobody_uses_makes_room_and_one_in_use_stays(tmp_path: Path) -> None:
    roots = [
        get_or_unpack_cached_root(write_tar(tmp_path / f"{name}.tar", {"etc/os": ""}))
        for name in ("old", "used")
    ]
    long_ago = time.time() - 2 * ROOT_KEPT_S
    for root in roots:
        os.utime(root.with_suffix(".lock"), (long_ago, long_ago))
    assert get_or_unpack_cached_root(tmp_path / "used.tar") == roots[1]
    get_or_unpack_cached_root(write_tar(tmp_path / "new.tar", {"etc/os": ""}))
    assert [root.exists() for root in roots] == [False, True]


def test_tar_keeps_its_folder_to_itself_when_its_process_is_killed(tmp_path: Path) -> None:
    """A successor must not write where an orphan of the killed process still does."""
    slow = tmp_path / "bin"
    slow.mkdir()
    program, begun = slow / "tar", tmp_path / "begun"
    program.write_text(f"#!/bin/sh\necho $$ > {begun}\nexec sleep 60\n")
    program.chmod(0o755)
    archive = write_tar(tmp_path / "root.tar", {"etc/os": ""})
    script = (
        "import sys, tempfile; tempfile.tempdir = sys.argv[1]\n"
        "from pathlib import Path\n"
        "from areal_hpc.sandbox.images.root_archive import get_or_unpack_cached_root\n"
        "get_or_unpack_cached_root(Path(sys.argv[2]))"
    )
    environ = {**os.environ, "PATH": f"{slow}:{os.environ['PATH']}"}
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path), str(archive)], env=environ
    ) as process:
        wait_for(lambda: begun.exists() and begun.read_text().endswith("\n"), 60)
        process.kill()
    orphan = int(begun.read_text())
    try:
        partial = next(make_cache_folder().glob("*.partial"))
        with pytest.raises(BlockingIOError), root_archive._hold_file_lock(partial, waits=False):
            pass
    finally:
        os.kill(orphan, 9)


def test_only_a_lack_of_space_is_called_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = write_image(tmp_path / "image.tar", [make_layer([("a", b"1")])])
    for number, said in ((errno.EDQUOT, "free some space"), (errno.EIO, "Input/output")):

        def fail(*_: object, number: int = number) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(RootTree, "apply_layer", fail)  # as a disk does
        with pytest.raises(ClusterError, match=said):
            get_or_unpack_cached_root(archive)
        assert not [*make_cache_folder().glob("*.partial")]


def test_hard_links_to_what_is_left_out_are_left_out_too(tmp_path: Path) -> None:
    layer = make_layer([("dev/null", b""), ("a", b"1"), ("=b", "a"), ("=c", "dev/null")])
    root = get_or_unpack_cached_root(write_image(tmp_path / "image.tar", [layer]))
    assert sorted(one.name for one in root.iterdir()) == ["a", "b", "dev"]
    broken = write_image(tmp_path / "broken.tar", [make_layer([("=b", "missing")])])
    with pytest.raises(RecipeError, match="hard link to missing, which is missing"):
        get_or_unpack_cached_root(broken)
