"""The tables of docs/migrating-from-areal.md: `python -m tests.contract.migration_table`."""

from __future__ import annotations

from pathlib import Path

from areal_hpc.areal_config.translation import RULES

DOCUMENT = Path(__file__).parents[2] / "docs" / "migrating-from-areal.md"
BEGIN, END = "<!-- table: keys -->", "<!-- end of table -->"


def describe_rules() -> str:
    """Every key that is known, with what it becomes, as a Markdown table."""
    lines = ["| AReaL | here |", "|---|---|"]
    return "\n".join([*lines, *(f"| `{rule.key}` | {rule.here} |" for rule in RULES.values())])


def renewed(document: str) -> str:
    """The document with the table of today."""
    before, _, rest = document.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{describe_rules()}\n{END}{after}"


if __name__ == "__main__":
    DOCUMENT.write_text(renewed(DOCUMENT.read_text()))
