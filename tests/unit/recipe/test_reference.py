"""Types of recipe keys are shown as a person reads them."""

from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from areal_hpc.recipe.reference import describe_type, list_keys, render_key_table


@pytest.mark.parametrize(
    ("annotation", "shown"),
    [
        (int, "int"),
        (Path, "path"),
        (bool | None, "bool or null"),
        (Annotated[int, Field(ge=1)], "int >= 1"),
        (Annotated[float, Field(gt=0, le=1)], "float > 0 and <= 1"),
        (Annotated[int, Field(ge=1)] | None, "int >= 1 or null"),
        (Annotated[int | None, Field(ge=2)], "int >= 2 or null"),
        (Literal["a", "b"], "one of a, b"),
        (tuple[str, ...] | None, "list of str or null"),
        (tuple[float, float], "[float, float]"),
        (dict[str, Any], "mapping of str to anything"),
        (tuple[Annotated[str, Field(pattern="^a|b$")], ...], "list of str like `^a|b$`"),
    ],
)
def test_a_type_is_shown_in_words(annotation: Any, shown: str) -> None:
    assert describe_type(annotation) == shown


def test_the_reference_shows_values_as_recipes_state_them() -> None:
    lines = render_key_table().splitlines()
    rows = {line.split(" | ")[0].strip("|` "): line for line in lines}
    assert "| int >= 1 or null | `null` |" in rows["cluster.slurm.time_limit_minutes"]
    assert "| bool | `true` |" in rows["cluster.slurm.requeue"]
    assert '| str | `""` |' in rows["rollout.should_accept"]
    assert (
        "| [float >= 0 and < 1, float >= 0 and < 1] | `[0.9, 0.95]` |"
        in rows["trainer.optimizer.betas"]
    )
    assert "| one of auto, cpu, cuda | `auto` |" in rows["trainer.device"]
    for word in ("Annotated", "FieldInfo", "Literal", "Optional", "typing"):
        assert not any(word in line for line in lines), word


def test_options_of_jobs_by_kind_are_one_row_a_kind() -> None:
    rows = [line for line in render_key_table().splitlines() if "cluster.slurm.jobs" in line]
    assert len(rows) == 5
    assert "`cluster.slurm.jobs.trainer.<option>`" in rows[1]
    assert "from `partition` to `setup`" in rows[1]
    assert "cluster.slurm.jobs.cell.partition" in list_keys(), "the keys themselves remain"
