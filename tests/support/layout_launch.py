"""Have the ranks of a parallel layout compared with transformers, and collect what they find."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from areal_hpc.rundir.paths import RunPaths
from tests.support.rank_server import RankServer

Findings = dict[str, dict[str, Any]]
"""What was found, by family."""


def launch(
    server: RankServer,
    folder: Path,
    parallel: dict[str, int],
    families: Sequence[str],
    others: Sequence[Path] = (),
) -> Findings:
    """One launch of one layout, every family in it; `others` are folders of earlier launches."""
    folder.mkdir()
    ranks = math.prod(size for name, size in parallel.items() if name != "ep")
    outcome = server.run(
        RunPaths(folder),
        "inspect",
        ranks,
        trainer={"parallel": parallel},
        inspect="tests.support.layout_worker:go_through",
        families=list(families),
        others=[str(other) for other in others],
    )
    assert outcome.codes == [0] * ranks, outcome.log
    return outcome.reports[0]
