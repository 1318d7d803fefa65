"""The folder of SGLang's sockets, whose paths the kernel bounds."""

import shutil
import tempfile
from pathlib import Path

import pytest

from areal_hpc.inference.server.sglang_server import make_scratch_dir

MAX_SOCKET_PATH_CHARS = 107
SOCKET_NAME = "/tmp12345678"
"""As SGLang names it."""


@pytest.mark.parametrize("chars", [79, 80, 150])
def test_sockets_fit_however_long_the_folder_of_temporary_files_is(
    chars: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = chars - len(str(tmp_path)) - 1
    if room < 1:
        tmp_path = Path(tempfile.mkdtemp())
        room = chars - len(str(tmp_path)) - 1
    place = tmp_path / ("x" * room)
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    made = make_scratch_dir()
    try:
        assert len(made + SOCKET_NAME) <= MAX_SOCKET_PATH_CHARS
        assert (Path(made).parent == place) == (chars <= 79)
    finally:
        shutil.rmtree(made)
