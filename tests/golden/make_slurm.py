"""Writes tests/golden/slurm/: python -m tests.golden.make_slurm."""

from pathlib import Path

from areal_hpc.launch.slurm_launcher import build_remaining_job_requests, format_dry_run
from areal_hpc.recipe.loading import load_recipe
from areal_hpc.rundir.paths import RunPaths

CHECKOUT = Path(__file__).parents[2]
GOLDEN = Path(__file__).with_name("slurm")
SITES = ("plain", "apptainer", "pyxis")
WORKING_FOLDER = Path("/home/ada/project")

NARROWER = {
    "apptainer": ("inference.replicas_per_cell=1", "trainer.parallel.tp=4", "trainer.parallel.ep=4")
}
"""As many nodes where a node has four GPUs and not eight."""


def describe(site: str) -> str:
    """What `areal-hpc submit --dry-run` prints for a site."""
    where = CHECKOUT / "slurm" / "sites" / f"{site}.yaml"
    recipe = load_recipe(GOLDEN / "recipe.yaml", NARROWER.get(site, ()), where)
    paths = RunPaths(recipe.run_dir.resolve())
    return format_dry_run(paths, build_remaining_job_requests(recipe, WORKING_FOLDER))


if __name__ == "__main__":
    for site in SITES:
        (GOLDEN / f"{site}.txt").write_text(describe(site))
