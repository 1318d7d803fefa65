"""Weights that leave a GPU: a group over NCCL, a model directory.

Two ranks share the GPU where NCCL allows it, for what needs a peer.
"""

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from areal_hpc.launch.doctor.gpu.plan import build_check_plan
from areal_hpc.launch.doctor.gpu.steps import measure_collectives
from areal_hpc.recipe.sections.cluster import SlurmConfig
from areal_hpc.trainer.config import CollectiveRates
from tests.support.weights_bounds import (
    WEIGHT_CHECKS,
    Findings,
    run_weights_worker,
)

pytestmark = pytest.mark.timeout(600)
SHARING_NCCL = (2, 30, 7)
"""The first NCCL that lets two ranks have one GPU, if NCCL_MULTI_RANK_GPU_ENABLE=1 asks for it."""


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> Findings:
    found = run_weights_worker("cuda", tmp_path_factory.mktemp("weights") / "report.json")
    print(json.dumps(found, indent=1))
    return found


@pytest.mark.parametrize("check", WEIGHT_CHECKS, ids=lambda check: check.__name__)
def test_on_the_gpu(check: Callable[[Findings], None], findings: Findings) -> None:
    check(findings)


def test_two_ranks_exchange_over_nccl(tmp_path: Path) -> None:
    count, version = torch.cuda.device_count(), tuple(torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    if count == 1 and version < SHARING_NCCL:
        # NCCL refuses two ranks on one GPU: there is nobody to exchange with.
        print(f"one GPU and NCCL {version}: collectives of two ranks are not tested here")
        return
    plan = build_check_plan(None, SlurmConfig(), "cuda", 0)
    shared = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"} if count == 1 else {}
    variables = {**plan.variables, "train": plan.variables["train"] | shared}
    plan = msgspec.structs.replace(plan, variables=variables)
    rates = measure_collectives(plan, ("0", "0") if count == 1 else ("0", "1"), tmp_path)
    print(rates)
    assert isinstance(rates, CollectiveRates)
    assert rates.wrong_elements == 0
