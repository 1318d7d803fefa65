"""The table of AReaL's keys, read off the rules."""

from __future__ import annotations

from areal_hpc.areal_config.translation import RULES


def describe_rules() -> str:
    """Every key that is known, with what it becomes, as a Markdown table."""
    lines = ["| AReaL | here |", "|---|---|"]
    return "\n".join([*lines, *(f"| `{rule.key}` | {rule.here} |" for rule in RULES.values())])
