"""Parallel layouts that are compared with transformers, the bounds, and a launch of one of them."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from areal_hpc.rundir.paths import RunPaths
from tests.support.rank_server import RankServer
from tests.support.reference_models import ADAPTERS, SIZES, TRANSFORMERS_CONFIGS

MIXTURE = "qwen3_moe"
MIXTURES = (MIXTURE, "glm4_moe")
FAMILIES = ("llama", "qwen2", "qwen3", *MIXTURES)
LAYOUTS: dict[str, dict[str, int]] = {
    "1": {},
    "TP2": {"tp": 2},
    "PP2": {"pp": 2},
    "CP2": {"cp": 2},
    "DP2": {"dp": 2},
    "TP2 x PP2": {"tp": 2, "pp": 2},
    "TP2 x CP2": {"tp": 2, "cp": 2},
    "DP2, EP2": {"dp": 2, "ep": 2},
    "TP2, EP2": {"tp": 2, "ep": 2},
    "DP2 sharded": {"dp": 2, "shard_parameters": True},
    "1, 3 layers": {"layers": 3},
    "PP2, 3 layers": {"pp": 2, "layers": 3},
}
"""Parallel sizes by the name the document gives them. EP spreads ranks that are there anyway."""
UNDIVIDED_LAYOUTS = ("1", "CP2", "DP2", "DP2 sharded")
"""Those of networks of transformers' own modules."""
STATE_FAMILIES = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
"""A row of these lies on one rank."""
LOGPROB_BOUND = 1e-5
GRADIENT_BOUND = 1e-4
NORM_BOUND = 1e-5
RESUME_BOUND = 1e-6
Findings = dict[str, dict[str, Any]]


def families_of(*layouts: str) -> list[str]:
    """List families that all of these layouts support: expert parallelism is for mixtures only."""
    if any("ep" in LAYOUTS[layout] for layout in layouts):
        return [*MIXTURES]
    if not set(layouts) <= set(UNDIVIDED_LAYOUTS):
        return [*FAMILIES]
    divided = STATE_FAMILIES if "CP2" in layouts else ()
    undivided: list[str] = [*TRANSFORMERS_CONFIGS]
    if "DP2 sharded" not in layouts:
        undivided = [*FAMILIES, *undivided, *ADAPTERS]
    return [family for family in undivided if family.split()[0] not in divided]


def launch(
    server: RankServer,
    folder: Path,
    layout: dict[str, int],
    families: Sequence[str],
    others: Sequence[Path] = (),
) -> Findings:
    """Launch one layout with every family in it; `others` are folders of earlier launches."""
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


def check_routed(findings: dict[str, Any]) -> None:
    """Check that mixtures with given routes agree with transformers on the same routes."""
    for routed in findings.get("routed", ()):
        assert routed["rerouted"] > 0.5
        assert routed["logprob_gap"] <= LOGPROB_BOUND
        assert routed["gradient_gap"] <= GRADIENT_BOUND
