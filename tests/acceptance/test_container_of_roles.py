"""A run whose trainer and cell are jobs of Slurm in a container of Apptainer itself."""

from pathlib import Path

import pytest

from areal_hpc.rundir.jsonl import read_readable_records
from areal_hpc.sandbox.runtimes import find_installed_runtimes
from tests.support.commands import audit_of, said_by
from tests.support.devclusters import Submitting, devcluster
from tests.support.environments import CHECKOUT, python_of

pytestmark = pytest.mark.timeout(1500)

RUN_TIMEOUT_S = 1200.0
FOLDERS = ("usr", "etc", "proc", "sys", "dev", "tmp", "var/tmp", "root", "home", "run", "opt")


def make_image(place: Path) -> Path:
    """A folder as an image: empty but for the links of this machine's root, which mounts fill."""
    for name in FOLDERS:
        (place / name).mkdir(parents=True)
    for link in filter(Path.is_symlink, Path("/").iterdir()):
        (place / link.name).symlink_to(link.readlink())
    return place


def test_a_run_in_a_container_trains_and_every_process_of_it_is_inside(tmp_path: Path) -> None:
    assert "apptainer" in find_installed_runtimes(), "make slurm-roots unpacks it"
    image = make_image(tmp_path / "image")
    environments = (CHECKOUT / ".venvs").resolve()
    mounts = ["/usr:/usr:ro", "/etc:/etc:ro", f"{environments}:{environments}:ro"]
    container = f"{{kind: apptainer, train: {image}, serve: {image}, mounts: {mounts}}}"
    pythons = [f"cluster.{role}.python={python_of('main')}" for role in ("train", "agents")]
    with devcluster(tmp_path / "state", "--nodes=2") as cluster:
        run = Submitting(cluster, tmp_path / "runs")
        said_by(
            run.submit(
                f"cluster.slurm.container={container}",
                *pythons,
                f"cluster.serve.python={python_of('serve')}",
                # As a user does: root would ask for rights that this machine's root may lack.
                "cluster.slurm.setup=[export OMP_NUM_THREADS=1 APPTAINER_USERNS=1]",
                "inference.cells=1",
                "trainer.parallel.dp=1",
                "--wait",
                timeout_s=RUN_TIMEOUT_S,
            )
        )
        assert "duplicates=0 lost=0 " in audit_of(run.paths.root, cluster.environ)
    steps = [row["step"] for row in read_readable_records(run.paths.metrics)]
    assert steps[-1] == 5
    script = run.paths.job("trainer").script.read_text()
    assert "apptainer exec" in script
