"""Types of recipe keys are shown as a person reads them."""

from areal_hpc.recipe.reference import list_keys, render_key_table


def test_the_reference_shows_values_as_recipes_state_them() -> None:
    lines = render_key_table().splitlines()
    rows = {line.split(" | ")[0].strip("|` "): line for line in lines}
    assert "| int >= 1 or null | `null` |" in rows["cluster.slurm.time_limit_minutes"]
    assert "| bool | `false` |" in rows["cluster.prometheus"]
    assert '| str | `""` |' in rows["rollout.should_accept"]
    assert (
        "| [float >= 0 and < 1, float >= 0 and < 1] | `[0.9, 0.95]` |"
        in rows["trainer.optimizer.betas"]
    )
    assert "| one of auto, cpu, cuda | `auto` |" in rows["trainer.device"]
    for word in ("Annotated", "FieldInfo", "Literal", "Optional", "typing"):
        assert not any(word in line for line in lines), word


def test_the_options_of_one_kind_of_job_are_one_row() -> None:
    rows = [line for line in render_key_table().splitlines() if "cluster.slurm.jobs" in line]
    assert len(rows) == 2
    assert "Those of `cluster.slurm` from `partition` to `setup`" in rows[1]
    assert "cluster.slurm.jobs.<name>.partition" in list_keys(), "the keys themselves remain"
