"""The table of docs/chat-templates.md: prompts of templates in use against their own rendering."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from areal_hpc.errors import RecipeError
from tests.support.tables import markdown
from tests.support.template_scenes import SCENES, build_template_and_encoder, play_scene

REFUSED = "refused at start"


def play_templates(folder: Path) -> Iterator[tuple[str, dict[str, list[str]]]]:
    """What each turn of each scene comes to, by template; AssertionError for one that is wrong."""
    for path in sorted(folder.glob("*.jinja")):
        source = path.read_text()
        yield path.stem, {scene: [*_play(source, scene)] for scene in SCENES}


def _play(source: str, scene: str) -> Iterator[str]:
    template, _ = build_template_and_encoder(source)
    uses_tools = any(message["role"] == "tool" for message in SCENES[scene])
    try:
        template.require_messages(with_tools=uses_tools)
    except RecipeError:
        yield REFUSED
        return
    for turn in play_scene(source, SCENES[scene]):
        assert (turn.is_spliced, turn.lost, turn.is_closed_twice) == (True, [], False)
        assert turn.outcome != "other"
        yield turn.outcome


def build_table(played: Mapping[str, Mapping[str, Sequence[str]]]) -> str:
    """Rows of templates that come to the same, by scene."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, scenes in played.items():
        cells = tuple(", ".join(dict.fromkeys(scenes[scene])) for scene in SCENES)
        rows.setdefault(cells, []).append(f"`{name}`")
    return markdown(
        ["template", *SCENES], [[", ".join(names), *cells] for cells, names in rows.items()]
    )
