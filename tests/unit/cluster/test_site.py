"""Sites: what wins over what, and what is refused."""

from pathlib import Path

import pytest
import yaml

from areal_hpc.errors import RecipeError
from areal_hpc.recipe.loading import load_recipe
from areal_hpc.recipe.sections.cluster import SlurmConfig
from tests.support.environments import CHECKOUT

QUICKSTART = CHECKOUT / "recipes" / "quickstart.yaml"


def site_file(folder: Path, **cluster: object) -> Path:
    path = folder / "site.yaml"
    path.write_text(yaml.safe_dump(cluster))
    return path


def test_options_of_a_kind_of_job_win_over_the_common_ones() -> None:
    slurm = SlurmConfig.model_validate(
        {"partition": "gpu", "mem": "8G", "jobs": {"cell": {"partition": "low"}}}
    )
    assert slurm.get_options("cell-12").partition == "low"
    assert slurm.get_options("cell-12").mem == "8G"
    assert slurm.get_options("trainer").partition == "gpu"


def test_the_sft_stage_has_the_trainers_options_unless_it_has_its_own() -> None:
    slurm = SlurmConfig.model_validate(
        {"jobs": {"trainer": {"qos": "long", "mem": "9G"}, "sft": {"mem": "1G"}}}
    )
    assert (slurm.get_options("sft").qos, slurm.get_options("sft").mem) == ("long", "1G")


def test_the_evaluation_job_has_the_cells_options_unless_it_has_its_own() -> None:
    slurm = SlurmConfig.model_validate(
        {"jobs": {"cell": {"partition": "low", "mem": "9G"}, "evaluation": {"mem": "1G"}}}
    )
    options = slurm.get_options("evaluation")
    assert (options.partition, options.mem) == ("low", "1G")
    assert slurm.get_options("cell-0").mem == "9G"


def test_options_survive_being_written_and_read() -> None:
    slurm = SlurmConfig.model_validate({"mem": "8G", "jobs": {"cell": {"time_limit_minutes": 5}}})
    again = SlurmConfig.model_validate(slurm.model_dump(mode="json"))
    assert again.get_options("cell-0") == slurm.get_options("cell-0")
    assert again.get_options("cell-0").mem == "8G"


def test_a_recipe_wins_over_its_site_and_the_command_line_over_both(tmp_path: Path) -> None:
    slurm = {"partition": "gpu", "qos": "low"}
    site = site_file(tmp_path, fileroot="/shared", stop_grace_s=20, slurm=slurm)
    recipe = load_recipe(QUICKSTART, ["cluster.slurm.qos=high"], site)
    assert recipe.cluster.fileroot == Path("runs"), "the recipe names one"
    assert recipe.cluster.stop_grace_s == 20
    assert (recipe.cluster.slurm.partition, recipe.cluster.slurm.qos) == ("gpu", "high")


def test_every_unknown_key_of_a_site_is_refused_with_its_file(tmp_path: Path) -> None:
    site = site_file(tmp_path, slurm={"partitoin": "gpu", "jobs": {"cell": {"memory": "1G"}}})
    with pytest.raises(RecipeError) as caught:
        load_recipe(QUICKSTART, (), site)
    keys = {problem.key for problem in caught.value.problems}
    assert keys == {f"{site}: slurm.partitoin", f"{site}: slurm.jobs.cell.memory"}
    assert "did you mean partition?" in str(caught.value)


def test_a_site_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no site file at"):
        load_recipe(QUICKSTART, (), tmp_path / "nowhere.yaml")


@pytest.mark.parametrize("path", sorted((CHECKOUT / "slurm" / "sites").glob("*.yaml")))
def test_every_shipped_site_fits_a_recipe(path: Path) -> None:
    assert load_recipe(QUICKSTART, (), path).cluster.slurm != SlurmConfig()


def test_a_container_needs_both_images() -> None:
    with pytest.raises(ValueError, match="one for `serve`"):
        SlurmConfig.model_validate({"container": {"kind": "pyxis", "train": "a.sqsh"}})


def test_the_network_becomes_variables_of_gloo_and_nccl() -> None:
    network = {"interface": "ib0", "hca": "mlx5_0", "nccl": {"NCCL_DEBUG": "INFO"}}
    assert SlurmConfig.model_validate({"network": network}).network.variables() == {
        "GLOO_SOCKET_IFNAME": "ib0",
        "NCCL_SOCKET_IFNAME": "ib0",
        "NCCL_IB_HCA": "mlx5_0",
        "NCCL_DEBUG": "INFO",
    }
    with pytest.raises(ValueError, match="LD_PRELOAD"):
        SlurmConfig.model_validate({"network": {"nccl": {"LD_PRELOAD": "x"}}})
