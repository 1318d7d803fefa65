"""Loss and gradient of one update, for every aggregation in every pack size and layout."""

import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from areal_hpc.rundir.jsonl import read_lines
from areal_hpc.rundir.paths import RunPaths
from tests.support.rank_server import RankServer, rank_server
from tests.support.recorded_run import record_run
from tests.support.reference_models import by_checkpoint_name, hf_model
from tests.support.results import add_results

pytestmark = pytest.mark.timeout(1200)
AGGREGATIONS: tuple[dict[str, Any], ...] = (
    {"loss_agg": "token_mean"},
    {"loss_agg": "seq_mean_token_mean"},
    {"loss_agg": "seq_mean_token_sum"},
    {"loss_agg": "seq_mean_token_sum_norm", "loss_scale_tokens": 9},
)
MAX_TOKENS = (96, 256, 100_000)
DENSE: dict[str, dict[str, int]] = {
    "1": {}, "dp2": {"dp": 2}, "tp2": {"tp": 2}, "pp2": {"pp": 2}, "cp2": {"cp": 2},
}  # fmt: skip
MIXTURE: dict[str, dict[str, int]] = {"1": {}, "dp2ep2": {"dp": 2, "ep": 2}}
BOUNDS = {"grad_norm": 2e-6, "loss": 1e-5}
"""Relative. Advantages of a group cancel in the loss of seq_mean_token_mean: what is left of it is
small against its terms, and so are the digits that float32 leaves."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankServer]:
    with rank_server() as server:
        yield server


@pytest.fixture(scope="module")
def stale(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_run(tmp_path_factory.mktemp("stale"), 1, oldest=2, groups=8).root


@pytest.fixture(scope="module")
def mixture(stale: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same batch for a mixture of experts."""
    root = shutil.copytree(stale, tmp_path_factory.mktemp("mixture") / "run")
    model, folder = hf_model("qwen3_moe"), RunPaths(root).tiny_model_dir
    model.config.save_pretrained(folder)
    weights = by_checkpoint_name(model.state_dict())
    save_file(
        {name: one.contiguous() for name, one in weights.items()}, folder / "model.safetensors"
    )
    return root


def update(
    ranks: RankServer,
    source: Path,
    folder: Path,
    objective: dict[str, Any],
    max_tokens: int,
    parallel: dict[str, int],
) -> dict[str, float]:
    """The record of a step that is one update."""
    paths = RunPaths(shutil.copytree(source, folder))
    settings = {
        "total_steps": 1, "parallel": parallel, "objective": objective,
        "max_tokens_per_microbatch": max_tokens,
    }  # fmt: skip
    size = math.prod(count for name, count in parallel.items() if name != "ep")
    outcome = ranks.run(paths, "replay", size, trainer=settings)
    assert outcome.codes == [0] * size, outcome.log
    (line,) = read_lines(paths.metrics)
    return line


@pytest.mark.parametrize("objective", AGGREGATIONS, ids=lambda one: one["loss_agg"])
@pytest.mark.parametrize("model", ["dense", "mixture"])
def test_no_split_changes_an_update(
    ranks: RankServer, request: pytest.FixtureRequest, tmp_path: Path, objective: dict[str, Any],
    model: str,
) -> None:  # fmt: skip
    source: Path = request.getfixturevalue("stale" if model == "dense" else "mixture")
    layouts = DENSE if model == "dense" else MIXTURE
    expected = update(ranks, source, tmp_path / "whole", objective, MAX_TOKENS[-1], {})
    assert expected["tokens/sampled"] > MAX_TOKENS[1]  # so each size packs in another way
    apart: dict[str, dict[str, float]] = {name: {} for name in BOUNDS}
    for name, parallel in layouts.items():
        for max_tokens in MAX_TOKENS:
            folder = tmp_path / f"{name}-{max_tokens}"
            found = update(ranks, source, folder, objective, max_tokens, parallel)
            assert found["tokens/sampled"] == expected["tokens/sampled"]
            for one, sizes in apart.items():
                sizes[f"{name}, {max_tokens}"] = abs(found[one] / expected[one] - 1)
    add_results("split_invariance", **{f"{model}, {objective['loss_agg']}": apart})
    for one, sizes in apart.items():
        assert {name: size for name, size in sizes.items() if size > BOUNDS[one]} == {}, one
