"""The table of docs/areal-documents.md; `tests.support.generated_tables` renews it."""

from tests.support.document_commands import COMMANDS, SMALL
from tests.support.document_scenes import SCENES
from tests.support.documents import Block, blocks
from tests.support.tables import markdown

REAL = "tests/integration/agents/documents/test_documents.py"
SETTINGS = "tests/acceptance/test_documents.py"
DRAWING = "a drawing"


def test_of(block: Block) -> str:
    """The file that runs a block; empty if none does."""
    if block.key in SCENES:
        return REAL
    if block.key in COMMANDS:
        return COMMANDS[block.key].test
    return SETTINGS if block.language == "yaml" else ""


def how_of(block: Block) -> str:
    """What the test does with it."""
    if block.key in COMMANDS:
        return COMMANDS[block.key].how
    return {"python": "runs", "yaml": "translates"}.get(block.language, "")


def patches_of(block: Block) -> list[str]:
    """Why it had to be changed, each reason once."""
    command = COMMANDS.get(block.key)
    scene = command or SCENES.get(block.key)
    reasons = [patch.why for patch in scene.patches] if scene else []
    return list(dict.fromkeys(reasons + ([SMALL] if command and command.how == "trains" else [])))


def table() -> str:
    """One row a block."""
    rows = []
    for block in blocks():
        patches, how = "; ".join(patches_of(block)), how_of(block)
        test = test_of(block)
        beginning = block.beginning.replace("|", "\\|").replace("`", "'")[:60]
        shown = f"`{test}`"
        # A command names files of AReaL's checkout; as code it would claim that they are here.
        beginning = beginning if block.language == "command" else f"`{beginning}`"
        if block.language == "drawing":
            beginning, shown = DRAWING, ""
        rows.append((block.key, block.language, beginning, how, shown, patches))
    return markdown(("block", "language", "begins", "how", "test", "patches"), rows)
