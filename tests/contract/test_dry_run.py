"""What `areal-hpc submit --dry-run` prints for three kinds of clusters does not move unseen."""

import pytest

from tests.golden.make_slurm import GOLDEN, SITES, describe


@pytest.mark.parametrize("site", SITES)
def test_the_dry_run_of_a_site_is_the_golden_one(site: str) -> None:
    golden = (GOLDEN / f"{site}.txt").read_text()
    assert describe(site) == golden, "look at it, then: python -m tests.golden.make_slurm"
