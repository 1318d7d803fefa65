"""Archives of images and root file systems are unpacked once, whole, and only into a folder."""

import contextlib
import gzip
import hashlib
import io
import json
import os
import tarfile
import tempfile
import time
import tracemalloc
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.agents.harness.harness_agent import _unpack
from areal_hpc.errors import RecipeError
from areal_hpc.sandbox import images
from areal_hpc.sandbox.images import (
    ROOT_KEPT_S,
    get_cached_root,
    make_cache_folder,
    read_image,
    unpack_image,
)
from areal_hpc.sandbox.unpacked_tree import ArchiveTooLargeError, UnpackedTree

Entry = tuple[str, str | bytes | None]
"""Name and content: bytes of a file, a link's target, None for a folder."""


def make_layer(entries: Iterable[Entry]) -> bytes:
    """Make a layer, a compressed tar. A name that begins with `=` is a hard link."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name, content in entries:
            member = tarfile.TarInfo(name.removeprefix("="))
            member.mode = 0o755
            member.type = tarfile.DIRTYPE if content is None else tarfile.REGTYPE
            if isinstance(content, str):
                member.type = tarfile.LNKTYPE if name.startswith("=") else tarfile.SYMTYPE
                member.linkname = content
            data = content if isinstance(content, bytes) else b""
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return gzip.compress(stream.getvalue())


def write_image(path: Path, layers: Sequence[bytes], **config: Any) -> Path:
    """Write an OCI archive with these layers; `config` is what commands in it expect."""
    blobs = dict[str, bytes]()

    def add(content: bytes, media_type: str) -> dict[str, Any]:
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        blobs[f"blobs/{digest.replace(':', '/')}"] = content
        return {"mediaType": media_type, "digest": digest, "size": len(content)}

    kind = "application/vnd.oci.image"
    described = [add(layer, f"{kind}.layer.v1.tar+gzip") for layer in layers]
    settings = add(json.dumps({"config": config}).encode(), f"{kind}.config.v1+json")
    manifest = {"schemaVersion": 2, "config": settings, "layers": described}
    descriptor = add(json.dumps(manifest).encode(), f"{kind}.manifest.v1+json")
    blobs["index.json"] = json.dumps({"schemaVersion": 2, "manifests": [descriptor]}).encode()
    blobs["oci-layout"] = b'{"imageLayoutVersion": "1.0.0"}'
    with tarfile.open(path, "w") as archive:
        for name, content in blobs.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def read_tree(folder: Path) -> list[Entry]:
    entries = list[Entry]()
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            entries.append((name, str(path.readlink())))
        else:
            entries.append((name, None if path.is_dir() else path.read_bytes()))
    return entries


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
    files = sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())
    assert files == sorted(names[:3])


def test_what_a_killed_process_unpacked_goes_when_the_next_one_unpacks(tmp_path: Path) -> None:
    archive = write_tar(tmp_path / "root.tar", {"etc/os": ""})
    cache, root = make_cache_folder(), get_cached_root(archive)
    (root / "closed").mkdir(mode=0o500)
    killed = [root.rename(root.with_suffix(".partial")), cache / f"{'0' * 32}.partial"]
    killed[1].mkdir()
    held, other = cache / f"{'1' * 32}.partial", cache / ("2" * 32)
    held.mkdir()
    other.mkdir()
    with images._hold_file_lock(held):  # by a process at work
        assert get_cached_root(archive) == root
    assert (root / "etc/os").is_file()
    assert not any(path.exists() for path in killed)
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
    assert sorted(path.name for path in root.iterdir()) == ["a", "b", "dev"]
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
    assert [path.name for path in (root / "x").iterdir()] == ["file"]
    assert root.parent.stat().st_mode & 0o077 in (0, 0o011)
    secret = root.parent / "secret"
    assert secret.stat().st_mode & 0o777 == 0o600
    secret.unlink()
    assert get_cached_root(archive) != root


def unpack(tmp_path: Path, *layers: list[Entry]) -> Path:
    archive = write_image(tmp_path / "image.tar", [make_layer(layer) for layer in layers])
    image, folder = read_image(archive), tmp_path / "rootfs"
    assert image is not None
    folder.mkdir()
    unpack_image(image, folder)
    return folder


def test_a_later_layer_writes_over_and_removes_what_an_earlier_one_has(tmp_path: Path) -> None:
    removed: list[Entry] = [("a/.wh.gone", b""), ("b/.wh..wh..opq", b""), (".wh.d", b"")]
    links: list[Entry] = [("link", "a/kept"), ("=hard", "a/kept")]
    folder = unpack(
        tmp_path,
        [("a/kept", b"1"), ("a/gone", b"1"), ("b/old/deep", b"1"), ("b/c", b"1"), ("d", b"file")],
        [("b/new", b"2"), *removed, *links, ("dev/null", b"x"), ("d/within", b"3")],
    )
    assert read_tree(folder) == [
        *[("a", None), ("a/kept", b"1"), ("b", None), ("b/new", b"2"), ("d", None)],
        *[("d/within", b"3"), ("hard", b"1"), ("link", "a/kept")],
    ]


def test_links_are_followed_within_the_image_and_never_out_of_it(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    folder = unpack(
        tmp_path,
        [("lib", "usr/lib"), ("out", str(outside)), ("up", "../../.."), ("usr/lib/a", b"1")],
        [("lib/b", b"2"), ("out/planted", b"x"), ("up/planted", b"x"), ("../../above", b"x")],
    )
    assert not [*outside.iterdir()]
    assert {path.name for path in tmp_path.iterdir()} == {"outside", "image.tar", "rootfs"}
    assert (folder / "usr/lib/b").read_bytes() == b"2"
    assert (folder / "planted").read_bytes() == b"x"
    assert Path(f"{folder}{outside}/planted").read_bytes() == b"x"


def test_a_link_in_the_place_of_a_folder_changes_no_mode_outside(tmp_path: Path) -> None:
    below = tmp_path / "outside" / "below"
    below.mkdir(parents=True)
    below.chmod(0o750)
    layers: list[list[Entry]] = [
        [("a", None), ("a/below", None)],
        [(".wh.a", b""), ("a", str(tmp_path / "outside"))],
    ]
    unpack(tmp_path, *layers)
    assert below.stat().st_mode & 0o777 == 0o750


@pytest.mark.parametrize("name", ["a/..", "a/.wh...", ".wh.."])
def test_names_of_the_folder_above_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="there is a file"):
        unpack(tmp_path, [("a/b", b""), (name, b"")])


def test_a_blob_that_is_not_what_its_digest_says_is_refused(tmp_path: Path) -> None:
    archive = write_image(tmp_path / "image.tar", [make_layer([("a", b"of the image")])])
    with tarfile.open(archive) as file:
        offset = next(member.offset_data for member in file if member.name.startswith("blobs/"))
    content = bytearray(archive.read_bytes())
    content[offset + 4] ^= 1  # the time in gzip's header, which nothing else looks at
    archive.write_bytes(content)
    image = read_image(archive)
    assert image is not None
    (tmp_path / "rootfs").mkdir()
    with pytest.raises(RecipeError, match="is another's content"):
        unpack_image(image, tmp_path / "rootfs")


def test_an_image_without_one_of_its_layers_is_refused_before_a_run(tmp_path: Path) -> None:
    layer = make_layer([("a", b"of the image")])
    image = write_image(tmp_path / "image.tar", [layer])
    with tarfile.open(image) as file, tarfile.open(tmp_path / "cut.tar", "w") as cut:
        for member in file:
            content = file.extractfile(member)
            assert content is not None
            if (data := content.read()) != layer:
                cut.addfile(member, io.BytesIO(data))
    with pytest.raises(RecipeError, match="it is damaged"):
        read_image(tmp_path / "cut.tar")


def test_other_tars_are_no_images(tmp_path: Path) -> None:
    plain = tmp_path / "root.tar"
    with tarfile.open(plain, "w") as file:
        file.add(Path(__file__), "etc/file")
    assert read_image(plain) is None
    (tmp_path / "none").write_bytes(b"no tar")
    assert read_image(tmp_path / "none") is None


ArchiveEntry = tuple[str, bytes, str | bytes]
"""Name, type of tar, and link or content."""
FILE, LINK, HARD = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE
LONG = "d" * 247


def make_archive(entries: Iterable[ArchiveEntry]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name, kind, content in entries:
            member = tarfile.TarInfo(name)
            member.type, member.mode = kind, 0o644
            if isinstance(content, str):
                member.linkname = content
            else:
                member.size = len(content)
            archive.addfile(member, io.BytesIO(content) if isinstance(content, bytes) else None)
    return stream.getvalue()


def build_realpath_overflow(home: str) -> list[ArchiveEntry]:
    """Build CVE-2025-4517: a link whose path gets too long for realpath(3) to resolve it."""
    entries: list[ArchiveEntry] = []
    path = ""
    for letter in "abcdefghijklmnop":
        entries += [(f"{path}{LONG}", tarfile.DIRTYPE, b""), (f"{path}{letter}", LINK, LONG)]
        path += f"{LONG}/"
    links = "/".join("abcdefghijklmnop")
    entries.append((f"{links}/{'l' * 254}", LINK, "../" * 16))
    entries.append(("escape", LINK, f"{links}/{'l' * 254}/../{'../' * 30}{home}"))
    return entries


ESCAPES: dict[str, Any] = {
    "a path longer than realpath reads": lambda home: [
        *build_realpath_overflow(home),
        ("flag", HARD, "escape/marker"),
        ("flag", FILE, b"forged"),
        ("escape/new", FILE, b"forged"),
    ],
    "a link through a link that goes up": lambda home: [
        ("d/e/l", LINK, "../.."),
        ("answer.txt", LINK, "d/e/l/../home/marker"),
    ],
    "a link before the link that it goes through": lambda home: [
        ("answer.txt", LINK, "d/e/l/../home/marker"),
        ("d/e/l", LINK, "../.."),
    ],
    "names": lambda home: [(f"{'../' * 30}{home}/new", FILE, b"x"), (f"{home}/new", FILE, b"x")],
    "an absolute link": lambda home: [("a", LINK, f"/{home}"), ("a/new", FILE, b"x")],
    "a file through a link": lambda home: [
        ("a", LINK, f"{'../' * 30}{home}"),
        ("a/new", FILE, b""),
    ],
    "a hard link": lambda home: [("a", HARD, f"{'../' * 30}{home}/marker"), ("a", FILE, b"x")],
    "a hard link to a link": lambda home: [
        ("a", LINK, f"{'../' * 30}{home}/marker"),
        ("answer.txt", HARD, "a"),
    ],
}


@pytest.mark.parametrize("name", ESCAPES)
def test_no_archive_of_a_program_leaves_its_folder(name: str, tmp_path: Path) -> None:
    """Nothing leads out of it during the unpacking, or when somebody follows a link later."""
    home, target = tmp_path / "home", tmp_path / "target"
    home.mkdir()
    target.mkdir()
    (home / "marker").write_text("the user's")
    archive = make_archive(ESCAPES[name](str(home).lstrip("/")))
    with contextlib.suppress(ValueError, OSError):  # refused: a link to nothing, a path too long
        _unpack(archive, target)
    assert [path.name for path in home.iterdir()] == ["marker"]
    assert (home / "marker").read_text() == "the user's"
    for folder, folders, files in os.walk(target):
        for member in (*folders, *files):
            assert Path(os.path.realpath(f"{folder}/{member}")).is_relative_to(target), member


def test_what_git_and_npm_link_stays_and_nothing_but_files_comes_along(tmp_path: Path) -> None:
    entries: list[ArchiveEntry] = [
        ("node_modules/tool/cli.js", FILE, b"run"),
        ("node_modules/.bin/tool", LINK, "../tool/cli.js"),
        ("current", LINK, "node_modules"),
        ("venv/python", LINK, "/usr/bin/python3"),
        ("pipe", tarfile.FIFOTYPE, b""),
        ("disk", tarfile.BLKTYPE, b""),
        (".wh.file", FILE, b"kept"),
    ]
    assert _unpack(make_archive(entries), tmp_path) == 1
    assert (tmp_path / "current/.bin/tool").read_bytes() == b"run"
    paths = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("**/*"))
    assert paths == [
        *[".wh.file", "current", "node_modules", "node_modules/.bin", "node_modules/.bin/tool"],
        *["node_modules/tool", "node_modules/tool/cli.js", "venv"],
    ]


def test_a_link_in_the_place_of_a_folder_takes_no_file_of_the_user(tmp_path: Path) -> None:
    """A file in the place of a folder or of a link does not end the unpacking."""
    home, target = tmp_path / "home", tmp_path / "target"
    home.mkdir()
    (home / "f0").write_text("the user's")
    target.mkdir()
    entries: list[ArchiveEntry] = [(f"{folder}/f0", LINK, "/nowhere") for folder in "abc"]
    entries += [("a", LINK, str(home)), ("b", FILE, b""), ("c/f0", FILE, b"kept")]
    assert _unpack(make_archive(entries), target) == 1
    assert (home / "f0").read_text() == "the user's"
    assert sorted(path.name for path in target.glob("**/*")) == ["b", "c", "f0"]


def test_members_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    late = io.BytesIO()
    with tarfile.open(fileobj=late, mode="w", format=tarfile.GNU_FORMAT) as archive:
        member = tarfile.TarInfo("late")
        member.mtime = 9.3e18
        archive.addfile(member)
    for content, message in (
        (late.getvalue(), "late has no time"),
        (make_archive([("bare", HARD, "")]), "bare is a hard link to ''"),
        (make_archive([("up", HARD, "a/..")]), "up is a hard link to 'a/..'"),
    ):
        with pytest.raises(ValueError, match=message):
            _unpack(content, tmp_path)


def test_a_layer_hides_what_lower_ones_have_and_nothing_of_its_own(tmp_path: Path) -> None:
    tree = UnpackedTree(tmp_path, max_bytes=1000, max_files=20)
    lower = make_archive([("a/b/old", FILE, b""), ("a/old", FILE, b"")])
    upper = [("a/b/new", FILE, b""), ("a/c/new", FILE, b""), ("a/.wh..wh..opq", FILE, b"")]
    for layer in (lower, make_archive(upper)):
        tree.write_archive(io.BytesIO(layer), is_layer=True)
    paths = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("**/*"))
    assert paths == ["a", "a/b", "a/b/new", "a/c", "a/c/new"]


def test_there_is_an_end_to_what_an_archive_may_hold(tmp_path: Path) -> None:
    many = make_archive((f"{number}", FILE, b"") for number in range(11))
    large = make_archive([("a", FILE, bytes(600)), ("b", FILE, bytes(600))])
    for archive, message in ((many, "too many files"), (large, "too large")):
        tree = UnpackedTree(tmp_path, max_bytes=1000, max_files=10)
        with pytest.raises(ArchiveTooLargeError, match=message):
            tree.write_archive(io.BytesIO(archive))
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 1000


@pytest.mark.parametrize("sparse", [{"numblocks": "0"}, {"map": "0,-5000"}])
def test_a_sparse_file_is_refused(sparse: dict[str, str], tmp_path: Path) -> None:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive:
        member = tarfile.TarInfo("holed")
        fields = {"size": str(1 << 40), **sparse}
        member.pax_headers = {f"GNU.sparse.{name}": value for name, value in fields.items()}
        archive.addfile(member)
    tree = UnpackedTree(tmp_path, max_bytes=1000, max_files=10)
    with pytest.raises(ValueError, match="holed is a sparse file"):
        tree.write_archive(io.BytesIO(stream.getvalue()))
