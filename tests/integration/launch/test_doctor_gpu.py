"""A step of `areal-hpc doctor --gpu` that fails on a rank."""

from dataclasses import replace
from pathlib import Path

import pytest

from areal_hpc.errors import ClusterError
from areal_hpc.launch.doctor.gpu import build_check_plan, list_rank_gpus, measure_collectives
from areal_hpc.recipe.sections.cluster import SlurmConfig
from tests.support.commands import write_program

pytestmark = pytest.mark.timeout(600)


def test_a_rank_that_fails_ends_the_others_and_says_why(tmp_path: Path) -> None:
    plan = build_check_plan(None, SlurmConfig(), "cpu")
    script = 'if [ "$AREAL_HPC_RANK" = 1 ]; then echo "CudaError: no kernel image"; exit 3; fi\n'
    python = write_program(tmp_path / "python", f"{script}exec sleep 300\n")
    broken = replace(plan, pythons={**plan.pythons, "train": str(python)})
    with pytest.raises(ClusterError, match="rank 1 exited with code 3: CudaError: no kernel image"):
        measure_collectives(broken, list_rank_gpus(broken, ()), tmp_path / "collectives")
