"""What is made of sbatch's refusals."""

import pytest

from areal_hpc.slurm.submit import is_temporary_refusal

POLICY = (
    "Batch job submission failed: Job violates accounting/QOS policy "
    "(job submit limit, user's size and/or time limits)"
)


@pytest.mark.parametrize(
    ("said", "is_temporary"),
    [
        (f"sbatch: error: QOSMaxSubmitJobPerUserLimit\nsbatch: error: {POLICY}", True),
        (f"sbatch: error: AssocGrpSubmitJobsLimit\nsbatch: error: {POLICY}", True),
        (f"sbatch: error: QOSMaxWallDurationPerJobLimit\nsbatch: error: {POLICY}", False),
        (f"sbatch: error: {POLICY}", True),
        ("sbatch: error: Batch job submission failed: Invalid account or account/partition", False),
        ("Resource temporarily unavailable", True),
    ],
)
def test_a_limit_of_jobs_passes_by_itself_and_others_do_not(said: str, is_temporary: bool) -> None:
    assert is_temporary_refusal(said) == is_temporary
