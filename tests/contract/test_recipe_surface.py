"""The keys of a recipe are part of the product: a change shows as a change of docs/recipe.md."""

from pathlib import Path

from areal_hpc.recipe.reference import render_key_table

REFERENCE = Path(__file__).parents[2] / "docs" / "recipe.md"


def test_the_key_reference_is_current() -> None:
    assert REFERENCE.read_text() == render_key_table(), (
        "run: areal-hpc recipe-keys > docs/recipe.md"
    )


def test_every_key_is_documented() -> None:
    assert "| None |" not in render_key_table()
