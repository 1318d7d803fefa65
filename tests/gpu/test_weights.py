"""Weights that leave a GPU: a group over NCCL, a model directory.

Two ranks share the GPU where NCCL allows it, for what needs a peer.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from areal_hpc.launch.doctor.gpu import build_check_plan, measure_collectives
from areal_hpc.recipe.sections.cluster import SlurmConfig
from areal_hpc.trainer.config import CollectiveRates
from tests.gpu.conftest import Device, RunWorker

pytestmark = pytest.mark.timeout(600)
SHARING_NCCL = (2, 30, 7)
"""The first NCCL that lets two ranks have one GPU, if NCCL_MULTI_RANK_GPU_ENABLE=1 asks for it."""


@pytest.fixture(scope="module")
def findings(
    run_worker: RunWorker, device: Device, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    report = tmp_path_factory.mktemp("weights") / "report.json"
    return run_worker(report, "tests.gpu.weights_worker", device, str(report))


def test_a_group_may_be_abandoned_in_a_send(findings: dict[str, Any]) -> None:
    assert findings["group"]["sent"] == 2
    assert findings["group"]["intact"]


def test_written_weights_are_those_of_the_device(findings: dict[str, Any]) -> None:
    assert findings["files"]["gap"] <= 1e-4
    assert findings["files"]["change"] > 10 * findings["files"]["gap"]


def test_two_ranks_exchange_over_nccl(device: Device, tmp_path: Path) -> None:
    plan = build_check_plan(None, SlurmConfig(), device)
    if device == "cpu":
        assert isinstance(measure_collectives(plan, ("", ""), tmp_path), CollectiveRates)
        return
    count, version = torch.cuda.device_count(), tuple(torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    if count == 1 and version < SHARING_NCCL:
        # NCCL refuses two ranks on one GPU: there is no peer.
        print(f"one GPU and NCCL {version}: collectives of two ranks are not tested here")
        return
    shared = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"} if count == 1 else {}
    variables = {**plan.variables, "train": plan.variables["train"] | shared}
    plan = replace(plan, variables=variables)
    rates = measure_collectives(plan, ("0", "0") if count == 1 else ("0", "1"), tmp_path)
    print(rates)
    assert isinstance(rates, CollectiveRates)
    assert rates.wrong_elements == 0
