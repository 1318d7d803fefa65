"""Options of Slurm: what wins over what, and what is refused."""

from typing import Any

import pytest

from areal_hpc.recipe.sections.cluster import SlurmConfig

KINDS = {
    "jobs": {
        "trainer": {"partition": "a", "sbatch": {"mem": "9G"}},
        "sft": {"sbatch": {"mem": "1G"}},
        "cell": {"partition": "low", "sbatch": {"mem": "8G"}},
        "evaluation": {"sbatch": {"mem": "2G"}},
    }
}
"""SFT would have what the trainer has, the evaluation what a cell has."""


@pytest.mark.parametrize(
    ("slurm", "job", "partition", "mem"),
    [
        (
            {"sbatch": {"mem": "8G"}, "jobs": {"cell": {"partition": "low"}}},
            *("cell-12", "low", "8G"),
        ),
        ({"partition": "gpu", "jobs": {"cell": {"partition": "low"}}}, "trainer", "gpu", None),
        (KINDS, "sft", "a", "1G"),
        (KINDS, "evaluation", "low", "2G"),
        (KINDS, "cell-0", "low", "8G"),
    ],
)
def test_options_of_a_kind_of_job_win_over_those_that_it_would_have_without(
    slurm: dict[str, Any], job: str, partition: str, mem: str | None
) -> None:
    config = SlurmConfig.model_validate(slurm)
    options = config.get_options_of_job(job)
    assert (options.partition, options.sbatch.get("mem")) == (partition, mem)
    again = SlurmConfig.model_validate(config.model_dump(mode="json"))
    assert again.get_options_of_job(job) == options, "written and read"


def test_a_container_needs_both_images() -> None:
    with pytest.raises(ValueError, match="one for `serve`"):
        SlurmConfig.model_validate({"container": {"kind": "pyxis", "train": "a.sqsh"}})


def test_the_network_becomes_variables_of_gloo_and_nccl() -> None:
    network = {"interface": "ib0", "nccl": {"NCCL_DEBUG": "INFO"}}
    assert SlurmConfig.model_validate(
        {"network": network}
    ).network.build_environment_variables() == {
        "GLOO_SOCKET_IFNAME": "ib0",
        "NCCL_SOCKET_IFNAME": "ib0",
        "NCCL_DEBUG": "INFO",
    }
    with pytest.raises(ValueError, match="LD_PRELOAD"):
        SlurmConfig.model_validate({"network": {"nccl": {"LD_PRELOAD": "x"}}})
