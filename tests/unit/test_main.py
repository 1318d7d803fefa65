"""What the command line makes of a terminal and of storage that are not as they should be."""

import io
import sys

import pytest

from areal_hpc.cli.main import main
from areal_hpc.recipe import reference


def test_characters_that_a_locale_lacks_are_spelled_out(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(reference, "render_key_table", lambda: "a │ b\n")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="latin-1"))
    with pytest.raises(SystemExit) as ended:
        main(["recipe-keys"])
    sys.stdout.flush()
    assert (ended.value.code, written.getvalue()) == (0, b"a \\u2502 b\n")
