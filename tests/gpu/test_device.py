"""The trainer on a GPU: flash attention, bfloat16, NCCL, the sizes of Qwen2.5-0.5B."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.device_bounds import (
    CHECKS,
    Findings,
    benchmarks_tell_their_figures,
    run_benchmarks,
    run_worker,
)

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> Findings:
    found = run_worker("cuda", tmp_path_factory.mktemp("device") / "report.json")
    print(json.dumps(found, indent=1))
    return found


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_the_gpu(check: Callable[[Findings], None], findings: Findings) -> None:
    check(findings)


def test_no_float32_copy_of_the_logits_is_ever_made(findings: Findings) -> None:
    kept = findings["logprobs"]["bfloat16"]
    assert kept["extra_bytes"] < kept["float32_copy_bytes"] / 4


def test_the_benchmarks_run(tmp_path: Path) -> None:
    benchmarks_tell_their_figures(run_benchmarks("cuda", tmp_path))
