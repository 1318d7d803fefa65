"""Start all ranks of a parallel layout, and collect what they find."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[3]
WORKER = "tests.integration.trainer.layout_worker"
RANKS_TIMEOUT_S = 240.0

Findings = dict[str, dict[str, Any]]
"""What was found, by family."""


def launch(
    folder: Path, parallel: dict[str, int], families: Sequence[str], others: Sequence[Path] = ()
) -> Findings:
    """One launch of one layout, every family in it.

    Args:
        folder: Made for commits, saved models and logs.
        parallel: Sizes, as in a recipe.
        families: Models to go through.
        others: Folders of earlier launches, whose commits are resumed from.
    """
    folder.mkdir()
    case = folder / "case.json"
    case.write_text(
        json.dumps(
            {
                "parallel": parallel,
                "folder": str(folder),
                "families": list(families),
                "others": [str(other) for other in others],
            }
        )
    )
    ranks = math.prod(size for name, size in parallel.items() if name != "ep")
    with (folder / "ranks.log").open("wb") as log:
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", WORKER, str(case)],
                cwd=REPOSITORY,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "AREAL_HPC_RANK": str(rank),
                    "AREAL_HPC_NUM_TASKS": str(ranks),
                },
                stdout=log,
                stderr=log,
            )
            for rank in range(ranks)
        ]
        try:
            codes = [process.wait(timeout=RANKS_TIMEOUT_S) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    assert codes == [0] * ranks, (folder / "ranks.log").read_text()[-5000:]
    found: Findings = json.loads((folder / "report.json").read_text())
    return found
