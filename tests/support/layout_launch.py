"""Have the ranks of a parallel layout compared with transformers, and collect what they find."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from areal_hpc.rundir.paths import RunPaths
from tests.support.rank_server import RankServer
from tests.support.reference_models import SIZES

Findings = dict[str, dict[str, Any]]
"""What was found, by family."""


def launch(
    server: RankServer,
    folder: Path,
    layout: dict[str, int],
    families: Sequence[str],
    others: Sequence[Path] = (),
) -> Findings:
    """One launch of one layout, every family in it; `others` are folders of earlier launches."""
    folder.mkdir()
    layers = layout.get("layers", SIZES["num_hidden_layers"])
    parallel = {name: size for name, size in layout.items() if name != "layers"}
    ranks = math.prod(size for name, size in parallel.items() if name != "ep")
    outcome = server.run(
        RunPaths(folder),
        "inspect",
        ranks,
        trainer={"parallel": parallel},
        inspect="tests.support.layout_worker:go_through",
        families=list(families),
        layers=layers,
        others=[str(other) for other in others],
    )
    assert outcome.codes == [0] * ranks, outcome.log
    return outcome.reports[0]
