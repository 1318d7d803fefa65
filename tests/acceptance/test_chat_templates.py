"""Every chat template that TRL ships, in seven scenes: nothing is lost, refused or closed twice.

`scripts/setup_oracles.sh` installs TRL into `.venvs/oracles` (or `ORACLES_DIR`). Writes the table
of docs/chat-templates.md.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_hpc.errors import RecipeError
from tests.support.environments import CHECKOUT
from tests.support.results import matrix, write_table
from tests.support.template_scenes import SCENES, build_template_and_encoder, play_scene

ORACLES = Path(os.environ.get("ORACLES_DIR", CHECKOUT / ".venvs" / "oracles"))
MIN_TEMPLATES = 60


@pytest.mark.timeout(900)
def test_templates_in_use_show_what_came_back_once() -> None:
    (folder,) = ORACLES.glob("lib/python3*/site-packages/trl/chat_templates")
    paths = sorted(folder.glob("*.jinja"))
    assert len(paths) >= MIN_TEMPLATES
    names_by_outcomes: dict[tuple[str, ...], list[str]] = {}
    for path in paths:
        source = path.read_text()
        outcomes = tuple(", ".join(dict.fromkeys(play(source, scene))) for scene in SCENES)
        names_by_outcomes.setdefault(outcomes, []).append(f"`{path.stem}`")
    rows = {
        ", ".join(names): dict(zip(SCENES, outcomes, strict=True))
        for outcomes, names in names_by_outcomes.items()
    }
    write_table("chat-templates.md", "templates", matrix("template", rows))


def play(source: str, scene: str) -> Iterator[str]:
    """What each turn of a scene comes to."""
    template, _ = build_template_and_encoder(source)
    uses_tools = any(message["role"] == "tool" for message in SCENES[scene])
    try:
        template.require_messages(with_tools=uses_tools)
    except RecipeError:
        yield "refused at start"
        return
    for turn in play_scene(source, SCENES[scene]):
        assert (turn.is_spliced, turn.lost, turn.is_closed_twice) == (True, [], False)
        assert turn.outcome != "other"
        yield turn.outcome
