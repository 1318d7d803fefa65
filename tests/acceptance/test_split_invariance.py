"""Loss and gradient of one update, for every aggregation in every pack size and layout."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from areal_hpc.rundir.checkpoints import list_checkpoints, read_checkpoint_index
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.trainer.checkpoints.stored_tensors import (
    Box,
    open_stored_tensors,
    split_into_matrices,
)
from tests.support.rank_server import RankServer, rank_server
from tests.support.recorded_run import record_run
from tests.support.replayed_run import copy_for_mixture, train_copy
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
BOUNDS = {"gradient": 2e-6, "grad_norm": 2e-6, "loss": 1e-5}
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
    return copy_for_mixture(stale, tmp_path_factory.mktemp("mixture") / "run")


def read_first_moments(paths: RunPaths) -> dict[str, torch.Tensor]:
    """AdamW's first moments in the only checkpoint, whole: of one step, its gradient in part."""
    (checkpoint,) = list_checkpoints(paths.checkpoints_dir)
    moments = {}
    with open_stored_tensors(checkpoint.path) as stored:
        for name, tensor in read_checkpoint_index(checkpoint.path).tensors.items():
            moments[name] = torch.zeros(tensor.shape)
            for box in split_into_matrices(Box((0,) * len(tensor.shape), tensor.shape)):
                stored.read_block("exp_avg", name, box, moments[name][box.slices])
    return moments


@dataclass(frozen=True)
class Update:
    line: dict[str, float]
    """Metrics of the update."""
    moments: dict[str, torch.Tensor]
    """Gradient of the update, divided by the divisors of clipping and AdamW."""

    def measure_gap(self, expected: "Update") -> float:
        """Compute the distance of two gradients, relative to the expected one's length."""
        assert self.moments.keys() == expected.moments.keys()
        gaps, lengths = 0.0, 0.0
        for name, moment in self.moments.items():
            other = expected.moments[name]
            if moment.shape != other.shape:  # the vocabulary is padded for the layout
                shared = min(len(moment), len(other))
                assert not any(rest.any() for rest in (moment[shared:], other[shared:]))
                moment, other = moment[:shared], other[:shared]
            gaps += float((moment.double() - other.double()).square().sum())
            lengths += float(other.double().square().sum())
        return math.sqrt(gaps / lengths)


def update(
    ranks: RankServer,
    source: Path,
    folder: Path,
    objective: dict[str, Any],
    max_tokens: int,
    parallel: dict[str, int],
) -> Update:
    more = {"max_tokens_per_microbatch": max_tokens}
    (line,) = train_copy(
        ranks, source, folder, objective,
        parallel=parallel, steps=1, minibatches=1, more=more,
    )  # fmt: skip
    return Update(line, read_first_moments(RunPaths(folder)))


@pytest.mark.parametrize("objective", AGGREGATIONS, ids=lambda setting: setting["loss_agg"])
@pytest.mark.parametrize("model", ["dense", "mixture"])
def test_no_split_changes_an_update(
    ranks: RankServer, request: pytest.FixtureRequest, tmp_path: Path, objective: dict[str, Any],
    model: str,
) -> None:  # fmt: skip
    source: Path = request.getfixturevalue("stale" if model == "dense" else "mixture")
    layouts = DENSE if model == "dense" else MIXTURE
    expected = update(ranks, source, tmp_path / "whole", objective, MAX_TOKENS[-1], {})
    assert expected.line["tokens/sampled"] > MAX_TOKENS[1]  # so each size packs in another way
    apart: dict[str, dict[str, float]] = {name: {} for name in BOUNDS}
    for name, parallel in layouts.items():
        for max_tokens in MAX_TOKENS:
            folder = tmp_path / f"{name}-{max_tokens}"
            actual = update(ranks, source, folder, objective, max_tokens, parallel)
            assert actual.line["tokens/sampled"] == expected.line["tokens/sampled"]
            for key in ("grad_norm", "loss"):
                gap = abs(actual.line[key] / expected.line[key] - 1)
                apart[key][f"{name}, {max_tokens}"] = gap
            apart["gradient"][f"{name}, {max_tokens}"] = actual.measure_gap(expected)
    add_results("split_invariance", **{f"{model}, {objective['loss_agg']}": apart})
    for key, sizes in apart.items():
        assert {name: size for name, size in sizes.items() if size > BOUNDS[key]} == {}, key
