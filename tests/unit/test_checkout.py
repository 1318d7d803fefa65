"""Hints name commands that exist where the package stands."""

from pathlib import Path

import pytest

from areal_hpc import checkout
from areal_hpc.checkout import format_python_hint, get_shipped_dir
from tests.support.environments import CHECKOUT

CAMEL = ".venvs/camel/bin/python"


def test_in_a_checkout_scripts_make_the_environments() -> None:
    assert get_shipped_dir() == CHECKOUT
    assert format_python_hint(".venvs/serve/bin/python", "serve") == "make setup"
    assert format_python_hint("/no/such/python", "main") == "make setup"
    assert format_python_hint(CAMEL, "main") == "scripts/setup.sh camel"
    script = (CHECKOUT / "scripts" / "setup.sh").read_text()
    assert "camel" in script, "it makes that one"


def test_in_a_wheel_pip_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkout, "PACKAGE_DIR", tmp_path / "site-packages" / "areal_hpc")
    assert get_shipped_dir() == tmp_path / "site-packages" / "areal_hpc" / "shipped"
    assert format_python_hint("python", "serve") == 'pip install "areal-hpc[serve]"'
    assert format_python_hint(CAMEL, "main") == 'pip install "areal-hpc[camel]"'
