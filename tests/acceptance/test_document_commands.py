"""The commands and scripts of AReaL's guides that train, each to the end of its run."""

from pathlib import Path

import pytest

from tests.support.document_commands import COMMANDS, SLOW
from tests.support.guide_commands import make_inputs, typed


@pytest.mark.timeout(400)
@pytest.mark.parametrize("key", [key for key, one in COMMANDS.items() if one.test == SLOW])
def test_a_command_of_the_guides_trains(key: str, tmp_path: Path) -> None:
    typed(key, tmp_path, make_inputs(tmp_path))
