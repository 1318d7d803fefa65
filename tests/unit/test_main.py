"""What the command line makes of a terminal and of storage that are not as they should be."""

import errno
import io
import os
import sys
from pathlib import Path

import pytest

from areal_hpc import __main__
from areal_hpc.cli.main import main
from areal_hpc.recipe import reference
from areal_hpc.view.dashboard import report


def test_characters_that_a_locale_lacks_are_spelled_out(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(reference, "render_key_table", lambda: "a │ b\n")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="latin-1"))
    with pytest.raises(SystemExit) as ended:
        main(["recipe-keys"])
    sys.stdout.flush()
    assert (ended.value.code, written.getvalue()) == (0, b"a \\u2502 b\n")


def test_full_storage_is_an_error_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fill_disk(runs: object, out: Path, cache_dir: Path) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "recipe.yaml").touch()
    monkeypatch.setattr(report, "write_report", fill_disk)
    with pytest.raises(SystemExit) as ended:
        main(["report", str(tmp_path), "--out", str(tmp_path / "report.html")])
    assert ended.value.code == 75
    assert capsys.readouterr().err.startswith("error: No space left on device\n  try: make room")


def test_ctrl_c_ends_any_command_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt() -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(reference, "render_key_table", interrupt)
    monkeypatch.setattr(sys, "argv", ["areal-hpc", "recipe-keys"])
    with pytest.raises(SystemExit) as ended:
        __main__.main()
    assert (ended.value.code, capsys.readouterr().err) == (130, "interrupted\n")
