"""The GPU tier's worker of weights, run on the CPU over gloo: only the device differs."""

from collections.abc import Callable

import pytest

from tests.support.weights_bounds import WEIGHT_CHECKS, Findings, run_weights_worker

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> Findings:
    return run_weights_worker("cpu", tmp_path_factory.mktemp("weights") / "report.json")


@pytest.mark.parametrize("check", WEIGHT_CHECKS, ids=lambda check: check.__name__)
def test_on_the_cpu(check: Callable[[Findings], None], findings: Findings) -> None:
    check(findings)
