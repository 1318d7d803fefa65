"""Root file systems in archives: unpacked once, whole, and nothing that was killed stays."""

import gzip
import io
import os
import tarfile
import tempfile
import time
import tracemalloc
from collections.abc import Mapping
from pathlib import Path

import pytest

from areal_hpc.errors import RecipeError
from areal_hpc.sandbox.images import root_archive
from areal_hpc.sandbox.images.root_archive import ROOT_KEPT_S, get_cached_root, make_cache_folder
from tests.support.oci_images import make_layer, write_image


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
def test_a_tar_loses_its_devices_and_no_folder_of_such_a_name(top: str, tmp_path: Path) -> None:
    names = ("usr/include/sys/types.h", "home/app/dev/x.py", "var/proc/a", "dev/null", "sys/b/c")
    root = get_cached_root(write_tar(tmp_path / "root.tar", dict.fromkeys(names, ""), top))
    found = sorted(str(one.relative_to(root)) for one in root.rglob("*") if one.is_file())
    assert found == sorted(names[:3])


def test_what_a_killed_process_unpacked_goes_when_the_next_one_unpacks(tmp_path: Path) -> None:
    archive = write_tar(tmp_path / "root.tar", {"etc/os": ""})
    cache, root = make_cache_folder(), get_cached_root(archive)
    (root / "closed").mkdir(mode=0o500)
    killed = [root.rename(root.with_suffix(".partial")), cache / f"{'0' * 32}.partial"]
    killed[1].mkdir()
    held, other = cache / f"{'1' * 32}.partial", cache / ("2" * 32)
    held.mkdir()
    other.mkdir()
    with root_archive._hold_file_lock(held):  # by one that is at work
        assert get_cached_root(archive) == root
    assert (root / "etc/os").is_file()
    assert not any(one.exists() for one in killed)
    assert held.exists()
    assert other.exists()


def test_a_root_that_nobody_uses_makes_room_and_one_in_use_stays(tmp_path: Path) -> None:
    roots = [
        get_cached_root(write_tar(tmp_path / f"{name}.tar", {"etc/os": ""}))
        for name in ("old", "used")
    ]
    long_ago = time.time() - 2 * ROOT_KEPT_S
    for root in roots:
        os.utime(root.with_suffix(".lock"), (long_ago, long_ago))
    assert get_cached_root(tmp_path / "used.tar") == roots[1]
    get_cached_root(write_tar(tmp_path / "new.tar", {"etc/os": ""}))
    assert [root.exists() for root in roots] == [False, True]


def test_hard_links_to_what_is_left_out_are_left_out_too(tmp_path: Path) -> None:
    layer = make_layer([("dev/null", b""), ("a", b"1"), ("=b", "a"), ("=c", "dev/null")])
    root = get_cached_root(write_image(tmp_path / "image.tar", [layer]))
    assert sorted(one.name for one in root.iterdir()) == ["a", "b", "dev"]
    broken = write_image(tmp_path / "broken.tar", [make_layer([("=b", "missing")])])
    with pytest.raises(RecipeError, match="hard link to missing, which is missing"):
        get_cached_root(broken)


@pytest.mark.parametrize("name", ["root.tar", "image.tar"])
def test_bombs_are_refused_before_they_are_unpacked(name: str, tmp_path: Path) -> None:
    """A header of 12 MiB, which reading would take into memory."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive:
        member = tarfile.TarInfo("a")
        member.pax_headers = {"comment": "x" * (12 << 20)}
        archive.addfile(member)
    bomb = gzip.compress(stream.getvalue(), 1)
    path = tmp_path / name
    if name == "image.tar":
        write_image(path, [bomb])
    else:
        path.write_bytes(bomb)
    del stream
    tracemalloc.start()
    with pytest.raises(RecipeError, match="a header of 125"):
        get_cached_root(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 << 20


def test_a_root_has_no_devices_and_no_name_that_another_user_knows(tmp_path: Path) -> None:
    archive = tmp_path / "root.tar"
    with tarfile.open(archive, "w") as tar:
        for kind in (tarfile.CHRTYPE, tarfile.FIFOTYPE):
            member = tarfile.TarInfo(f"x/{kind.decode()}")
            member.type, member.devmajor, member.devminor, member.mode = kind, 1, 5, 0o666
            tar.addfile(member)
        tar.addfile(tarfile.TarInfo("x/file"))
    root = get_cached_root(archive)
    assert [one.name for one in (root / "x").iterdir()] == ["file"]
    assert root.parent.stat().st_mode & 0o077 in (0, 0o011)
    secret = root.parent / "secret"
    assert secret.stat().st_mode & 0o777 == 0o600
    secret.unlink()
    assert get_cached_root(archive) != root
