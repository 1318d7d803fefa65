"""Images in OCI archives: layers on one another, in a folder that they do not leave."""

import io
import tarfile
from pathlib import Path

import pytest

from areal_hpc.errors import RecipeError
from areal_hpc.sandbox.images.oci_image import read_image, unpack_image
from tests.support.oci_images import Entry, make_layer, read_tree, write_image


def unpack(tmp_path: Path, *layers: list[Entry]) -> Path:
    archive = write_image(tmp_path / "image.tar", [make_layer(one) for one in layers])
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
    assert {one.name for one in tmp_path.iterdir()} == {"outside", "image.tar", "rootfs"}
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
        place = next(one.offset_data for one in file if one.name.startswith("blobs/"))
    content = bytearray(archive.read_bytes())
    content[place + 4] ^= 1  # the time in gzip's header, which nothing else looks at
    archive.write_bytes(content)
    image = read_image(archive)
    assert image is not None
    (tmp_path / "rootfs").mkdir()
    with pytest.raises(RecipeError, match="is another's content"):
        unpack_image(image, tmp_path / "rootfs")


def test_an_image_without_one_of_its_layers_is_refused_before_a_run(tmp_path: Path) -> None:
    layer = make_layer([("a", b"of the image")])
    whole = write_image(tmp_path / "image.tar", [layer])
    with tarfile.open(whole) as file, tarfile.open(tmp_path / "cut.tar", "w") as cut:
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
