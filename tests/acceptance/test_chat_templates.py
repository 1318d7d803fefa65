"""Every chat template that TRL ships, in seven scenes: nothing is lost, refused or closed twice.

`scripts/setup_oracles.sh` installs TRL into `.venvs/oracles` (or `ORACLES_DIR`). Writes the table
of docs/chat-templates.md.
"""

import os
from pathlib import Path

import pytest

from tests.support import template_table
from tests.support.environments import CHECKOUT
from tests.support.tables import write_table

ORACLES = Path(os.environ.get("ORACLES_DIR", CHECKOUT / ".venvs" / "oracles"))
MIN_TEMPLATES = 60


@pytest.mark.timeout(900)
def test_templates_in_use_show_what_came_back_once() -> None:
    (folder,) = ORACLES.glob("lib/python3*/site-packages/trl/chat_templates")
    played = dict(template_table.play_templates(folder))
    assert len(played) >= MIN_TEMPLATES
    document = CHECKOUT / "docs" / "chat-templates.md"
    write_table(document, "templates", template_table.build_table(played))
